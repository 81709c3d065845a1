"""What `bisect` runs and how: from its options to a subject, and from one environment to one run of it.

It must not search, and must not import torch.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from cases import catalogue
from harness.archive.store import MANIFEST, read_reproducer, started_with
from harness.bisect.trials import Subject
from harness.bisect.verdicts import Failure, Run, folder_digest
from harness.cli import prepare
from harness.cli.scenario_checks import check_scenarios
from harness.contract.outputs import writable
from harness.contract.types import Outcome
from harness.contract.usage import UsageError, unknown
from harness.driving.adapt import Wanted, adapted
from harness.driving.own_pair import own_pair
from harness.driving.own_source import source_digest
from harness.driving.results import RunResult
from harness.driving.runner import run
from harness.engines import dependencies, envs
from reports.live import LiveLine
from reports.prose import say
from reports.terminal import unjudged


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Everything about a search but the versions."""

    subject: Subject
    device: str
    gpu_share: float | None = None
    pair: tuple[Path, Path] | None = None
    assumed: tuple[str, ...] = ()
    cpu_attention: str = "torch"
    runs: Path | None = None

    def identity(self, env: envs.EngineEnv, *, tree: str = "") -> Mapping[str, Any] | None:
        """What a run on `env` is remembered under; None for an SGLang that can change under its version.

        tree: content id of the commit's Python files that run in place of the release's.
        """
        marker = dependencies.read_marker(dependencies.home() / "engines" / env.version)
        if marker is None or not env.pythonpath:
            return None
        return {
            "scenario": self.subject.scenario.id,
            "pair": folder_digest(self.pair) if self.pair else "",
            "engine": {"release": env.version, "marker": marker, "tree": tree},
            "lock": {"python": sys.version.split()[0], "torch": env.torch},
            "device": self.device,
            "assumed": sorted(self.assumed),
            "cpu_attention": self.cpu_attention,
            "checks": source_digest(),
        }


def choose(
    *,
    case: str | None,
    scenario_file: Path | None,
    device: str | None,
    gpu_share: float | None,
    wanted: Wanted,
    runs: Path | None,
    assume: Sequence[str] = (),
) -> Setting:
    """The setting for what was typed; UsageError if that is not exactly one scenario."""
    if (case is None) == (scenario_file is None):
        raise UsageError(
            "name what to search for, once:  --case REPRODUCER_OR_CORPUS_ID, or --scenario-file FILE\n"
            f"  corpus: {', '.join(catalogue.names())}"
        )
    if scenario_file is not None:
        scenario = catalogue.read_scenario(scenario_file)
        chosen = Setting(
            subject=Subject(name=scenario.name, scenario=scenario, failure=Failure()), device=device or "cpu"
        )
    else:
        assert case is not None
        chosen = _reproducer(Path(case)) if os.sep in case or Path(case).exists() else _corpus(case, device or "cpu")
        if device is not None:
            chosen = dataclasses.replace(chosen, device=device)
    prepare.check_device(chosen.device)
    prepare.gpu_lease(chosen.device, gpu_share)
    (scenario,) = adapted([chosen.subject.scenario], wanted, device=chosen.device)
    check_scenarios(
        [scenario], device=chosen.device, own=own_pair(*chosen.pair) if chosen.pair else None, files=[scenario_file]
    )
    writable(prepare.runs_root(runs))
    subject = dataclasses.replace(chosen.subject, scenario=scenario)
    assumed = prepare.check_assumed((*chosen.assumed, *assume))
    return dataclasses.replace(chosen, subject=subject, gpu_share=gpu_share, runs=runs, assumed=assumed)


def _corpus(name: str, device: str) -> Setting:
    if name not in catalogue.names():
        known = unknown("case", name, catalogue.names())
        raise UsageError(f"--case: {known}\n  or a reproducer folder:  --case runs/latest/reproducers/NAME")
    case = catalogue.load(name)
    subject = Subject(name=name, scenario=case.scenario, failure=Failure(kinds=case.kinds))
    return Setting(subject=subject, device=device, assumed=case.assumes)


def _reproducer(folder: Path) -> Setting:
    if folder.is_file():
        raise UsageError(
            f"--case {folder}: not a reproducer folder, but a file\n  a scenario file goes to  --scenario-file {folder}"
        )
    if not (folder / MANIFEST).exists():
        raise UsageError(
            f"--case {folder}: not a reproducer folder, it has no {MANIFEST}\n"
            "  reproducers lie in <run folder>/reproducers; or name a corpus case: " + ", ".join(catalogue.names())
        )
    manifest, stored = read_reproducer(folder)
    pair = manifest.header.get("pair")
    assumed, attention = started_with(manifest, stored)
    return Setting(
        subject=Subject(
            name=stored.scenario.name, scenario=stored.scenario, failure=Failure(signature=manifest.signature)
        ),
        device=manifest.device,
        pair=None if not pair else (Path(pair[0]), Path(pair[1])),
        assumed=assumed,
        cpu_attention=attention,
    )


def one_run(setting: Setting, env: envs.EngineEnv, *, console: Console, line: LiveLine) -> Run:
    """Run the scenario once on an engine of its own; what keeps it from a verdict is the run's reason.

    line: one for the whole search, so that it names replacement kernels when they change, and not for every version.
    """
    try:
        plan = prepare.make_plan(
            [setting.subject.scenario],
            say=lambda text: say(console, text),
            engine=None,
            device=setting.device,
            own=own_pair(*setting.pair) if setting.pair else None,
            gpu_share=setting.gpu_share,
            runs=setting.runs,
            assumed=setting.assumed,
            cpu_attention=setting.cpu_attention,
            env=env,
        )
    except UsageError as error:  # this release does not run this scenario, another may
        return Run(outcome=Outcome.UNKNOWN, why=str(error))
    with line:
        result = run(plan, observers=[line])
    return _said(result, env)


def _said(result: RunResult, env: envs.EngineEnv) -> Run:
    (one,) = result.results
    roots = [finding for finding in one.findings if finding.is_root]
    roots.sort(key=lambda finding: not finding.first.first)
    said = Run(
        outcome=one.verdict.outcome,
        kinds=one.verdict.root_kinds,
        signatures=tuple(finding.signature for finding in roots),
        why="; ".join(unjudged(result)) if one.verdict.outcome is Outcome.UNKNOWN else "",
        run=str(result.folder),
        seconds=result.cost.total_seconds,
    )
    ran = result.header.get("tree")
    if env.tree is not None and said.outcome is not Outcome.UNKNOWN and ran != str(env.tree.resolve()):
        why = f"the engine ran {ran}, not the commit's files in {env.tree}"
        return said.model_copy(update={"outcome": Outcome.UNKNOWN, "why": why})
    return said
