"""`eaglecheck diff` for people and as JSON. It must not compare anything itself."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from harness.contract.types import Outcome
from harness.contract.words import counted
from reports.compare import Change, Comparison
from reports.live import STYLE
from reports.prose import heading, say, say_list
from reports.terminal import COMPARED

SCHEMA = 1
#: Lines of one list; the JSON holds all of them.
MOST = 20
MARK = {Change.NEW: "+", Change.GONE: "-", Change.STILL: "="}
CHANGE_STYLE = {Change.NEW: "red", Change.GONE: "green", Change.STILL: ""}


def render_diff(console: Console, found: Comparison) -> None:
    """What changed, the important first, and one sentence at the end."""
    for word, (name, release, outcome) in (("before", found.before), ("after", found.after)):
        say(console, f"{word:<7} {name}: SGLang {release}, {outcome}")
    for what, ours, theirs in found.facts:
        say(console, f"  {what}: {ours} → {theirs}")
    _verdicts(console, found)
    _signatures(console, found)
    _scenarios(console, found)
    _numbers(console, found)
    say(console)
    for reason in found.open:
        say(console, f"not everything can be said: {reason}", style="bold yellow")
    say(console, sentence(found), style="bold" if found.differs or found.open else "bold green")


def sentence(found: Comparison) -> str:
    """The last line; begins with the word that the exit code stands for."""
    common = f"{counted(found.common, 'scenario')} in common"
    if found.differs:
        by = {change: sum(one.change is change for one in found.signatures) for change in Change}
        changed = counted(len(found.verdicts), "verdict")
        findings = ", ".join(f"{by[change]} {change}" for change in Change)
        return f"differs: {changed} changed, findings: {findings}; {common}"
    if found.open:
        return f"unknown: no difference was seen, which says nothing about the rest; {common}"
    still = f", {counted(len(found.signatures), 'finding')} still there" if found.signatures else ""
    return f"same: no verdict changed and no finding came or went{still}; {common}"


def diff_document(found: Comparison) -> dict[str, Any]:
    """The comparison as JSON; described in docs/reports.md."""
    names = [one.name for one in dataclasses.fields(Comparison)]
    plain: dict[str, Any] = {name: getattr(found, name) for name in names}
    plain["before"], plain["after"] = (
        {"run": a, "engine": b, "verdict": str(c)} for a, b, c in (found.before, found.after)
    )
    for name in ("facts", "verdicts", "coverage", "compared"):
        plain[name] = [{"name": a, "before": _json(b), "after": _json(c)} for a, b, c in plain[name]]
    plain["signatures"] = [{**dataclasses.asdict(one), "change": str(one.change)} for one in found.signatures]
    plain["lengths"] = [{**dataclasses.asdict(one), "error": _number(one.error)} for one in found.lengths]
    plain["ties"] = {"before": found.ties[0], "after": found.ties[1]}
    answer = "differs" if found.differs else "unknown" if found.open else "same"
    return {"schema": SCHEMA, "answer": answer, "open": found.open, **plain}


def _json(value: object) -> object:
    return str(value) if isinstance(value, Outcome) else value


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _verdicts(console: Console, found: Comparison) -> None:
    if not found.verdicts:
        return
    heading(console, "verdicts that changed")
    for name, ours, theirs in found.verdicts[:MOST]:
        say(console, f"  {name}: {ours} → {theirs}", style=STYLE[theirs].removeprefix("bold "))
    _more(console, found.verdicts)


def _signatures(console: Console, found: Comparison) -> None:
    if not found.signatures:
        return
    heading(console, "findings (+ new, - gone, = still there)")
    for one in found.signatures[:MOST]:
        names = ", ".join(one.scenarios[:3]) + (f" and {len(one.scenarios) - 3} more" if len(one.scenarios) > 3 else "")
        say(console, f"  {MARK[one.change]} {one.signature}", style=CHANGE_STYLE[one.change])
        say(console, f"      {one.before} → {one.after} times, in {names}")
    _more(console, found.signatures)


def _scenarios(console: Console, found: Comparison) -> None:
    lists = [("only before:", found.only_before), ("only after:", found.only_after), ("changed:", found.edited)]
    if not any(names for _, names in lists):
        return
    heading(console, "scenarios that could not be compared")
    for lead, names in lists:
        if names:
            more = [f"{len(names) - MOST} more"] if len(names) > MOST else []
            say_list(console, lead, [*names[:MOST], *more])


def _numbers(console: Console, found: Comparison) -> None:
    if found.lengths:
        heading(console, "accepted length, mean over verifies")
    for one in found.lengths:
        known = f" ± {one.error:.2f}" if math.isfinite(one.error) else ""
        verifies = f"{one.verifies[0]} and {one.verifies[1]} verifies"
        say(
            console,
            f"  {one.shape}: {one.before:.2f} → {one.after:.2f} ({one.after - one.before:+.2f}{known}; {verifies})",
        )
    lists: Sequence[tuple[str, Sequence[tuple[str, int, int]]]] = [
        ("situations seen", found.coverage),
        ("values compared", [(COMPARED.get(name, name), a, b) for name, a, b in found.compared]),
    ]
    for title, lines in lists:
        if lines:
            heading(console, title)
            for name, ours, theirs in lines[:MOST]:
                lost = "  (no more)" if not theirs else "  (not before)" if not ours else ""
                say(console, f"  {name}: {ours} → {theirs}{lost}", style="bold" if lost else "")
            _more(console, lines)
    if found.ties[0] != found.ties[1]:
        say(console, f"\nties: {found.ties[0]} → {found.ties[1]}")


def _more(console: Console, lines: Sequence[object]) -> None:
    if len(lines) > MOST:
        say(console, f"  {len(lines) - MOST} more; all of them:  --json FILE")
