"""Text of `eaglecheck bisect`: everything tried, what changed between the two neighbours, and the answer last.

It must not search or judge, and must not import torch or sglang.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from harness.contract.words import counted
from reports.prose import heading, say, table_of

STYLES = {"bad": "bold red", "good": "bold green", "unknown": "bold yellow"}
#: More changed files than this are left to the JSON.
FILES = 15


def render_bisect(console: Console, document: dict[str, Any], *, repo: Path | None = None) -> None:
    """Everything about a finished search over releases, or the commits of `repo`; the answer comes last."""
    render_tried(console, document["tried"], what=document["over"])
    render_changed(console, document)
    say(console)
    for line in look(document, repo=repo):
        say(console, line)
    for line in certainty(document):
        say(console, line)
    for line in answer(document):
        say(console, line, style="bold")
    for name, title in document["commits"].items():
        say(console, f"  {document['labels'][name]} {title}")


def render_tried(console: Console, tried: Sequence[dict[str, Any]], *, what: str) -> None:
    """One row a version, in the order of the line, which is not that of the search."""
    heading(console, "tried")
    repeated = any(one["tries"] > 1 for one in tried)
    names = {"releases": "release", "commits": "commit"}
    columns = (names[what], "call", *(["shown"] if repeated else []), "s", "why")
    table = table_of(columns, right=("shown", "s"), folded="why")
    for one in tried:
        shown = [f"{one['failures']} of {one['tries']}"] if repeated else []
        seconds = "seen before" if one["tries"] and one["cached"] == one["tries"] else f"{one['seconds']:.0f}"
        why = one["why"] + (f"; {one['title']}" if one.get("title") else "")
        table.add_row(one["label"], Text(one["call"], style=STYLES[one["call"]]), *shown, seconds, Text(why))
    console.print(table)


def render_changed(console: Console, document: dict[str, Any]) -> None:
    """The files that differ between the two neighbours: those on the finding's path, then the most changed."""
    files = document["changed"]
    heading(console, f"what changed in the speculative files from {_old(document)} to {_new(document)}")
    if not files:
        say(console, "  nothing" if document["changed_known"] else "  not known: one of the two is not installed")
    counts = [f"+{one['added']} -{one['removed']}" for one in files[:FILES]]
    width = max(map(len, counts), default=0)
    for count, one in zip(counts, files, strict=False):
        state = "" if one["state"] == "changed" else f" ({one['state']})"
        path = " ← made or read the first wrong value" if one["on_path"] else ""
        say(console, f"  {count:>{width}}  {one['path']}{state}{path}")
    if len(files) > FILES:
        say(console, f"  and {counted(len(files) - FILES, 'more file')}; all of them:  --json FILE")


def look(document: dict[str, Any], *, repo: Path | None = None) -> list[str]:
    """Where the failure nearest to the change can be seen, the change, and why versions beside it have no verdict."""
    calls = {one["name"]: one for one in document["tried"]}
    bad = calls.get(document["first_bad"] or document["last_bad"])
    lines = []
    if bad is not None and bad["run"]:
        lines.append(f"look at the failure on {bad['label']}:  eaglecheck recheck {bad['run']}")
    if repo is not None and document["exact"]:
        lines.append(f"look at the commit:  git -C {repo} show {_new(document)}")
    for one in document["between"]:
        seen = calls.get(one["name"])
        if seen is not None and seen["run"]:
            lines.append(f"why {one['label']} has no verdict:  less {seen['run']}/engine.log")
    return lines


def certainty(document: dict[str, Any]) -> list[str]:
    """What the answer rests on, in words."""
    rate, lines = document["rate"], []
    if not document["repeated"]:
        lines.append("one run each: if the failure comes and goes, search with  --repeat 5")
    else:
        lines.append(
            f"at the bad end the failure showed in {rate['failures']} of {rate['tries']} runs: with 95 % confidence "
            f"in at least {rate['lower']:.0%} of all runs"
        )
        risk = f"{document['risk']:.1%}" if document["risk"] >= 0.001 else f"{document['risk']:.1e}"
        lines.append(f"so the probability that any 'good' here is wrong, and the answer with it, is {risk} at most")
    return lines


def answer(document: dict[str, Any]) -> list[str]:
    """The answer, and what is left open."""
    old, new = _old(document), _new(document)
    word, other = ("first bad", "last good") if document["direction"] == "broken" else ("first good", "last bad")
    what = document["over"][:-1]
    lines = []
    if document["between"]:
        names = [one["label"] for one in document["between"]]
        listed = ", ".join(names) if len(names) <= 8 else f"{', '.join(names[:4])}, … {', '.join(names[-2:])}"
        lines.append(f"{counted(len(names), what)} between could not be judged: {listed}")
        either = names[0] if len(names) == 1 else "one of those"
        lines.append(f"{word} {what}: {either} or {new}; {other}: {old}")
    else:
        lines.append(f"{word} {what}: {new}; {other}: {old}")
    return lines


def _old(document: dict[str, Any]) -> str:
    return str(document["labels"][document["last_good"] or document["last_bad"]])


def _new(document: dict[str, Any]) -> str:
    return str(document["labels"][document["first_bad"] or document["first_good"]])
