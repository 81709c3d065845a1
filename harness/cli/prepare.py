"""What several commands need before they can run: the engine's environment, the checkpoint pair, the scenarios.

It must not import torch: start-up time is the user's time.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

from cases import catalogue, checkpoints, fixed
from harness import envs
from harness.cli.outcome import UsageError
from harness.types import Scenario

RUNS = Path("runs")
DEVICES = ("cpu",)


def engine_environment(version: str | None, say: Callable[[str], None]) -> envs.EngineEnv:
    """The environment of one release, installed if need be; None: this interpreter's SGLang, else the newest."""
    here = envs.current()
    if here is not None and version in (None, here.version):
        return here
    if version is None:
        version = envs.NEWEST
    return envs.ensure(version, say)


def check_device(device: str) -> str:
    if device not in DEVICES:
        raise UsageError(f"device {device!r} cannot be used by this version\n  allowed: {', '.join(DEVICES)}")
    return device


def runs_root(folder: Path | None) -> Path:
    """Where run folders go: --runs, else $EAGLECHECK_RUNS, else ./runs."""
    return folder or Path(os.environ.get("EAGLECHECK_RUNS", RUNS))


def checkpoint_pairs(
    scenarios: Iterable[Scenario], *, target: Path | None, draft: Path | None
) -> dict[str, tuple[Path, Path]]:
    """(target, draft) folders for every checkpoint the scenarios name, made on the spot unless given."""
    named = sorted({scenario.checkpoint for scenario in scenarios})
    if (target is None) != (draft is None):
        raise UsageError("--target and --draft go together: name both checkpoint folders, or neither")
    if target is not None and draft is not None:
        for option, folder in (("--target", target), ("--draft", draft)):
            if not (folder / "config.json").is_file():
                raise UsageError(
                    f"{option} {folder}: no config.json there, so it is not a checkpoint folder\n"
                    "  name a folder with config.json and *.safetensors, or leave --target and --draft out"
                )
        return dict.fromkeys(named, (target.resolve(), draft.resolve()))
    root = envs.home() / "checkpoints"
    pairs = {}
    for name in named:
        made = checkpoints.make(name, root)
        pairs[name] = (made.target, made.draft)
    return pairs


def load_pair_now(pairs: dict[str, tuple[Path, Path]]) -> None:
    """Read a pair the user named before any engine is booted for it; raises CheckpointError."""
    from harness.oracle import Oracle

    for target, draft in pairs.values():
        Oracle(target=target, draft=draft).load()


def choose_scenarios(names: list[str], files: list[Path]) -> list[Scenario]:
    """The default set, or the named ones (default set and corpus) and those in files."""
    if not names and not files:
        return fixed.default_scenarios()
    known = {scenario.name: scenario for scenario in fixed.default_scenarios()}
    known |= {name: catalogue.load(name).scenario for name in catalogue.names()}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise UsageError(f"unknown scenario {unknown[0]!r}\n  allowed: {', '.join(known)}")
    return [known[name] for name in names] + [catalogue.read_scenario(path) for path in files]


def split_list(text: str, *, what: str) -> list[str]:
    """'a,b' as ['a', 'b']; UsageError if nothing is named or something is named twice."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise UsageError(f"--{what} names nothing; give a comma-separated list")
    doubled = sorted({part for part in parts if parts.count(part) > 1})
    if doubled:
        raise UsageError(f"--{what} names {doubled[0]!r} twice")
    return parts


def check_revert(revert: int | None, version: str) -> None:
    """SGLang's revert switch exists from 0.5.13 on and knows a fixed set of pull requests."""
    if revert is None:
        return
    from packaging.version import Version

    if Version(version) < Version("0.5.13"):
        raise UsageError(
            f"--revert {revert}: SGLang {version} has no revert switch (it came with 0.5.13)\n"
            "  choose a release from 0.5.13 on, or leave --revert out"
        )
    if revert not in REVERTS:
        raise UsageError(f"--revert {revert}: not one SGLang can put back\n  allowed: {', '.join(map(str, REVERTS))}")


REVERTS = (25015, 26329, 26972, 27338, 27360, 27460)
ATTENTIONS = ("torch", "interpreted")


def check_attention(name: str) -> None:
    if name not in ATTENTIONS:
        raise UsageError(f"--cpu-attention {name!r}\n  allowed: {', '.join(ATTENTIONS)}")
