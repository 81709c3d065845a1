"""The two lines that `bisect` searches along, and one version of each judged. It must not search.

A release runs in its own environment. A commit brings its Python files only, and runs in the environment of the nearest
release whose pins and compiled parts are its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

from packaging.version import InvalidVersion, Version
from rich.console import Console

from harness.archive.store import FINDINGS, read_case
from harness.bisect.changes import Changed, changed_files
from harness.bisect.fitting import FitError, misfit, of_commit, of_release, rebuilt
from harness.bisect.repository import PYTHON, Repository, Worktrees
from harness.bisect.search import Direction, Releases, Tried
from harness.bisect.trials import Trials
from harness.cli.bisect_runs import Setting, one_run
from harness.contract.usage import UsageError, UserError
from harness.engines import envs
from harness.engines.releases import UnknownReleaseError, drivable, published, span
from reports import blame
from reports.live import LiveLine
from reports.prose import say

#: A commit is tried in the environments of so many releases at most.
ENVIRONMENTS = 2


def releases(*, bad: str, good: str) -> tuple[Releases, Direction, str]:
    """The published releases between two, the direction, and what there is to say about where the list is from."""
    ends = (_end("--bad", bad), _end("--good", good))
    if ends[0] == ends[1]:
        raise UsageError(f"--bad and --good both name {bad}\n  name two releases, one with the failure and one without")
    there = published()
    direction: Direction = "broken" if Version(ends[0]) > Version(ends[1]) else "fixed"
    return Releases(names=span(there.versions, ends)), direction, there.note


def _end(option: str, version: str) -> str:
    """One end as it is published or installed; UsageError for what cannot be one."""
    try:
        Version(version)
    except InvalidVersion as error:
        raise UsageError(
            f"{option} {version!r} is not a release\n  name one like 0.5.13; for commits of a checkout add  --repo PATH"
        ) from error
    try:
        return envs.resolve(version)
    except UnknownReleaseError as error:
        raise UsageError(f"{option}: {error}") from error


def judge_release(setting: Setting, trials: Trials, *, console: Console) -> Callable[[str], Tried]:
    """The function that judges one release, installing it first where needed."""
    live = LiveLine(console)

    def one(version: str) -> Tried:
        say(console, f"SGLang {version}", style="bold")
        try:
            env = envs.ensure(version, lambda text: say(console, text))
        except envs.EnvError as error:
            return _reported(console, Tried(name=version, call="unknown", why=str(error).splitlines()[0], tries=0))
        tried = trials.judge(
            version, identity=setting.identity(env), one_run=lambda: one_run(setting, env, console=console, line=live)
        )
        return _reported(console, tried)

    return one


def _reported(console: Console, tried: Tried, *, label: str = "") -> Tried:
    seen = " (seen before)" if tried.tries and not tried.seconds else ""
    say(console, f"  {label or tried.name} is {tried.call}: {tried.why}{seen}")
    return tried


def changed_between_releases(old: str, new: str, *, path: Sequence[str]) -> tuple[Changed, ...] | None:
    """Speculative files that differ between two installed releases; None where one is not installed."""
    before, after = (envs.state(version).package for version in (old, new))
    return changed_files(before, after, path=path) if before is not None and after is not None else None


def path_of(tried: Sequence[Tried]) -> tuple[str, ...]:
    """The files of SGLang's calls that made and read the value first seen wrong, by the newest run that failed."""
    folders = [
        folder
        for one in tried
        if one.call == "bad" and one.run
        for folder in sorted(path.parent for path in Path(one.run).glob(f"*/{FINDINGS}"))
    ]
    for folder in reversed(folders):
        with contextlib.suppress(UserError):
            stored = read_case(folder, reference=False)
            first = next((found for found in stored.findings if found.first), None)
            if first is not None:
                return blame.files(first, stored.scenario, str(stored.engine.header.get("release", "")))
    return ()


def judge_commit(setting: Setting, trials: Trials, *, worktrees: Worktrees, console: Console) -> Callable[[str], Tried]:
    """The function that judges one commit: in the nearest environment that gives a verdict.

    Names to hook may have moved since the older release, so another environment that fits is tried too.
    """
    live = LiveLine(console)

    def one(commit: str) -> Tried:
        say(console, f"commit {commit[:12]} {worktrees.repository.title(commit)}", style="bold")
        fits, why = _fitting(worktrees.repository, commit, console=console)
        tried = Tried(name=commit, call="unknown", why=why, tries=0)
        reasons = []
        for env in fits:
            say(console, f"  in the environment of {env.version}")
            tried = in_one(commit, env)
            if tried.call != "unknown":
                return _reported(console, tried, label=commit[:12])
            reasons.append(f"with {env.version}: {tried.why}")
        return _reported(console, dataclasses.replace(tried, why="; ".join(reasons) or why), label=commit[:12])

    def in_one(commit: str, env: envs.EngineEnv) -> Tried:
        with worktrees.tree(commit, compiled=env.package) as files:
            there = dataclasses.replace(env, pythonpath=(files, *env.pythonpath), tree=files)
            return trials.judge(
                commit,
                identity=setting.identity(there, tree=worktrees.repository.object_id(commit, PYTHON) or commit),
                one_run=lambda: one_run(setting, there, console=console, line=live),
            )

    return one


def _fitting(repository: Repository, commit: str, *, console: Console) -> tuple[list[envs.EngineEnv], str]:
    """(environments that are the commit's too, nearest release first; what keeps the nearest one from it)."""
    try:
        needs = of_commit(repository, commit)
    except FitError as error:
        return [], str(error)
    found: list[envs.EngineEnv] = []
    reasons: list[str] = []
    for version in _candidates(repository, commit):
        try:
            env = envs.ensure(version, lambda text: say(console, text))
            package = env.package
            if package is None:
                why = f"the files of {version} are not in a folder of its own"
            else:
                why = misfit(needs, of_release(package), version=version)
                why = why or rebuilt(repository, commit, needs, version=version)
        except (envs.EnvError, FitError) as error:
            why = f"{version}: {str(error).splitlines()[0]}"
        if why:
            reasons.append(why)
        else:
            found.append(env)
    return found[:ENVIRONMENTS], reasons[0] if reasons else "no release is near it"


def _candidates(repository: Repository, commit: str) -> Sequence[str]:
    """Releases whose environment may be the commit's: the one before it, the next one, then those installed."""
    line = [name for name in published().versions if drivable(name)]
    installed = [engine.version for engine in envs.list_installed() if engine.ready and drivable(engine.version)]
    tag = (repository.tag_before(commit) or "")[1:]
    if tag not in line:
        return installed
    at = line.index(tag)
    far = sorted(installed, key=lambda name: abs(line.index(name) - at) if name in line else len(line))
    return list(dict.fromkeys([*line[at : at + 2], *far]))
