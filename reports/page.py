"""`eaglecheck report --html`: one page that opens from disk, with nothing to fetch.

Everything but the map and the rounds stands in the page as it is; those are drawn from embedded JSON by the script.
It must not judge, and must not import torch or sglang.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from harness.archive.again import run_again
from harness.archive.run_folders import is_case
from harness.checks.describe import describe
from harness.checks.findings import Finding, kinds
from harness.contract.types import Outcome
from harness.contract.words import counted, some
from harness.coverage import reach_of
from harness.driving.results import ScenarioResult, accept_lengths_of
from reports.findings import facts, first_of, flag_lines, known_lines, said_lines
from reports.frames import Frames
from reports.histogram import histograms
from reports.live import drafted, engine_facts, short_name
from reports.page_data import embedded, scenario_head, scenario_rows
from reports.reading import Report
from reports.signatures import Defect, by_signature
from reports.terminal import COMPARED, accept_text, judges, unjudged, verdict_line

if TYPE_CHECKING:  # the page shows charts that the night has made
    from harness.night.trends import Trends

TEMPLATES = Path(__file__).parent / "templates"
#: Concatenated in this order into one script: each file uses only what stands before it. All but the first draw the
#: map, and are left out where nothing was judged.
SCRIPTS = ("copy.js", "data.js", "map.js", "tree.js", "round.js", "page.js")
#: Scenarios and findings listed in full; the selector above the map holds all of them.
LISTED = 100
#: Reasons for no verdict that come before everything else, and scenarios named by each.
UNJUDGED = 3
#: Rows that travel with a page, of failing scenarios first: some 20 MB. The rounds of all scenarios always do.
MOST_ROWS = 250_000
#: An address in a text that is escaped already.
ADDRESS = re.compile(r"https://[^\s,;()<>]+")
ORDER = (Outcome.FAIL, Outcome.UNKNOWN, Outcome.PASS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """What else the page shows: documents that `matrix --json` and `mutants --json` wrote, and a store of nights.

    boards: documents as `mutants`, of a night's cells. first_seen: signature -> the night of that store that saw it
    first, None without a store.
    """

    matrix: dict[str, Any] | None = None
    mutants: dict[str, Any] | None = None
    boards: Sequence[dict[str, Any]] = ()
    trends: Trends | None = None
    first_seen: Mapping[str, str] | None = None


def render_page(report: Report, *, beside: Beside | None = None) -> str:
    """The whole page."""
    extra, result = beside or Beside(), report.result
    order = sorted(range(len(result.results)), key=lambda at: ORDER.index(result.results[at].verdict.outcome))
    ordered = [(result.results[at], report.frames[at]) for at in order]
    results = [one for one, _ in ordered]
    defects = by_signature(results)
    shown = dict(islice(unjudged(result).items(), UNJUDGED))
    template = _environment().get_template("page.html")
    return template.render(
        title=f"eaglecheck {report.source.name}",
        outcome=str(result.verdict.outcome),
        sentence=verdict_line(result).partition(": ")[2],
        missing=report.source.missing,
        again=run_again(report.source.folder) if report.source.missing and not is_case(report.source.folder) else "",
        engine=[*engine_lines(report), _when(report)],
        exercised=exercised(report),
        compared=[
            (title, result.verdict.compared[name])
            for name, title in COMPARED.items()
            if name in result.verdict.compared
        ],
        notes=[
            line
            for reason in result.verdict.reasons
            if reason not in shown and reason != report.source.missing and not _about_findings(reason, results)
            for line in (reason, *dict.fromkeys(line for one in results for line in known_lines(one, reason)))
        ],
        first=_first(results, [one for one in defects if not one.cause], extra.first_seen),
        unjudged=[_unjudged(reason, names, results) for reason, names in shown.items()],
        findings=[_finding(one, results) for one in defects[:LISTED]],
        findings_left=max(len(defects) - LISTED, 0),
        scenarios=[_scenario(one, at) for at, one in enumerate(results)][:LISTED],
        scenario_count=len(results),
        names=[f"{one.scenario.name} ({one.verdict.outcome})" for one in results],
        coverage_points=reach_of((one.scenario, one.verdict) for one in results),
        replaced=result.replaced,
        accept=None if (accept := accept_lengths_of(results)) is None else accept_text(accept),
        histograms=histograms([frames.accept_lengths for _, frames in ordered]),
        matrix=extra.matrix,
        boards=[*filter(None, [extra.mutants]), *extra.boards],
        trends=extra.trends,
        heads=[embedded(scenario_head(one, frames)) for one, frames in ordered],
        rows=_rows(ordered),
        origin=_origin(report),
        css=_source("page.css"),
        script=_source(*SCRIPTS[: None if results else 1]),
    )


def _source(*names: str) -> Markup:
    """Files of the page, as they are."""
    return Markup("\n".join((TEMPLATES / name).read_text(encoding="utf-8") for name in names))


def _rows(ordered: Sequence[tuple[ScenarioResult, Frames]]) -> list[Markup]:
    """The rows of each scenario; null for those that would make the page too large."""
    room = MOST_ROWS
    found: list[Markup] = []
    for one, frames in ordered:
        fits = not found or len(frames.positions) <= room
        room -= len(frames.positions) if fits else 0
        found.append(embedded(scenario_rows(one, frames) if fits else None))
    return found


def linked(text: str) -> Markup:
    """Text whose addresses can be followed."""
    return Markup(ADDRESS.sub(r'<a href="\g<0>">\g<0></a>', str(escape(text))))


def _environment() -> Environment:
    made = Environment(
        loader=PackageLoader("reports"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters["linked"] = linked
    return made


def engine_lines(report: Report) -> list[str]:
    """Which engine answered, and what stood in for parts of it."""
    header = report.source.engine
    if not header.get("worker"):
        return ["no engine came up"]
    facts, ours = engine_facts(header)[0], report.result.replaced
    kernels = f"replacement kernels: {', '.join(map(short_name, ours))}" if ours else ""
    return [facts, *filter(None, [kernels, judges(report.result.results)])]


def exercised(report: Report) -> list[tuple[str, int]]:
    """What was driven."""
    results, verdict = report.result.results, report.result.verdict
    return [
        ("scenarios", len(results)),
        ("rounds", sum(one.rounds for one in results)),
        drafted(results),
        ("positions compared", verdict.compared.get("positions", 0)),
        ("token choices compared", verdict.compared.get("tokens", 0) + verdict.compared.get("proposals", 0)),
        ("mismatches", sum(found.count for one in results for found in one.findings)),
        ("ties", verdict.ties),
    ]


def _when(report: Report) -> str:
    """Which run this is, where it ran, and when."""
    manifest = report.source.manifest
    began = "" if manifest is None else f", began {manifest.created[:16].replace('T', ' ')} UTC"
    return f"{report.source.name} on {report.source.device}{began}"


def _unjudged(reason: str, names: Sequence[str], results: Sequence[ScenarioResult]) -> dict[str, Any]:
    """Why scenarios have no verdict, and what to type."""
    one = next(one for one in results if reason in one.verdict.reasons)
    what, *lines = reason.splitlines()
    return {
        "names": some(names, UNJUDGED),
        "what": what,
        "text": "\n".join(lines),
        "known": known_lines(one, reason),
        "commands": [("run it again", run_again(one.folder))],
    }


def _about_findings(reason: str, results: Sequence[ScenarioResult]) -> bool:
    """Whether a reason only repeats a finding, which the page shows itself."""
    return any(f" × {found.signature}" in reason for one in results for found in one.findings)


def _first(
    results: Sequence[ScenarioResult], roots: Sequence[Defect], first_seen: Mapping[str, str] | None
) -> dict[str, Any] | None:
    """The first wrong place of the run: what differs, the two facts, and what to type."""
    for at, one in enumerate(results):
        if found := first_of(one):
            title, *lines = describe(found.first, one.scenario, finding=found).split("\n")
            known = known_lines(one, found.signature)
            said = [line for line in said_lines(one, found.signature) if line not in known]
            return {
                "scenario": one.scenario.name,
                "title": title,
                "known": [*known, *_since(found.signature, first_seen)],
                "others": len(roots) - 1,
                "failing": sum(each.verdict.outcome is Outcome.FAIL for each in results),
                "lines": [line.strip() for line in [*lines, *said]],
                "facts": facts(one),
                "flags": [line.removeprefix("server flags: ") for line in flag_lines(one)],
                "link": _link(one, found, at),
                "commands": _commands(one),
            }
    return None


def _since(signature: str, first_seen: Mapping[str, str] | None) -> list[str]:
    """Since when the nights beside have it; nothing where there are none beside."""
    if first_seen is None:
        return []
    seen = first_seen.get(signature)
    return ["in none of these nights on this release" if seen is None else f"in these nights since {seen}"]


def _commands(one: ScenarioResult) -> list[tuple[str, str]]:
    again = [] if one.reproducer is None else [("run it again", f"eaglecheck replay {one.reproducer}")]
    return [*again, ("look again without SGLang", f"eaglecheck recheck {one.folder}")]


def _finding(defect: Defect, results: Sequence[ScenarioResult]) -> dict[str, Any]:
    one = results[defect.at]
    return {
        "signature": defect.signature,
        "where": defect.where,
        "count": defect.count,
        "cause": defect.cause,
        "text": [
            *describe(defect.first.first, one.scenario).split("\n"),
            *said_lines(one, defect.signature, accept=defect.accept),
        ],
        "link": _link(one, defect.first, defect.at),
    }


def _link(one: ScenarioResult, found: Finding, at: int) -> str:
    """Where the page shows the finding's first divergence; the script reads it."""
    key = found.first.key
    return f"#s={at}&d={key.dp_rank}&r={found.first.round}&q={key.rid}" if found.first.round >= 0 else f"#s={at}"


