"""From what was typed to a plan that can be run; everything that can be refused is refused before anything slow.

It must not import torch: start-up time is the user's time.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import cast

from packaging.version import Version

from harness.archive.run_folders import default_root
from harness.both_sides import gpus, leases
from harness.cli.judges import Say, engine_share, provider, reference_place
from harness.cli.scenario_checks import check_scenarios
from harness.contract import known_issues
from harness.contract.outputs import writable
from harness.contract.providers import AUTO, WITNESS
from harness.contract.scenario import Scenario
from harness.contract.usage import UsageError, unknown
from harness.contract.words import counted
from harness.driving.adapt import NOTHING, Wanted, adapted
from harness.driving.own_pair import OwnPair, described
from harness.driving.pairs import checkpoint_pairs
from harness.driving.plan import CPU, Plan, Setup
from harness.driving.refusals import check_pair, check_possible, first_refusal, unattended, undrawn, untaken
from harness.engines import envs
from harness.engines.launch import BACKENDS, CpuAttention

#: Pull requests that SGLang's own switch (SGLANG_DEBUG_REVERT_PR, from 0.5.13 on) can revert.
REVERTS = (25015, 26329, 26972, 27338, 27360, 27460)
FIRST_REVERT = Version("0.5.13")


#: Engines that boot beside the one that is driven on a GPU, as long as each has two cores.
MOST_AHEAD = 8


def ahead_on(device: str) -> int:
    """Engines that boot ahead where nobody says how many: none on a CPU, where they would take each other's cores."""
    return min(MOST_AHEAD, len(os.sched_getaffinity(0)) // 2) if device == "cuda" else 0


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
    usual: Sequence[str] = (),
    reference: str = AUTO,
    reference_device: str = "auto",
    env: envs.EngineEnv | None = None,
    files: Sequence[Path | None] = (),
    boots_ahead: int | None = None,
    spawn: bool = False,
    notes: Sequence[str] = (),
) -> Plan:
    """A plan for these scenarios on one engine, its environment and checkpoints in place. engine None: the usual.

    env: this ready environment, whatever `engine` says. files: where the user wrote each scenario, None for ours.
    boots_ahead: None is the device's default. spawn: start processes as SGLang does. usual: what is assumed beside
    `assumed` where nobody typed it; a witness, which predicts nothing, does without. notes: what to say of the plan,
    once nothing in it is refused.
    """
    held = [*notes]

    def tell(text: str) -> None:
        for one in (*held, text):
            say(one)
        held.clear()

    version = envs.resolve(engine) if env is None else env.version
    if standing := envs.standing(version):
        held.append(f"SGLang {version} is {standing}")
    check_device(device)
    check_revert(revert, version)
    if own is not None and own.target.text_alone:
        held.append(f"--target {own.target.folder}: no preprocessor_config.json, so SGLang serves its text alone")
        wanted = replace(wanted, server_args={"enable_multimodal": False, **(wanted.server_args or {})})
    scenarios = adapted(scenarios, wanted, device=device)
    check_possible(scenarios, version=version, device=device, files=files)
    check_pair(own, env or envs.state(version), device=device)
    check_scenarios(scenarios, device=device, own=own, files=files)
    typed, assumed = check_assumed(assumed), check_assumed(sorted({*assumed, *usual}))
    drafts = [(one.spec, one.engine) for one in scenarios]
    held.extend(known_issues.without_effect(assumed, drafts, release=version, device=device))
    share = gpu_share if own is None or gpu_share or device == "cpu" else engine_share(own, scenarios)
    lease = gpu_lease(device, share)
    root = writable(runs_root(runs))
    env = env or engine_environment(version, say)
    for refused in (partial(undrawn, env=env, device=device), partial(unattended, env=env), partial(untaken, env=env)):
        if why := first_refusal(scenarios, files, refused):
            raise UsageError(why)
    check_pair(own, env, device=device)  # its sources may not have been there before
    pairs = checkpoint_pairs(scenarios, device=device, own=own)
    place = CPU
    if reference != WITNESS:
        place = reference_place(reference_device, own, scenarios, device=device, lease=lease, say=tell)
    reference = provider(reference, own, scenarios, say=tell, assumed=assumed, typed=typed, files=files, place=place)
    if reference == WITNESS:
        place, assumed = CPU, typed
    if own is not None:
        tell(described(own.facts()))
        if ids := own.target.eos_beyond:
            tell(f"eos_token_id {', '.join(map(str, ids))}: outside the vocabulary of {own.vocab}, so it ends no text")
    for one in held:
        say(one)
    return Plan(
        env=env,
        setup=Setup(
            release=env.version,
            device=device,
            revert=revert,
            cpu_attention=cast(CpuAttention, cpu_attention),
            assumed=assumed,
            pair=None if own is None else own.named,
            reference=reference,
        ),
        scenarios=tuple(scenarios),
        pairs=pairs,
        root=root,
        own=own,
        place=place,
        lease=lease,
        argv=tuple(sys.argv),
        copies=not spawn,
        ahead=ahead_on(device) if boots_ahead is None else boots_ahead,
    )


def engine_environment(version: str | None, say: Say) -> envs.EngineEnv:
    """The environment of one release, installed if need be; None: this interpreter's SGLang, else the newest."""
    return envs.ensure(envs.resolve(version), say)


def runs_root(folder: Path | None) -> Path:
    """Where run folders go: --runs, else $EAGLECHECK_RUNS, else ./runs."""
    return folder or default_root()


def check_device(device: str) -> None:
    if device not in BACKENDS:
        raise UsageError(unknown("--device", device, BACKENDS))
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


def check_names(names: Sequence[str], known: Iterable[str], *, option: str, what: str) -> None:
    """UsageError for the first name that is not known."""
    there = list(known)
    for name in names:
        if name not in there:
            raise UsageError(f"--{option}: {unknown(what, name, there)}")


def shard_of(text: str | None) -> tuple[int, int]:
    """'2/3' as (2, 3), the whole as (1, 1); UsageError for what is no part."""
    if text is None:
        return (1, 1)
    number, _, of = text.partition("/")
    if not (number.isdecimal() and of.isdecimal() and 1 <= int(number) <= int(of)):
        raise UsageError(f"--shard {text!r} is not a shard\n  allowed: I/N with I from 1 to N, for example 2/3")
    return (int(number), int(of))


def ahead(boots: int, seconds: float | None, *, jobs: int = 1) -> str:
    """What a run of generated scenarios will cost: boots at half a minute to two each, and seconds of scenarios.

    jobs: how many processes may share that at best.
    """
    drawn = f"; generated scenarios take at most {seconds / 60:.2g} min beside that" if seconds else ""
    return f"boots {counted(boots, 'engine')} or more, in {max(boots // (2 * jobs), 1)} to {boots * 2} min{drawn}"
