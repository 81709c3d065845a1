"""From what was typed to a plan that can be run; everything that can be refused is refused before anything slow.

It must not import torch: start-up time is the user's time.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import cast

from packaging.version import Version

from harness.archive.run_folders import default_root
from harness.both_sides import gpus, leases
from harness.cli.programs import check_scenarios
from harness.contract import known_issues
from harness.contract.outputs import writable
from harness.contract.providers import PAPER, WITNESS
from harness.contract.scenario import Scenario
from harness.contract.usage import UsageError, unknown
from harness.driving.adapt import DEVICES, NOTHING, Wanted, adapted, called, check_possible, unwitnessed
from harness.driving.own_pair import OwnPair, described
from harness.driving.pairs import checkpoint_pairs, load_now
from harness.driving.runner import Plan
from harness.engines import envs
from harness.engines.launch import CpuAttention

#: Pull requests that SGLang's own switch (SGLANG_DEBUG_REVERT_PR, from 0.5.13 on) can revert.
REVERTS = (25015, 26329, 26972, 27338, 27360, 27460)
FIRST_REVERT = Version("0.5.13")

Say = Callable[[str], None]


def make_plan(
    scenarios: Sequence[Scenario],
    *,
    say: Say,
    engine: str | None,
    device: str,
    runs: Path | None,
    revert: int | None = None,
    cpu_attention: str = "torch",
    wanted: Wanted = NOTHING,
    own: OwnPair | None = None,
    gpu_share: float | None = None,
    assumed: Sequence[str] = (),
    reference: str = "auto",
    env: envs.EngineEnv | None = None,
    files: Sequence[Path | None] = (),
) -> Plan:
    """A plan for these scenarios on one engine, its environment and checkpoints in place. engine None: the usual.

    env: this ready environment, whatever `engine` says. files: where the user wrote each scenario, None for ours.
    """
    version = envs.resolve(engine) if env is None else env.version
    if standing := envs.standing(version):
        say(f"SGLang {version} is {standing}")
    check_device(device)
    check_revert(revert, version)
    scenarios = adapted(scenarios, wanted, device=device)
    check_possible(scenarios, version=version, device=device, files=files)
    check_scenarios(scenarios, device=device, own=own, files=files)
    assumed = check_assumed(assumed)
    drafts = [(one.spec, one.engine) for one in scenarios]
    for text in known_issues.without_effect(assumed, drafts, release=version, device=device):
        say(text)
    lease = gpu_lease(device, gpu_share)
    root = writable(runs_root(runs))
    env = env or engine_environment(version, say)
    pairs = checkpoint_pairs(scenarios, device=device, own=own)
    reference = provider(reference, own, scenarios, say=say, assumed=assumed, files=files)
    if own is not None:
        say(described(own.facts()))
    return Plan(
        env=env,
        scenarios=tuple(scenarios),
        pairs=pairs,
        root=root,
        device=device,
        revert=revert,
        cpu_attention=cast(CpuAttention, cpu_attention),
        reference=reference,
        own=own,
        lease=lease,
        assumed=assumed,
        argv=tuple(sys.argv),
    )


def provider(
    asked: str,
    own: OwnPair | None,
    scenarios: Sequence[Scenario],
    *,
    say: Say,
    assumed: Sequence[str] = (),
    files: Sequence[Path | None] = (),
) -> str:
    """Who judges: what was asked for, else the first provider that knows the pair; UsageError if there is none."""
    if asked != WITNESS:
        try:
            if own is not None:
                load_now(own)
            return PAPER
        except UsageError as error:
            if asked == PAPER or _unwitnessed(scenarios, assumed, files):
                raise
            say(f"{str(error).splitlines()[0]}\n  judged by the witness instead (--reference witness)")
    if why := _unwitnessed(scenarios, assumed, files):
        raise UsageError(f"--reference {WITNESS}: {why}")
    return WITNESS


def _unwitnessed(scenarios: Sequence[Scenario], assumed: Sequence[str], files: Sequence[Path | None]) -> str:
    """Why the first scenario that has no witness has none; empty if all have one."""
    for scenario, file in zip_longest(scenarios, files[: len(scenarios)]):
        if why := unwitnessed(scenario, assumed=assumed):
            return f"{called(scenario, file)}: {why}"
    return ""


def engine_environment(version: str | None, say: Say) -> envs.EngineEnv:
    """The environment of one release, installed if need be; None: this interpreter's SGLang, else the newest."""
    return envs.ensure(envs.resolve(version), say)


def runs_root(folder: Path | None) -> Path:
    """Where run folders go: --runs, else $EAGLECHECK_RUNS, else ./runs."""
    return folder or default_root()


def check_device(device: str) -> None:
    if device not in DEVICES:
        raise UsageError(unknown("--device", device, DEVICES))
    if device == "cuda" and not has_gpu():
        raise UsageError("--device cuda: this machine has no NVIDIA GPU\n  allowed here: cpu; look:  eaglecheck doctor")


def has_gpu() -> bool:
    """Whether NVIDIA's driver shows this machine a card; asks no library, so that it takes no time."""
    return any(Path("/dev").glob("nvidia[0-9]*")) or shutil.which("nvidia-smi") is not None


def gpu_lease(device: str, share: float | None) -> leases.Request | None:
    """What every engine asks for before it starts: a share of a GPU in GiB; None on a CPU."""
    if device == "cpu":
        if share is not None:
            raise UsageError(f"--gpu-share {share:g}: there is no GPU on cpu\n  leave it out, or add --device cuda")
        return None
    try:
        return leases.request(share)
    except gpus.CardError as error:
        raise UsageError(f"--device {device}: {error}") from error


def check_assumed(ids: Sequence[str]) -> tuple[str, ...]:
    try:
        return known_issues.checked(ids)
    except known_issues.UnknownIssue as error:
        raise UsageError(f"--assume: {error}") from error


def check_revert(revert: int | None, version: str) -> None:
    """SGLang's revert switch exists from 0.5.13 on and knows a fixed set of pull requests."""
    if revert is None:
        return
    if revert not in REVERTS:
        allowed = ", ".join(map(str, REVERTS))
        raise UsageError(f"--revert {revert}: SGLang cannot revert it\n  allowed: {allowed}")
    if Version(version) < FIRST_REVERT:
        raise UsageError(
            f"--revert {revert}: SGLang {version} has no revert switch\n"
            f"  choose a release from {FIRST_REVERT} on, or leave --revert out"
        )


def split_list(text: str, *, option: str) -> list[str]:
    """'a,b' as ['a', 'b']; UsageError for an empty entry, and for one that is named twice."""
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        named = ",".join(filter(None, parts)) or "A,B"
        raise UsageError(f"--{option} {text}: empty entry beside a comma\n  for example:  --{option} {named}")
    doubled = next((part for part in parts if parts.count(part) > 1), None)
    if doubled is not None:
        raise UsageError(f"--{option} {text}: {doubled!r} is named twice\n  name it once")
    return parts
