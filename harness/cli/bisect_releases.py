"""`bisect` over published releases: which there are, and one of them judged. It must not search by itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from packaging.version import InvalidVersion, Version
from rich.console import Console

from harness.bisect.changes import Changed, changed_files
from harness.bisect.search import Direction, Tried
from harness.bisect.trials import Trials
from harness.cli.bisect_runs import Setting, one_run
from harness.contract.usage import UsageError
from harness.engines import envs
from harness.engines.releases import UnknownReleaseError, published, span
from reports.live import LiveLine
from reports.prose import say


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """The releases to search along, oldest first, and what there is to say about where they are from."""

    versions: tuple[str, ...]
    direction: Direction
    note: str


def line(*, bad: str, good: str) -> Line:
    """The published releases from the one named bad to the one named good; UsageError for ends that cannot be."""
    ends = (_end("--bad", bad), _end("--good", good))
    if ends[0] == ends[1]:
        raise UsageError(f"--bad and --good both name {bad}\n  name two releases, one with the failure and one without")
    there = published()
    return Line(
        versions=span(there.versions, ends),
        direction="broken" if Version(ends[0]) > Version(ends[1]) else "fixed",
        note=there.note,
    )


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


def judge(setting: Setting, trials: Trials, *, console: Console) -> Callable[[str], Tried]:
    """The function that judges one release, installing it first where needed."""
    live = LiveLine(console)

    def one(version: str) -> Tried:
        say(console, f"SGLang {version}", style="bold")
        try:
            env = envs.ensure(version, lambda text: say(console, text))
        except envs.EnvError as error:
            return _told(console, Tried(name=version, call="unknown", why=str(error).splitlines()[0], tries=0))
        tried = trials.judge(
            version, identity=setting.identity(env), one_run=lambda: one_run(setting, env, console=console, line=live)
        )
        return _told(console, tried)

    return one


def _told(console: Console, tried: Tried) -> Tried:
    say(console, f"  {tried.name} is {tried.call}: {tried.why}" + (" (seen before)" if not tried.seconds else ""))
    return tried


def changed(old: str, new: str) -> tuple[Changed, ...] | None:
    """Speculative files that differ between two installed releases; None where one is not installed."""
    before, after = (package(envs.state(version)) for version in (old, new))
    return changed_files(before, after) if before is not None and after is not None else None


def package(env: envs.EngineEnv) -> Path | None:
    """The folder of a release's sglang package; None where it is not on disk."""
    folders = (part / "sglang" for part in env.pythonpath)
    return next((folder for folder in folders if (folder / "__init__.py").is_file()), None)
