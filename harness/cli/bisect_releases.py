"""`bisect` over published releases: which there are, and one of them judged. It must not search by itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from packaging.version import InvalidVersion, Version
from rich.console import Console

from harness import compat, envs
from harness.bisect.changes import Changed, changed_files
from harness.bisect.published import Published, ordered, published, span
from harness.bisect.search import Direction, Tried
from harness.bisect.trials import Trials
from harness.cli.bisect_runs import Setting, one_run
from harness.cli.outcome import UsageError
from reports.live import LiveLine
from reports.prose import say

OLDEST = Version(compat.RELEASES[-1].first)


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """The releases to search along, oldest first, and what there is to say about where they are from."""

    versions: tuple[str, ...]
    direction: Direction
    note: str


def line(*, bad: str, good: str) -> Line:
    """The published releases from the one named bad to the one named good; UsageError for ends that cannot be."""
    for option, version in (("--bad", bad), ("--good", good)):
        _check_version(option, version)
    if Version(bad) == Version(good):
        raise UsageError(f"--bad and --good both name {bad}\n  name two releases, one with the failure and one without")
    there = published()
    ends = (_spelling("--bad", bad, there), _spelling("--good", good, there))
    return Line(
        versions=span(there.versions, ends),
        direction="broken" if Version(bad) > Version(good) else "fixed",
        note=there.note,
    )


def _check_version(option: str, version: str) -> None:
    try:
        wanted = Version(version)
    except InvalidVersion as error:
        raise UsageError(
            f"{option} {version!r} is not a release\n  name one like 0.5.13; for commits of a checkout add  --repo PATH"
        ) from error
    if wanted < OLDEST:
        raise UsageError(
            f"{option} {version}: SGLang before {OLDEST} cannot be driven by this version\n  allowed: {OLDEST} or newer"
        )


def _spelling(option: str, version: str, there: Published) -> str:
    """The release as it is published or installed; UsageError names those that are."""
    installed = [engine.version for engine in envs.list_installed() if engine.ready]
    here = envs.current()
    known = [*there.versions, *installed, *([here.version] if here is not None else [])]
    for name in known:
        if Version(name) == Version(version):
            return name
    what = "published" if there.complete else "installed here, and the published ones are not known"
    usable = [name for name in ordered(known) if Version(name) >= OLDEST]
    raise UsageError(f"{option} {version}: no such release is {what}\n  allowed: {', '.join(usable) or 'none'}")


def judge(setting: Setting, trials: Trials, *, console: Console) -> Callable[[str], Tried]:
    """The function that judges one release, installing it first where needed."""
    live = LiveLine(console)

    def one(version: str) -> Tried:
        say(console, f"SGLang {version}", style="bold")
        try:
            env = envs.ensure(version, lambda text: say(console, text), untested=True)
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
