"""What a campaign of source mutants adds up to: killed, survived and equivalent, by file and operator, and beside what
other people would have looked at.

Pure: it must not read files, must not drive an engine, and must not print.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from harness.contract.types import Outcome
from harness.search.mutant_results import Asked, Campaign, Explanation, Result, Status

SCHEMA = 1
FLOORS = (0.95, 0.80)
#: Fates as a report counts them; a survivor is what its explanation says.
OPEN = "survived"


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One mutant that was asked."""

    mutant: Asked
    result: Result
    explained: Explanation | None

    @property
    def stands(self) -> str:
        """killed, equivalent, not executed, survived, unknown, error or not run."""
        if self.result.goes_on and self.explained is not None and self.explained.kind != "open":
            return self.explained.kind
        return str(self.result.end).lower()


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All that was asked of a campaign so far."""

    campaign: Campaign
    lines: tuple[Line, ...]

    @staticmethod
    def of(campaign: Campaign, results: Mapping[str, Result], explained: Mapping[str, Explanation]) -> Report:
        asked = [one for one in campaign.mutants if one.id in results]
        holding = {name: one for name, one in explained.items() if one.holds_in(campaign)}
        lines = [Line(mutant=one, result=results[one.id], explained=holding.get(one.id)) for one in asked]
        return Report(campaign=campaign, lines=tuple(lines))

    @property
    def counts(self) -> Counter[str]:
        return Counter(line.stands for line in self.lines)

    @property
    def faults(self) -> list[Line]:
        """Those that count: a mutant that changes nothing, or was not asked, says nothing of any check."""
        return [line for line in self.lines if line.stands not in ("equivalent", "not executed", "not run")]

    @property
    def outcome(self) -> Outcome:
        """FAIL while a survivor is not explained. UNKNOWN where nothing was killed, or something failed over one."""
        if any(line.stands == OPEN and line.explained is None for line in self.lines):
            return Outcome.FAIL
        left = len(self.lines) < len(self.campaign.mutants) or "killed" not in self.counts
        return Outcome.UNKNOWN if left or {"error", "not run", "unknown"} & set(self.counts) else Outcome.PASS

    def beside(self) -> dict[str, int]:
        """Who would have seen how many of `faults` over the same runs. An engine that died or hung, everybody sees."""
        seen: dict[str, Callable[[Result], bool]] = {
            "eaglecheck": lambda result: result.end is Status.KILLED,
            "text parity": lambda result: result.text,
            **{f"accept length below {floor:.0%}": _below(floor) for floor in FLOORS},
        }
        if any(line.result.canary is not None for line in self.lines):
            seen["kv_canary"] = lambda result: bool(result.canary)
        results = [line.result for line in self.faults]
        return {name: sum(result.ended or sees(result) for result in results) for name, sees in seen.items()} | {
            "engine died or hung": sum(result.ended for result in results)
        }

    def by(self, what: Callable[[Asked], str]) -> dict[str, Counter[str]]:
        """What they stand as, by whatever a mutant has."""
        found: dict[str, Counter[str]] = {}
        for line in self.lines:
            found.setdefault(what(line.mutant), Counter())[line.stands] += 1
        return dict(sorted(found.items()))

    @property
    def seconds(self) -> tuple[float, float]:
        """(median, mean) of a mutant."""
        spent = [line.result.seconds for line in self.lines] or [0.0]
        return median(spent), sum(spent) / len(spent)


def _below(floor: float) -> Callable[[Result], bool]:
    return lambda result: result.below(floor)


def document(report: Report) -> dict[str, Any]:
    """The report as JSON; described in docs/json.md. `mutants` is read as that of `eaglecheck mutants` is."""
    campaign = report.campaign
    return {
        "schema": SCHEMA,
        "engine": campaign.engine,
        "device": campaign.device,
        "families": list(campaign.families),
        "seed": campaign.seed,
        "drawn": len(campaign.mutants),
        "verdict": str(report.outcome),
        "unsound": list(campaign.left_out),
        "counts": dict(report.counts),
        "counted": len(report.faults),
        "beside": report.beside(),
        "seconds": {"median": round(report.seconds[0], 1), "mean": round(report.seconds[1], 1)},
        "by_file": _plain(report.by(lambda one: one.file)),
        "by_operator": _plain(report.by(lambda one: one.operator)),
        "by_check": dict(Counter(line.result.check for line in report.lines if line.stands == "killed")),
        "mutants": [_mutant(line, campaign.engine) for line in report.lines],
    }


def _plain(counts: Mapping[str, Counter[str]]) -> dict[str, dict[str, int]]:
    return {name: dict(each) for name, each in counts.items()}


def _mutant(line: Line, engine: str) -> dict[str, Any]:
    mutant, result = line.mutant, line.result
    return {
        "id": mutant.id,
        "what": f"{mutant.where} {mutant.function}: {mutant.operator}: {mutant.what}",
        "engine": engine,
        "captured": mutant.captured,
        "verdict": line.stands.upper(),
        "killed_by": [result.check] if result.end is Status.KILLED else [],
        "text_identical": None if result.ended else not result.text,
        "explained": None if line.explained is None else line.explained.why,
        **{name: value for name, value in result.model_dump(mode="json").items() if name not in ("id", "end")},
    }


def worst(lines: Iterable[Line]) -> list[Line]:
    """Those somebody has to look at: unexplained survivors whose rows differ first."""
    left = [line for line in lines if line.stands in (OPEN, "unknown", "error")]
    return sorted(left, key=lambda line: (line.stands, not line.result.rows, line.mutant.file, line.mutant.line))
