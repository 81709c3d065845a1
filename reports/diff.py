"""`eaglecheck diff`: what changed between two runs, for people and as JSON. Nothing is judged anew.

Verdicts, findings by signature, coverage, accepted lengths. Only scenarios that both runs judged can be compared; the
others are named.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from rich.console import Console

from harness.contract.scenario import Scenario
from harness.contract.settings import EngineConfig
from harness.contract.types import Outcome
from harness.contract.words import counted, some
from harness.driving.results import ScenarioResult
from reports.columns import join
from reports.histogram import SHAPE, shape
from reports.live import STYLE
from reports.prose import heading, say, say_list
from reports.reading import Report
from reports.terminal import COMPARED

SCHEMA = 1
#: Lines of one list; the JSON holds all of them.
MOST = 20
#: What the handshake reports of an engine, in words.
FACTS = {
    "release": "SGLang",
    "device": "device",
    "worker": "worker",
    "overlap": "overlap loop",
    "backend": "attention",
    "dtype": "dtype",
    "torch": "torch",
    "revert": "reverted",
}

#: Settings of a scenario's engine that the handshake reports too.
REPORTED = frozenset(("dtype", "attention_backend", "overlap_schedule"))
#: The folders of a pair that the user named.
FOLDERS = ("target", "draft")
#: A run without one.
OURS = "a pair of ours"


class Change(StrEnum):
    """What became of a signature from the first run to the second."""

    NEW = "new"
    GONE = "gone"
    STILL = "still"


MARK = {Change.NEW: ("+", "red"), Change.GONE: ("-", "green"), Change.STILL: ("=", "")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One named value in both runs."""

    name: str
    before: Any
    after: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """A root finding's signature over the scenarios that both runs judged: how often, and in which of them."""

    signature: str
    change: Change
    before: int
    after: int
    scenarios: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Accepted lengths of one draft shape: means, and what the difference of the means is uncertain by.

    error: standard error of the difference, NaN where either run has fewer than two verifies.
    """

    shape: str
    before: float
    after: float
    verifies: tuple[int, int]
    error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """before, after: the run's name, release and verdict. facts: what else differs between the engines.

    common: scenarios judged in both; edited: those of the same name whose program differs, not compared.
    """

    before: tuple[str, str, Outcome]
    after: tuple[str, str, Outcome]
    facts: tuple[Pair, ...]
    common: int
    only_before: tuple[str, ...]
    only_after: tuple[str, ...]
    edited: tuple[str, ...]
    verdicts: tuple[Pair, ...]
    unjudged: tuple[str, ...]
    signatures: tuple[Signature, ...]
    coverage: tuple[Pair, ...]
    compared: tuple[Pair, ...]
    ties: tuple[int, int]
    lengths: tuple[Lengths, ...]
    missing: tuple[str, ...]

    @property
    def differs(self) -> bool:
        """Whether a verdict changed, or a signature came or went."""
        return bool(self.verdicts) or any(one.change is not Change.STILL for one in self.signatures)

    @property
    def open(self) -> list[str]:
        """Why it cannot be said that nothing changed; empty where it can."""
        reasons = list(self.missing)
        if not self.common:
            reasons.append("the two runs have no scenario in common")
        if self.unjudged:
            reasons.append(f"{', '.join(self.unjudged[:3])} could not be judged in either run")
        return reasons


def compare(before: Report, after: Report) -> Comparison:
    """The second run against the first."""
    ours, theirs = ({_program(one.scenario): one for one in run.result.results} for run in (before, after))
    both = [(ours[name], theirs[name]) for name in ours if name in theirs]
    counts = [pair for pair in both if all(one.verdict.compared for one in pair)]  # a reproducer keeps no counts
    gone = [one.scenario.name for name, one in ours.items() if name not in theirs]
    came = [one.scenario.name for name, one in theirs.items() if name not in ours]
    edited = sorted(set(gone) & set(came))
    verdicts = [(one.scenario.name, one.verdict.outcome, other.verdict.outcome) for one, other in both]
    return Comparison(
        before=(before.source.name, before.source.release, before.result.verdict.outcome),
        after=(after.source.name, after.source.release, after.result.verdict.outcome),
        facts=_differing([*_facts(before, after), *_settings(both)]),
        common=len(both),
        only_before=tuple(name for name in gone if name not in edited),
        only_after=tuple(name for name in came if name not in edited),
        edited=tuple(edited),
        verdicts=_differing(verdicts),
        unjudged=tuple(name for name, one, other in verdicts if one is other is Outcome.UNKNOWN),
        signatures=tuple(_signatures(both)),
        coverage=_sums((one.verdict.coverage, other.verdict.coverage) for one, other in counts),
        compared=_sums((one.verdict.compared, other.verdict.compared) for one, other in counts),
        ties=(sum(one.verdict.ties for one, _ in counts), sum(other.verdict.ties for _, other in counts)),
        lengths=tuple(_lengths(before, after, [_program(one.scenario) for one, _ in both])),
        missing=tuple(f"{one.source.name}: {one.source.missing}" for one in (before, after) if one.source.missing),
    )


def _program(scenario: Scenario) -> str:
    """What was asked of the engine, whatever its settings: one program, eagerly and in graphs, can be compared."""
    parts = scenario.model_dump(mode="json", include={"name", "spec", "requests", "script", "checkpoint"})
    return json.dumps(parts, sort_keys=True)


def _facts(before: Report, after: Report) -> Iterator[tuple[str, str, str]]:
    """What is known of both engines and of their pairs."""
    ours, theirs = before.source, after.source
    for name, words in FACTS.items():
        yield words, str(ours.engine.get(name)), str(theirs.engine.get(name))
    for name in FOLDERS:
        yield name, ours.pair.get(name, OURS), theirs.pair.get(name, OURS)


def _settings(pairs: Sequence[tuple[ScenarioResult, ScenarioResult]]) -> Iterator[tuple[str, str, str]]:
    """What scenarios in common asked of their engines, by the key in a scenario file: all values, where any differ."""
    engines = [(one.scenario.engine, other.scenario.engine) for one, other in pairs]
    for name in EngineConfig.model_fields:
        values = [(getattr(one, name), getattr(other, name)) for one, other in engines]
        if name not in REPORTED and any(one != other for one, other in values):
            ours, theirs = (", ".join(dict.fromkeys(map(str, side))) for side in zip(*values, strict=True))
            yield f"engine.{name}", ours, theirs


def _differing(values: Iterable[tuple[str, Any, Any]]) -> tuple[Pair, ...]:
    return tuple(Pair(name=name, before=ours, after=theirs) for name, ours, theirs in values if ours != theirs)


def _sums(pairs: Iterable[tuple[Mapping[str, int], Mapping[str, int]]]) -> tuple[Pair, ...]:
    """Names whose sums differ."""
    before, after = Counter[str](), Counter[str]()
    for ours, theirs in pairs:
        before.update(ours)
        after.update(theirs)
    return _differing((name, before[name], after[name]) for name in dict.fromkeys([*before, *after]))


def _signatures(pairs: Sequence[tuple[ScenarioResult, ScenarioResult]]) -> list[Signature]:
    before, after, where = Counter[str](), Counter[str](), dict[str, dict[str, None]]()
    for pair in pairs:
        for side, one in zip((before, after), pair, strict=True):
            for found in one.findings:
                if found.is_root:
                    side[found.signature] += found.count
                    where.setdefault(found.signature, {})[one.scenario.name] = None
    changes = {
        name: Change.STILL if before[name] and after[name] else Change.NEW if after[name] else Change.GONE
        for name in where
    }
    return [
        Signature(
            signature=name, change=changes[name], before=before[name], after=after[name], scenarios=tuple(where[name])
        )
        for name in sorted(where, key=lambda name: (list(Change).index(changes[name]), name))
    ]


def _lengths(before: Report, after: Report, both: Sequence[str]) -> Iterable[Lengths]:
    tables = []
    for run in (before, after):
        pairs = zip(run.result.results, run.frames, strict=True)
        kept = [frames.accept_lengths for one, frames in pairs if _program(one.scenario) in both]
        tables.append(
            join("accept_lengths", kept).groupby(SHAPE, sort=False)["accept_len"].agg(["mean", "var", "size"])
        )
    for key in tables[0].index:
        if key in tables[1].index:
            one, other = (table.loc[key] for table in tables)
            yield Lengths(
                shape=shape(*key),
                before=float(one["mean"]),
                after=float(other["mean"]),
                verifies=(int(one["size"]), int(other["size"])),
                error=math.sqrt(one["var"] / one["size"] + other["var"] / other["size"]),
            )


def render_diff(console: Console, found: Comparison) -> None:
    """What changed, the important first, and one sentence at the end."""
    for word, (name, release, outcome) in (("before", found.before), ("after", found.after)):
        say(console, f"{word:<7} {name}: SGLang {release}, {outcome}")
    for one in found.facts:
        say(console, f"  {one.name}: {one.before} → {one.after}")
    _pairs(console, "verdicts that changed", found.verdicts)
    _findings(console, found)
    _not_compared(console, found)
    _numbers(console, found)
    say(console)
    for reason in found.open:
        say(console, f"not everything can be said: {reason}", style="bold yellow")
    say(console, sentence(found), style="bold" if found.differs or found.open else "bold green")


def sentence(found: Comparison) -> str:
    """The last line; begins with the word that the exit code stands for."""
    common = f"{counted(found.common, 'scenario')} in common"
    if found.differs:
        by = Counter(one.change for one in found.signatures)
        findings = ", ".join(f"{by[change]} {change}" for change in Change)
        return f"differs: {counted(len(found.verdicts), 'verdict')} changed, findings: {findings}; {common}"
    if found.open:
        return f"unknown: no difference was seen, which says nothing about the rest; {common}"
    still = f", {counted(len(found.signatures), 'finding')} still there" if found.signatures else ""
    return f"same: no verdict changed and no finding came or went{still}; {common}"


def diff_document(found: Comparison) -> dict[str, Any]:
    """The comparison as JSON; described in docs/reports.md."""
    answer = "differs" if found.differs else "unknown" if found.open else "same"
    plain = dataclasses.asdict(found)
    for side in ("before", "after"):
        plain[side] = dict(zip(("run", "engine", "verdict"), map(str, plain[side]), strict=True))
    for one in plain["lengths"]:
        one["error"] = one["error"] if math.isfinite(one["error"]) else None
    plain["ties"] = {"before": found.ties[0], "after": found.ties[1]}
    return {"schema": SCHEMA, "answer": answer, "open": found.open, **plain}


def _pairs(console: Console, title: str, pairs: Sequence[Pair], *, names: Mapping[str, str] | None = None) -> None:
    """name: before → after, a line each; verdicts in their colours, counts that came or went to nothing in bold."""
    if pairs:
        heading(console, title)
    for one in pairs[:MOST]:
        is_verdict = isinstance(one.after, Outcome)
        lost = "" if is_verdict else "  (no more)" if not one.after else "  (not before)" if not one.before else ""
        style = STYLE[one.after].removeprefix("bold ") if is_verdict else "bold" if lost else ""
        say(console, f"  {(names or {}).get(one.name, one.name)}: {one.before} → {one.after}{lost}", style=style)
    _more(console, pairs)


def _findings(console: Console, found: Comparison) -> None:
    if found.signatures:
        heading(console, "findings (+ new, - gone, = still there)")
    for one in found.signatures[:MOST]:
        mark, style = MARK[one.change]
        say(console, f"  {mark} {one.signature}", style=style)
        say(console, f"      {one.before} → {one.after} times, in {some(one.scenarios, 3)}")
    _more(console, found.signatures)


def _not_compared(console: Console, found: Comparison) -> None:
    lists = [("only before:", found.only_before), ("only after:", found.only_after), ("changed:", found.edited)]
    if any(names for _, names in lists):
        heading(console, "scenarios that could not be compared")
    for lead, names in lists:
        more = [f"{len(names) - MOST} more"] if len(names) > MOST else []
        if names:
            say_list(console, lead, [*names[:MOST], *more])


def _numbers(console: Console, found: Comparison) -> None:
    if found.lengths:
        heading(console, "accepted length, mean over verifies")
    for one in found.lengths:
        known = f" ± {one.error:.2f}" if math.isfinite(one.error) else ""
        change = f"{one.after - one.before:+.2f}{known}; {one.verifies[0]} and {one.verifies[1]} verifies"
        say(console, f"  {one.shape}: {one.before:.2f} → {one.after:.2f} ({change})")
    _pairs(console, "coverage points seen", found.coverage)
    _pairs(console, "values compared", found.compared, names=COMPARED)
    if found.ties[0] != found.ties[1]:
        say(console, f"\nties: {found.ties[0]} → {found.ties[1]}")


def _more(console: Console, lines: Sequence[object]) -> None:
    if len(lines) > MOST:
        say(console, f"  {len(lines) - MOST} more; all of them:  --json FILE")
