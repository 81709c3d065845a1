"""One commit judged: in the environment of the nearest release whose pins and compiled parts are its own.

It must not search, and must leave the checkout as it is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from harness.bisect.fitting import FitError, Needs, misfit, of_commit, of_release, rebuilt
from harness.bisect.repository import PYTHON, Repository
from harness.bisect.search import Tried
from harness.bisect.trees import Workshop, link_compiled, unlink_compiled
from harness.bisect.trials import Trials
from harness.cli.bisect_releases import package
from harness.cli.bisect_runs import Setting, one_run
from harness.engines import envs
from harness.engines.releases import drivable, published
from reports.live import LiveLine
from reports.prose import say


@dataclass(frozen=True, slots=True, kw_only=True)
class Fits:
    """Environments that are a commit's too, nearest release first; why: what keeps the nearest one from it."""

    found: tuple[envs.EngineEnv, ...]
    why: str = ""


def judge(setting: Setting, trials: Trials, *, shop: Workshop, console: Console) -> Callable[[str], Tried]:
    """The function that judges one commit."""

    def one(commit: str) -> Tried:
        say(console, f"commit {commit[:12]} {shop.repository.title(commit)}", style="bold")
        fits = fitting(shop.repository, commit, console=console)
        if fits.found:
            tried = _judge(setting, trials, shop=shop, commit=commit, fits=fits.found, console=console)
        else:
            tried = Tried(name=commit, call="unknown", why=fits.why, tries=0)
        say(console, f"  {commit[:12]} is {tried.call}: {tried.why}")
        return tried

    return one


def _judge(
    setting: Setting,
    trials: Trials,
    *,
    shop: Workshop,
    commit: str,
    fits: Sequence[envs.EngineEnv],
    console: Console,
) -> Tried:
    """In the nearest environment that gives a verdict: names to hook may have moved since the older release."""
    content = shop.repository.object_id(commit, PYTHON) or commit
    passed_over: list[str] = []
    tried = Tried(name=commit, call="unknown", why="not tried", tries=0)
    with shop.tree(commit) as tree:
        for env in fits:
            tried = _judge_in(setting, trials, env=_with_tree(env, tree), name=commit, content=content, console=console)
            if tried.call != "unknown":
                return tried
            passed_over.append(f"with {env.version}: {tried.why}")
    return dataclasses.replace(tried, why="; ".join(passed_over))


def _judge_in(
    setting: Setting, trials: Trials, *, env: envs.EngineEnv, name: str, content: str, console: Console
) -> Tried:
    say(console, f"  in the environment of {env.version}")
    assert env.tree is not None
    compiled = package(dataclasses.replace(env, pythonpath=env.pythonpath[1:]))
    if compiled is not None:
        link_compiled(compiled, env.tree.parent)
    try:
        return trials.judge(
            name,
            identity=setting.identity(env, tree=content),
            one_run=lambda: one_run(setting, env, console=console, line=LiveLine(console)),
        )
    finally:
        unlink_compiled(env.tree.parent)


def _with_tree(env: envs.EngineEnv, tree: Any) -> envs.EngineEnv:
    files = tree / PYTHON
    return dataclasses.replace(env, pythonpath=(files, *env.pythonpath), tree=files)


def fitting(repository: Repository, commit: str, *, console: Console) -> Fits:
    """Environments whose pins and compiled parts equal the commit's; the two nearest releases are installed for it."""
    try:
        needs = of_commit(repository, commit)
    except FitError as error:
        return Fits(found=(), why=str(error))
    found: list[envs.EngineEnv] = []
    reasons: list[str] = []
    for version in candidates(repository, commit):
        env, why = _fit(repository, commit, needs, version=version, console=console)
        if env is not None:
            found.append(env)
        else:
            reasons.append(why)
    return Fits(found=tuple(found[:2]), why=reasons[0] if reasons else "no release is near it")


def _fit(
    repository: Repository, commit: str, needs: Needs, *, version: str, console: Console
) -> tuple[envs.EngineEnv | None, str]:
    try:
        env = envs.ensure(version, lambda text: say(console, text))
        where = package(env)
        if where is None:
            return None, f"the files of {version} are not in a folder of its own"
        why = misfit(needs, of_release(where), version=version) or rebuilt(repository, commit, needs, version=version)
    except (envs.EnvError, FitError) as error:
        return None, f"{version}: {str(error).splitlines()[0]}"
    return (None, why) if why else (env, "")


def candidates(repository: Repository, commit: str) -> list[str]:
    """Releases whose environment may be the commit's: the one before it, the next one, then those installed."""
    line = [name for name in published().versions if drivable(name)]
    installed = [engine.version for engine in envs.list_installed() if engine.ready and drivable(engine.version)]
    tag = (repository.tag_before(commit) or "")[1:]
    if tag not in line:
        return installed
    at = line.index(tag)
    far = sorted(installed, key=lambda name: abs(line.index(name) - at) if name in line else len(line))
    return list(dict.fromkeys([*line[at : at + 2], *far]))
