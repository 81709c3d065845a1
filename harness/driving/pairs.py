"""Which target and draft folders stand for a scenario's checkpoint: the tiny ones made on the spot, or the user's own.

What the user's files show is refused before torch is imported (`own_pair`); the rest here by the reference, before an
engine is booted: what it can compute is accepted, whatever it is called. This module must not import torch by itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from cases import checkpoints
from harness.contract.providers import AUTO
from harness.contract.scenario import Scenario
from harness.contract.usage import UsageError
from harness.driving.checkpoint_files import OWN
from harness.driving.own_pair import OwnPair
from harness.driving.place import CPU, Place
from harness.driving.tiny_pairs import root


class NoProviderError(UsageError):
    """A pair that no provider of rows knows: whether the witness judges it is another question. why: what each said."""

    def __init__(self, *, asked: str, why: str) -> None:
        super().__init__(
            f"--reference {asked} does not know this pair: {why}\n  --reference witness needs no knowledge"
        )
        self.why = why


def load_now(pair: OwnPair, *, assumed: tuple[str, ...] = (), place: Place = CPU, provider: str = AUTO) -> str:
    """Read the user's pair as the reference will, before any engine is booted for it; why its target is not ours.

    NoProviderError where it is of a kind that is not built; UsageError where it is damaged.
    """
    from harness.driving.judging import load_ahead
    from reference.checkpoint import CheckpointError, DamagedError  # torch

    try:
        return load_ahead(*pair.folders, assumed, place, provider)
    except DamagedError as error:
        raise UsageError(f"--target and --draft cannot be used: {error}\n  {OWN}") from error
    except CheckpointError as error:
        raise NoProviderError(asked=provider, why=str(error)) from error


def checkpoint_pairs(
    scenarios: Iterable[Scenario], *, device: str = "cpu", own: OwnPair | None = None
) -> dict[str, tuple[Path, Path]]:
    """(target, draft) folders for every checkpoint the scenarios name, made on the spot unless it is the user's own.

    On a device whose kernels are not built for a pair, the pair made for it instead (see cases.checkpoints).
    """
    named = sorted({scenario.checkpoint for scenario in scenarios})
    if own is not None:
        return dict.fromkeys(named, own.folders)
    for name in named:
        if why := checkpoints.UNFIT.get((name, device)):
            raise UsageError(
                f"the tiny pair {name!r} cannot run on {device}: {why}\n  leave --device {device} out: it runs on a CPU"
            )
    try:
        made = {name: checkpoints.make(checkpoints.on_device(name, device), root()) for name in named}
    except OSError as error:
        raise UsageError(
            f"cannot make checkpoints in {root()}: {error.strerror}\n"
            "  name a folder that can be written:  export EAGLECHECK_HOME=/path/with/space"
        ) from error
    return {name: (pair.target, pair.draft) for name, pair in made.items()}
