"""`bisect --repo`: the commits of a checkout, through git's own bisect in a worktree of ours.

Git runs `step.sh` for each commit, which runs `bisect_step`, which judges it. What a step says is good (0), bad (1),
unknown (125) or stop (255), and nothing else reaches git. It must leave the checkout and its bisect as they are.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from harness.bisect.repository import PACKAGE, PYTHON, QUIET, GitError, Repository, clean, open_repository
from harness.bisect.search import Answer, Direction, EndUnknown, NoChange, Tried
from harness.bisect.trees import Workshop
from harness.bisect.trials import Trials
from harness.cli import bisect_commit
from harness.cli.bisect_runs import Setting
from harness.contract.usage import UsageError
from harness.engines.processes import end_group
from reports.prose import say

#: git's words for the two ends; "good" and "bad" would have to mean old and new, and do not when a fix is looked for.
TERMS: dict[Direction, tuple[str, str]] = {"broken": ("good", "bad"), "fixed": ("broken", "fixed")}
CONFIG, TRIED, FAULT, SCRIPT, STATE = "search.json", "tried.jsonl", "fault.txt", "step.sh", "state"
#: What a step ends with, which a Python that fails in any way does not.
GOOD, BAD, UNKNOWN = 40, 41, 42


class StepFault(Exception):
    """A step ended otherwise than it should: our own fault, or it was killed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ends:
    """The two commits, by full id, and which of them is the older."""

    bad: str
    good: str
    direction: Direction

    @property
    def old(self) -> str:
        return self.good if self.direction == "broken" else self.bad

    @property
    def new(self) -> str:
        return self.bad if self.direction == "broken" else self.good


def checkout(path: Path) -> Repository:
    """The repository to search; UsageError if `path` is in none."""
    try:
        return open_repository(path)
    except GitError as error:
        raise UsageError(
            f"--repo {path}: not a git checkout ({str(error).splitlines()[0]})\n"
            "  name a local clone of SGLang, with its history and tags"
        ) from error


def ends(repository: Repository, *, bad: str, good: str) -> Ends:
    """Both ends as commits of SGLang, one containing the other; UsageError otherwise."""
    found = {option: _commit(repository, option, name) for option, name in (("--bad", bad), ("--good", good))}
    if found["--bad"] == found["--good"]:
        raise UsageError(f"--bad {bad} and --good {good} are the same commit {found['--bad'][:12]}\n  name two")
    if repository.contains(found["--good"], found["--bad"]):
        return _narrowed(repository, Ends(bad=found["--bad"], good=found["--good"], direction="broken"))
    if repository.contains(found["--bad"], found["--good"]):
        return _narrowed(repository, Ends(bad=found["--bad"], good=found["--good"], direction="fixed"))
    raise UsageError(
        f"neither of --bad {bad} and --good {good} contains the other, so there is no line of commits between them\n"
        + (
            f"  this clone is shallow, so the line may only be cut off:  git -C {repository.folder} fetch --unshallow"
            if repository.shallow()
            else f"  their last common commit:  git -C {repository.folder} merge-base {bad} {good}"
        )
    )


def _narrowed(repository: Repository, ends: Ends) -> Ends:
    """Its newer end moved back to the last commit that touches the Python files, which runs the same."""
    line = repository.line(ends.old, ends.new)
    if not line:
        raise UsageError(
            f"no commit between {ends.old[:12]} and {ends.new[:12]} touches {PYTHON}/, so both run the same\n"
            "  name commits further apart"
        )
    if repository.object_id(line[-1], PYTHON) != repository.object_id(ends.new, PYTHON):
        return ends
    if ends.direction == "broken":
        return dataclasses.replace(ends, bad=line[-1])
    return dataclasses.replace(ends, good=line[-1])


def _commit(repository: Repository, option: str, name: str) -> str:
    commit = repository.commit(name)
    if commit is None:
        raise UsageError(
            f"{option} {name}: no such commit or tag in {repository.folder}\n"
            f"  see what there is:  git -C {repository.folder} tag --list 'v*'; get more:  git fetch --tags --unshallow"
        )
    if repository.object_id(commit, PACKAGE) is None:
        raise UsageError(f"{option} {name}: not a commit of SGLang, it has no {PACKAGE}\n  name a clone of SGLang")
    return commit


def search_commits(
    found: Ends, *, setting: Setting, trials: Trials, shop: Workshop, console: Console
) -> tuple[Answer, list[str]]:
    """The answer and the line of commits, oldest first. Raises NoChange, EndUnknown, StepFault."""
    line = shop.repository.line(found.old, found.new)
    tried = _judge_ends(found, setting=setting, trials=trials, shop=shop, console=console)
    state = _start(found, shop)
    if len(line) > 1:
        _write_config(shop, found.direction, setting, trials)
        try:
            _run_steps(state, shop)
        except KeyboardInterrupt:
            trials.judged += _steps(shop)  # by other processes
            raise
    tried += _steps(shop)
    return _answer(found, state, shop, tried), [found.old, *line]