def _scenario(one: ScenarioResult, at: int) -> dict[str, Any]:
    spec = one.scenario.spec
    reasons = [reason for reason in one.verdict.reasons if one.verdict.outcome is Outcome.UNKNOWN]
    return {
        "name": one.scenario.name,
        "outcome": str(one.verdict.outcome),
        "kinds": ", ".join(kinds(one.findings, roots_only=True)) or (reasons[0].splitlines()[0] if reasons else ""),
        "spec": f"{spec.algorithm}, {counted(spec.num_steps, 'step')}"
        + (f" × topk {spec.eagle_topk}, {spec.num_draft_tokens} draft tokens" if spec.eagle_topk > 1 else ""),
        "requests": len(one.scenario.requests),
        "rounds": one.rounds,
        "accept": "–" if one.accept is None else one.accept.text,
        "text": {True: "identical", False: "differs", None: "–"}[one.text_identical],
        "link": f"#s={at}",
    }


def _origin(report: Report) -> list[tuple[str, str]]:
    """Where the page comes from: enough to find the run again."""
    manifest = report.source.manifest
    known = [("run", str(report.source.folder)), ("device", report.source.device)]
    if manifest is not None:
        known += [
            ("began", manifest.created),
            ("command", " ".join(manifest.argv)),
            ("eaglecheck", manifest.eaglecheck),
        ]
        known += report.source.pair.items()
        known += [("checkout", manifest.git_head[:12] + (" (changed)" if manifest.git_dirty else ""))]
        known += [("seed", "" if manifest.seed is None else str(manifest.seed)), ("Python", manifest.python)]
    return [(name, value) for name, value in known if value]
