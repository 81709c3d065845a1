"""Which target and draft folders stand for a scenario's checkpoint: the tiny ones made on the spot, or the user's own.

Everything that a file name, a config or a file's length can show is refused here, before torch is imported; the rest
by the reference, before an engine is booted. This module must not import torch by itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors

from cases import checkpoints
from harness.contract import plain_files
from harness.contract.json_files import NotJSON, parsed
from harness.contract.scenario import Scenario
from harness.contract.usage import UsageError
from harness.engines import envs
from harness.engines.launch import CONTEXT_LENGTH

#: As in reference/model.py, which cannot be asked without torch.
ARCHITECTURES = {"--target": "LlamaForCausalLM", "--draft": "LlamaForCausalLMEagle"}
OWN = "name a folder with config.json and *.safetensors, or leave --target and --draft out to use the tiny pair"


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnPair:
    """A pair that the user named, as far as its files tell without loading it."""

    target: Path
    draft: Path
    vocab: int
    positions: int


def own_pair(target: Path | None, draft: Path | None) -> OwnPair | None:
    """The pair named by --target and --draft, None if neither is; UsageError for one that cannot be a pair."""
    if target is None and draft is None:
        return None
    if target is None or draft is None:
        raise UsageError("--target and --draft go together: name both checkpoint folders, or neither")
    one, other = _config("--target", target), _config("--draft", draft)
    for key in ("hidden_size", "vocab_size"):
        if one.get(key) != other.get(key):
            raise UsageError(
                f"--target {target} and --draft {draft} are not a pair: {key} is {one.get(key)} and {other.get(key)}\n"
                "  name the draft that was made for this target"
            )
    positions = one.get("max_position_embeddings", CONTEXT_LENGTH)
    if not isinstance(positions, int) or positions < CONTEXT_LENGTH:
        raise UsageError(
            f"--target {target}: max_position_embeddings is {positions}; engines are booted for {CONTEXT_LENGTH}\n"
            f"  name a target with {CONTEXT_LENGTH} positions or more"
        )
    vocab = one.get("vocab_size")
    if not isinstance(vocab, int):
        raise UsageError(f"--target {target}: vocab_size is {vocab!r} in config.json, not a number\n  {OWN}")
    return OwnPair(target=target.resolve(), draft=draft.resolve(), vocab=vocab, positions=positions)


def _config(option: str, folder: Path) -> dict[str, Any]:
    """config.json of a folder that holds a model of the right architecture, its weight files whole."""
    if not folder.is_dir():
        raise UsageError(f"{option} {folder}: no such folder\n  {OWN}")
    file = folder / "config.json"
    if not file.exists():
        raise UsageError(f"{option} {folder}: no config.json there, so it is not a checkpoint folder\n  {OWN}")
    _check_plain(option, folder)
    try:
        config = parsed(plain_files.content(file))
    except OSError as error:
        raise UsageError(f"{option} {folder}: config.json cannot be read: {error.strerror}\n  {OWN}") from error
    except NotJSON as error:
        raise UsageError(f"{option} {folder}: config.json is not JSON: {error}\n  {OWN}") from error
    found = config.get("architectures") if isinstance(config, dict) else None
    if found != [ARCHITECTURES[option]]:
        other = next((name for name, wanted in ARCHITECTURES.items() if found == [wanted]), None)
        hint = f"that is what {other} takes: were the two swapped?" if other else OWN
        raise UsageError(
            f"{option} {folder}: architectures is {found!r}\n  allowed: {[ARCHITECTURES[option]]!r}\n  {hint}"
        )
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UsageError(f"{option} {folder}: no *.safetensors file there\n  {OWN}")
    for weights in files:
        try:
            with safetensors.safe_open(weights, framework="numpy"):
                pass
        except (safetensors.SafetensorError, OSError) as error:
            raise UsageError(
                f"{option} {folder}: {weights.name} is damaged or cut off\n  copy it again, whole"
            ) from error
    return dict(config)


def _check_plain(option: str, folder: Path) -> None:
    """UsageError for anything but files and folders in there: SGLang looks at more of them than we do."""
    for path in sorted(folder.iterdir()):
        try:
            if not path.is_dir():
                plain_files.check(path)
        except OSError as error:
            raise UsageError(
                f"{option} {folder}: {path.name} cannot be read: {error.strerror}\n  leave it out, or {OWN}"
            ) from error


def load_now(pair: OwnPair) -> None:
    """Read the user's pair as the reference will, before any engine is booted for it."""
    from harness.driving.oracle import Oracle  # torch
    from reference.checkpoint import CheckpointError

    try:
        Oracle(target=pair.target, draft=pair.draft).load()
    except CheckpointError as error:
        raise UsageError(f"--target and --draft cannot be used: {error}\n  {OWN}") from error


def checkpoint_pairs(
    scenarios: Iterable[Scenario], *, device: str = "cpu", target: Path | None = None, draft: Path | None = None
) -> dict[str, tuple[Path, Path]]:
    """(target, draft) folders for every checkpoint the scenarios name, made on the spot unless given.

    On a device whose kernels are not built for a pair, the pair made for it instead (see cases.checkpoints).
    """
    own = own_pair(target, draft)
    named = sorted({scenario.checkpoint for scenario in scenarios})
    if own is not None:
        return dict.fromkeys(named, (own.target, own.draft))
    for name in named:
        if why := checkpoints.UNFIT.get((name, device)):
            raise UsageError(
                f"the tiny pair {name!r} cannot run on {device}: {why}\n  leave --device {device} out: it runs on a CPU"
            )
    root = envs.home() / "checkpoints"
    try:
        made = {name: checkpoints.make(checkpoints.on_device(name, device), root) for name in named}
    except OSError as error:
        raise UsageError(
            f"cannot make checkpoints in {root}: {error.strerror}\n"
            "  name a folder that can be written:  export EAGLECHECK_HOME=/path/with/space"
        ) from error
    return {name: (pair.target, pair.draft) for name, pair in made.items()}
