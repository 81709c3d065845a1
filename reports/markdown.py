"""`eaglecheck report --markdown`: for issues and pull requests. Short, and the first divergence comes first.

Whatever an engine said stands inside code, where no `@name`, `#1` or tag of it means anything. It must not judge.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from harness.checks.describe import describe
from harness.contract.types import Outcome
from harness.contract.words import counted, some
from harness.driving.results import ScenarioResult, accept_lengths_of
from reports.findings import facts, first_of, flag_lines, known_lines, said_lines
from reports.histogram import histograms
from reports.page import engine_lines, exercised
from reports.prose import block, code, markdown_table
from reports.reading import Report
from reports.signatures import Defect, by_signature
from reports.terminal import accept_text, caveats, unjudged, verdict_line

#: GitHub refuses a comment above 65 536 characters; the rest is for whoever puts ours into a larger one.
LIMIT = 60_000
MARK = {Outcome.PASS: "✓", Outcome.FAIL: "✕", Outcome.UNKNOWN: "?"}
#: Rows of a table and lines of an engine's words; what is left out is counted.
ROWS, WORDS = 40, 20


def render_markdown(report: Report, *, limit: int = LIMIT) -> str:
    """The whole text, at most `limit` characters; whole sections are left out at its end, and named."""
    kept: list[str] = []
    left_out: list[str] = []
    used = 0
    for name, section in _sections(report):
        size = len(section) + 2
        if left_out or used + size > limit - 200:  # room for the line that names what is left out
            left_out.append(name)
            continue
        kept.append(section)
        used += size
    if left_out:
        kept.append(f"_Left out for length: {', '.join(left_out)}. See the run folder `{report.source.folder}`._")
    return "\n\n".join(kept) + "\n"


def _sections(report: Report) -> Iterable[tuple[str, str]]:
    """(name, text), the most important first."""
    result = report.result
    sentence = re.sub(r"#\d+", lambda found: f"`{found.group()}`", verdict_line(result).partition(": ")[2])
    yield "the verdict", f"### {MARK[result.verdict.outcome]} eaglecheck {result.verdict.outcome}: {sentence}"
    yield "what it holds for", "\n".join(f"- {code(line)}" for line in [*engine_lines(report), *caveats(result)])
    if report.source.missing:
        yield "what is missing", f"**{report.source.missing}**"
    first = _first(result.results)
    if first is not None:
        yield "the first divergence", first
    defects = [one for one in by_signature(result.results) if not one.cause]
    if len(defects) > 1 or any(len(one.scenarios) > 1 for one in defects):
        yield "the findings", _findings(defects, result.results)
    open_ones = unjudged(result)
    if open_ones:
        yield "what could not be judged", _unjudged(open_ones, result.results)
    yield "what was exercised", _exercised(report)


def _first(results: Sequence[ScenarioResult]) -> str | None:
    for one in results:
        if found := first_of(one):
            said = block(_cut(describe(found.first, one.scenario, finding=found)))
            pointed = [code(line) for line in said_lines(one, found.signature)]
            listed = "\n".join(f"- {line}" for line in [*pointed, *facts(one), *flag_lines(one)])
            again = [f"eaglecheck recheck {one.folder}   # judges it again without SGLang"]
            again += [] if one.reproducer is None else [f"eaglecheck replay {one.reproducer}   # runs it again"]
            title = f"**First divergence**, in {code(one.scenario.name)}"
            return "\n\n".join([title, said, listed, block("\n".join(again), "sh")])
    return None


def _cut(text: str) -> str:
    lines = text.splitlines()
    more = [f"… {len(lines) - WORDS} more lines"] if len(lines) > WORDS else []
    return "\n".join([*(line[:400] for line in lines[:WORDS]), *more])


def _findings(defects: Sequence[Defect], results: Sequence[ScenarioResult]) -> str:
    rows = [
        (
            code(one.signature),
            str(one.count),
            one.where,
            "" if one.accept is None else one.accept.text,
            ", ".join(one.known),
        )
        for one in defects
    ]
    more = f"\n\n{len(rows) - ROWS} more." if len(rows) > ROWS else ""
    head = ("signature", "times", "in", "accept length", "known as")
    listed = f"{markdown_table(head, rows[:ROWS])}{more}"
    found = f"**{counted(len(rows), 'finding')}** that nothing earlier explains\n\n{listed}"
    known = dict.fromkeys(line for one in defects for line in known_lines(results[one.at], one.signature))
    return "\n\n".join([found, *(["\n".join(f"- {code(line)}" for line in known)] if known else [])])


def _unjudged(reasons: dict[str, list[str]], results: Sequence[ScenarioResult]) -> str:
    lines = []
    for reason, names in list(reasons.items())[:ROWS]:
        one = next(one for one in results if reason in one.verdict.reasons)
        known = "".join(f"\n- {code(line)}" for line in known_lines(one, reason))
        lines.append(f"{some([*map(code, names)], 3)}\n{block(_cut(reason))}{known}")
    left = f"\n\n{len(reasons) - ROWS} more reasons." if len(reasons) > ROWS else ""
    return "**No verdict on**\n\n" + "\n\n".join(lines) + left


def _exercised(report: Report) -> str:
    rows = [(name, f"{count:,}") for name, count in exercised(report)]
    accept = accept_lengths_of(report.result.results)
    rows += [] if accept is None else [("accept length", accept_text(accept))]
    for one in histograms(frames.accept_lengths for frames in report.frames):
        lengths = f"{one.mean:.2f} ± {one.spread:.2f} over {one.verifies:,} verifies"
        rows.append((f"accepted length, {one.title}", lengths))
    wanted = sorted({name for one in report.result.results for name in one.scenario.wants})
    seen = report.result.verdict.coverage
    asked = [f"{code(name)} {seen.get(name, 0)} ×" for name in wanted[:ROWS]]
    more = f", {len(wanted) - ROWS} more" if len(wanted) > ROWS else ""
    coverage_points = f"\n\nCoverage points asked for: {', '.join(asked)}{more}" if asked else ""
    inner = markdown_table(("what was exercised", ""), rows) + coverage_points
    return f"<details><summary>What was exercised</summary>\n\n{inner}\n\n</details>"
