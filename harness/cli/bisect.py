"""`eaglecheck bisect`: which release, or which commit of a checkout, a failure came with or went with."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from harness.archive.run_folders import whole
from harness.bisect.changes import Changed, changed_between
from harness.bisect.repository import checkout, commits, worktrees
from harness.bisect.search import Answer, Line, NoAnswer, NoChange, Tried, search
from harness.bisect.trials import MOST_TRIES, Subject, Trials
from harness.bisect.verdicts import Cache
from harness.cli import bisect_runs, bisect_versions, options
from harness.cli.bisect_runs import Setting
from harness.cli.outcome import Exit, guarded, kept, typed_again
from harness.contract.outputs import check_target, write_json
from harness.contract.usage import UsageError
from harness.contract.words import counted
from harness.driving.adapt import NOTHING, Wanted
from reports.bisect import render_bisect
from reports.prose import say

#: Of the JSON, which is stable and described in docs/bisect.md.
BISECT_SCHEMA = 1


@guarded
@options.takes_settings(options.OF_KERNELS)
def command(
    bad: Annotated[str, typer.Option(help="A release (with --repo: a commit) that shows the failure.")],
    good: Annotated[str, typer.Option(help="A release (with --repo: a commit) without it, older or newer.")],
    case: Annotated[
        str | None, typer.Option(metavar="CASE|DIR", help="What to search for: a corpus case, or a reproducer folder.")
    ] = None,
    scenario_file: Annotated[Path | None, typer.Option(help="Or a scenario in a JSON file: any divergence.")] = None,
    repo: Annotated[
        Path | None, typer.Option(help="Search the commits of this SGLang checkout instead; it is left as it is.")
    ] = None,
    repeat: Annotated[
        int | None, typer.Option(help="Runs of each version, for a failure that comes and goes. Default: as measured.")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Use no verdicts of earlier searches.")] = False,
    device: Annotated[
        str | None, typer.Option(help="Device to run engines on: cpu or cuda. Default: the reproducer's, else cpu.")
    ] = None,
    gpu_share: options.GpuShare = None,
    wanted: Wanted = NOTHING,
    assume: options.Assume = None,
    runs: options.Runs = None,
    json: options.Json = None,
) -> Exit:
    """Find the first bad, or first good, release or commit between two, and what changed there.

    Exits 0 with an exact answer, 3 when versions that cannot be judged leave a range or nothing.
    """
    console = Console(stderr=json == "-")
    check_target(json, inputs=[scenario_file], runs=[whole(Path(case))] if case else ())
    if repeat is not None and not 1 <= repeat <= MOST_TRIES:
        raise UsageError(f"--repeat {repeat} is out of range\n  allowed: 1 to {MOST_TRIES}")
    setting = bisect_runs.choose(
        case=case,
        scenario_file=scenario_file,
        device=device,
        gpu_share=gpu_share,
        wanted=wanted,
        runs=runs,
        assume=assume or (),
    )
    trials = Trials(failure=setting.subject.failure, cache=Cache.at_home(), repeat=repeat, fresh=fresh)
    try:
        with kept(json, lambda stop: _by_now(setting, trials, repo, stop), left=_left):
            if repo is None:
                document = _over_releases(setting, trials, bad=bad, good=good, console=console)
            else:
                document = _over_commits(repo, setting, trials, bad=bad, good=good, console=console)
    except NoAnswer as error:
        for one in error.tried:
            say(console, f"  {one.name} is {one.call}: {one.why}" + (f"; {one.run}" if one.run else ""))
        if isinstance(error, NoChange) and not trials.repeated:
            error.add_note("if the failure comes and goes, search with  --repeat 5")
        raise
    render_bisect(console, document, repo=repo)
    write_json(document, json)
    return Exit.PASS if document["exact"] else Exit.UNKNOWN


def _left() -> str:
    """A search goes on where it was: whoever types it again waits for nothing twice."""
    return (
        "what was judged on installed releases is remembered, and is not run again\n"
        f"  go on:  {typed_again(without=('--fresh',))}"
    )


def _by_now(setting: Setting, trials: Trials, repo: Path | None, stop: KeyboardInterrupt) -> dict[str, Any]:
    over = "releases" if repo is None else "commits"
    return interrupted_document(over=over, subject=setting.subject, trials=trials, why=str(stop) or "interrupted")


def _over_releases(setting: Setting, trials: Trials, *, bad: str, good: str, console: Console) -> dict[str, Any]:
    line, direction, note = bisect_versions.releases(bad=bad, good=good)
    if note:
        say(console, note, style="yellow")
    most = math.ceil(math.log2(max(len(line.names) - 1, 1))) + 2
    say(
        console,
        f"{counted(len(line.names), 'release')} from {line.old} to {line.new}, "
        f"{setting.subject.name} ({trials.failure.describe()}): at most {most} to try, more if some cannot be judged",
    )
    found = search(line, bisect_versions.judge_release(setting, trials, console=console), direction=direction)
    path = bisect_versions.path_of(found.tried)
    changed = bisect_versions.changed_between_releases(found.old, found.new, path=path)
    return bisect_document(found, line=line, subject=setting.subject, trials=trials, changed=changed, note=note)


def _over_commits(
    repo: Path, setting: Setting, trials: Trials, *, bad: str, good: str, console: Console
) -> dict[str, Any]:
    repository = checkout(repo)
    line = commits(repository, bad=bad, good=good)
    if repository.dirty():
        said = f"uncommitted changes in {repository.folder} are not looked at: only commits are"
        say(console, said, style="yellow")
    with worktrees(repository) as trees:
        judge = bisect_versions.judge_commit(setting, trials, worktrees=trees, console=console)
        found = search(line, judge, direction=line.direction)
    changed = changed_between(repository, found.old, found.new, path=bisect_versions.path_of(found.tried))
    return bisect_document(found, line=line, subject=setting.subject, trials=trials, changed=changed)


def bisect_document(
    found: Answer, *, line: Line, subject: Subject, trials: Trials, changed: Sequence[Changed] | None, note: str = ""
) -> dict[str, Any]:
    """The whole search. changed: None where the two trees are not both there."""
    order, ends = {name: at for at, name in enumerate(line.names)}, (found.old, found.new)
    tried = sorted(found.tried, key=lambda one: order.get(one.name, 0))
    return {
        **interrupted_document(over=line.over, subject=subject, trials=trials, why=note),
        "direction": found.direction,
        "first_bad": found.first_bad,
        "first_good": found.first_good,
        "last_good": found.last_good,
        "last_bad": found.last_bad,
        "exact": found.exact,
        "between": [{"name": name, "label": line.label(name)} for name in found.between],
        "versions": len(order),
        "tried": [_tried(one, label=line.label(one.name), title=line.title(one.name)) for one in tried],
        "risk": found.risk,
        "changed_known": changed is not None,
        "changed": [dataclasses.asdict(one) for one in changed or ()],
        "commits": {name: line.title(name) for name in ends} if line.over == "commits" else {},
        "labels": {name: line.label(name) for name in ends},
    }


def interrupted_document(*, over: str, subject: Subject, trials: Trials, why: str) -> dict[str, Any]:
    """What there is without an answer: what is searched for, and everything tried so far."""
    rate = trials.rate
    return {
        "schema": BISECT_SCHEMA,
        "case": subject.name,
        "scenario": subject.scenario.id,
        "failure": {"signature": trials.failure.signature, "kinds": list(trials.failure.kinds)},
        "over": over,
        "exact": False,
        "tried": [_tried(one, label=one.name, title="") for one in trials.judged],
        "repeated": trials.repeated,
        "rate": rate and {"failures": rate.failures, "tries": rate.tries, "lower": round(rate.lower, 6)},
        "note": why,
    }


def _tried(one: Tried, *, label: str, title: str) -> dict[str, Any]:
    return {
        **dataclasses.asdict(one),
        "label": label,
        "title": title,
        "kinds": list(one.kinds),
        "seconds": round(one.seconds, 1),
        "run": one.run if one.run and Path(one.run).is_dir() else None,
    }
