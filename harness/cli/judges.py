"""Who judges a run, and where the reference computes: what was asked for, or refused with the numbers.

It must not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import psutil

from harness.both_sides import gpus, leases
from harness.contract.providers import AUTO, WITNESS
from harness.contract.scenario import Scenario
from harness.contract.usage import UsageError
from harness.driving.footprint import CONTEXT_MIB, WORKSPACE_MIB, Footprint, footprint, kept_a_row
from harness.driving.judging import NoProviderError, load_now
from harness.driving.own_pair import OwnPair
from harness.driving.plan import CPU, Place
from harness.driving.refusals import first_refusal, unpredicted, unwitnessed
from harness.engines.launch import dtype_on

Say = Callable[[str], None]

#: MiB that a reference must take for its memory to be said: loading less takes no time, and fits anywhere.
WORTH_SAYING = 256


def provider(
    asked: str,
    own: OwnPair | None,
    scenarios: Sequence[Scenario],
    *,
    say: Say,
    assumed: Sequence[str] = (),
    typed: Sequence[str] = (),
    files: Sequence[Path | None] = (),
    place: Place = CPU,
) -> str:
    """Who judges: what was asked for, else the first provider that knows the pair; UsageError if there is none.

    A damaged pair is refused, never handed on. typed: which of what is assumed a witness would have to predict.
    """
    why = first_refusal(scenarios, files, unpredicted)
    if why and asked not in (AUTO, WITNESS):
        raise UsageError(f"--reference {asked}: {why}")
    if why:
        say("the witness judges it: no other reference follows its engine.server_args")
    elif asked != WITNESS:
        try:
            if own is not None and (why := load_now(own, assumed=tuple(assumed), place=place, provider=asked)):
                say(f"the target is judged by its module from Hugging Face, since ours do not know it: {why}")
            return asked
        except NoProviderError as error:
            if asked != AUTO or first_refusal(scenarios, files, partial(unwitnessed, assumed=typed)):
                raise
            say(f"no other provider knows this pair, so the witness judges it: {error.why}")
    if why := first_refusal(scenarios, files, partial(unwitnessed, assumed=typed)):
        raise UsageError(f"--reference {WITNESS}: {why}")
    return WITNESS


def reference_place(
    asked: str,
    own: OwnPair | None,
    scenarios: Sequence[Scenario],
    *,
    device: str,
    lease: leases.Request | None,
    say: Say,
) -> Place:
    """Where the reference computes and what it takes, said; UsageError with the numbers where it does not fit."""
    kind, _, number = asked.partition(":")
    if kind not in ("auto", "cpu", "cuda") or (number and not (kind == "cuda" and number.isdecimal())):
        raise UsageError(f"--reference-device {asked}\n  allowed: auto, cpu, cuda, cuda:N")
    if own is None:
        if kind == "cuda":
            raise UsageError(f"--reference-device {asked}: the tiny pairs are computed on the CPU\n  leave it out")
        return CPU
    cards = len(_cards()) if kind == "cuda" else 0
    if kind == "cuda" and not cards:
        raise UsageError(f"--reference-device {asked}: no NVIDIA GPU is here\n  allowed here: auto, cpu")
    if number and int(number) >= cards:
        raise UsageError(f"--reference-device {asked}: that GPU is not here\n  allowed: cuda:0 to cuda:{cards - 1}")
    held = dtype_on(device, scenarios[0].engine.dtype)
    need = footprint(own.target, own.draft, scenarios, held=held)
    on_card = _fits_beside(need, lease) if kind == "auto" and device == "cuda" else kind == "cuda"
    said = need.mib + (WORKSPACE_MIB if on_card else 0)
    place = Place(device=("cuda" if asked == "auto" else asked) if on_card else "cpu", held=held, said=said)
    if need.mib >= WORTH_SAYING:
        say(f"the reference on {place.device} takes {need}")
    if place.device == "cpu" and need.mib > (free := psutil.virtual_memory().available >> 20):
        raise UsageError(
            f"the reference needs {need}, and this machine has {free / 1024:.1f} GiB of memory left\n"
            "  shorter prompts and texts take less; or --reference-device cuda, or --reference witness"
        )
    if on_card and not _fits_beside(need, lease):
        raise UsageError(
            f"--reference-device {asked}: the reference needs {need}, which is not left on a card beside the engine's "
            f"{lease.gib if lease else 'none'}\n  --reference-device cpu, or a smaller --gpu-share GIB"
        )
    return place


def _cards() -> list[gpus.Card]:
    """The cards that a run may use; none where the driver is not there."""
    try:
        return list(gpus.visible(gpus.read_cards()))
    except gpus.CardError:
        return []


def _fits_beside(need: Footprint, lease: leases.Request | None) -> bool:
    """Whether a card has room for the reference and one engine, by what is there in all."""
    largest = max((card.capacity for card in _cards()), default=0)
    return need.mib + CONTEXT_MIB + (lease.share if lease else 0) <= largest


def engine_share(own: OwnPair, scenarios: Sequence[Scenario]) -> float:
    """GiB that an engine of the user's pair leases unless they say: weights, its pool, and what a tiny one takes."""
    held = 2.0
    folders = [own.target] if own.target.folder == own.draft.folder else [own.target, own.draft]
    weights = sum(one.parameters or sum(file.stat().st_size for file in one.weights) / held for one in folders)
    pool = max(scenario.engine.max_total_tokens for scenario in scenarios) * kept_a_row(own.target, own.draft) / held
    return leases.SHARE_GIB + (held * weights + pool) / 2**30