def _steps(shop: Workshop) -> list[Tried]:
    return [Tried(**_tupled(json.loads(text))) for text in _lines(shop.folder / TRIED)]


def _judge_ends(found: Ends, *, setting: Setting, trials: Trials, shop: Workshop, console: Console) -> list[Tried]:
    judge = bisect_commit.judge(setting, trials, shop=shop, console=console)
    tried: list[Tried] = []
    for role, commit in (("bad", found.bad), ("good", found.good)):
        tried.append(judge(commit))
        if tried[-1].call == "unknown":
            raise EndUnknown(f"{commit[:12]}, the {role} end, cannot be judged: {tried[-1].why}", tried)
    calls = [one.call for one in tried]
    if calls[0] == calls[1]:
        both = {"bad": "show the failure", "good": "pass"}[calls[0]]
        raise NoChange(f"no change between {found.old[:12]} and {found.new[:12]}: both {both}", tried)
    if calls == ["good", "bad"]:
        raise NoChange(f"the ends are the wrong way round: {found.bad[:12]} passes", tried)
    return tried


def _start(found: Ends, shop: Workshop) -> Path:
    """A worktree without files that holds git's own state of this bisect, apart from any other."""
    state = shop.folder / STATE
    shop.repository.git("worktree", "add", "--detach", "--no-checkout", str(state), found.new)
    old, new = TERMS[found.direction]
    terms = [] if found.direction == "broken" else [f"--term-old={old}", f"--term-new={new}"]
    shop.repository.git("bisect", "start", "--no-checkout", *terms, found.new, found.old, "--", PYTHON, at=state)
    return state


def _write_config(shop: Workshop, direction: Direction, setting: Setting, trials: Trials) -> None:
    config = {
        "repository": str(shop.repository.folder),
        "direction": direction,
        "setting": setting.plain(),
        "failure": dataclasses.asdict(trials.failure),
        "repeat": trials.repeat,
        "fresh": trials.fresh,
        "rate": None if trials.rate is None else dataclasses.asdict(trials.rate),
    }
    (shop.folder / CONFIG).write_text(json.dumps(config))
    step = shlex.join([sys.executable, "-P", "-m", "harness.cli.bisect_step", str(shop.folder)])
    (shop.folder / SCRIPT).write_text(script(step=step, direction=direction))


def script(*, step: str, direction: Direction) -> str:
    """The shell script git runs: what a step says in git's words, and a stop for everything that is not its word."""
    old, new = (0, 1) if direction == "broken" else (1, 0)
    return f"{step}\ncase $? in {GOOD}) exit {old};; {BAD}) exit {new};; {UNKNOWN}) exit 125;; *) exit 255;; esac\n"


def _run_steps(state: Path, shop: Workshop) -> None:
    """`git bisect run`, in a process group of its own so that nothing of it outlives us."""
    log = shop.folder / "git.log"
    command = ["git", *QUIET, "-C", str(state), "bisect", "run", "sh", str(shop.folder / SCRIPT)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, env=_step_environment(), start_new_session=True
        )
        try:
            code = process.wait()
        finally:
            end_group(process.pid)
            process.wait()
    fault = shop.folder / FAULT
    if fault.is_file():
        raise StepFault(fault.read_text())
    # 2: only commits that cannot be judged are left, which is an answer too
    if code not in (0, 2):
        said = log.read_text(errors="replace").strip().splitlines()
        raise StepFault(f"git bisect run ended with {code}: {said[-1] if said else 'it said nothing'}")


def _step_environment() -> dict[str, str]:
    """Ours, with this very eaglecheck importable wherever git runs the step."""
    here = str(Path(__file__).resolve().parents[2])
    path = [here, *filter(None, [clean().get("PYTHONPATH")])]
    return {**clean(), "PYTHONPATH": ":".join(path)}


def _answer(found: Ends, state: Path, shop: Workshop, tried: Sequence[Tried]) -> Answer:
    """What git is left with: its new end, its old ends, and what lies between and was passed over."""
    repository, (old_term, new_term) = shop.repository, TERMS[found.direction]
    new = repository.git("rev-parse", "--verify", f"refs/bisect/{new_term}", at=state)
    text = repository.git("for-each-ref", "--format=%(objectname)", f"refs/bisect/{old_term}-*", at=state)
    olds = [one for one in text.splitlines() if repository.contains(one, new)]
    old = min(olds, key=lambda one: len(repository.line(one, new)))
    between = [one for one in repository.line(old, new, without=olds) if one != new]
    return Answer(direction=found.direction, old=old, new=new, between=tuple(between), tried=tuple(tried))


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.is_file() else []


def _tupled(tried: dict[str, Any]) -> dict[str, Any]:
    return {**tried, "kinds": tuple(tried["kinds"])}


def notes(repository: Repository, console: Console) -> None:
    if repository.dirty():
        say(console, f"uncommitted changes in {repository.folder} are not looked at: only commits are", style="yellow")
