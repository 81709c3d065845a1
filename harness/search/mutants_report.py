"""What `eaglecheck mutants` finds out: the status of every mutant, which checks showed it, and the verdict over all.

Records only. It must not drive an engine, must not print, and must not import torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from packaging.version import Version

from harness.both_sides.mutants import Mutant
from harness.checks import CHECKS
from harness.contract.scenario import Scenario
from harness.contract.types import Outcome
from harness.driving.refusals import refusal
from harness.search.mutant_results import Status

SCHEMA = 1

_LAYERS = (
    ("0.5.13", "before 0.5.13 all layers of an MTP draft write into one cache (F-023), so nothing is sound there"),
    ("0.5.16", "before 0.5.16 MTP layers verify with metadata of an earlier forward (F-011), or in CUDA graphs read "
               "the states of refused tokens (F-020), so nothing is sound there"),
    ("0.5.17", "before 0.5.17 mutants of MTP layers were not tried"),
)  # fmt: skip
#: Need -> releases that end a reason why it cannot be asked before, oldest first, and that reason.
SINCE: dict[str, tuple[tuple[str, str], ...]] = {
    "layers": _LAYERS,
    "chained": _LAYERS,
    "chunk": (("0.5.13", "before 0.5.13 a chunk's tail is wrong without a mutant (#26329)"),),
    "dp": (("0.5.13", "before 0.5.13 an idle rank was not driven past its crash (F-007), so nothing is sound there"),),
    "dp-layers": (("0.5.17", "before 0.5.17 mutants of MTP layers were not tried"),),
    "dp-lm-head": (("0.5.23", "before 0.5.23 mutants beside a DP lm head were not tried"),),
    "handoff": (
        (
            "0.5.13",
            "before 0.5.13 a prefill side hands over no draft state in the overlap loop (F-014), and "
            "mutants were not tried in the other",
        ),
    ),
    "answers": (("0.5.13", "before 0.5.13 answers leave the scheduler elsewhere"),),
    "mamba": (("0.5.23", "before 0.5.23 no target with Mamba-2 layers was tried"),),
    "states": (("0.5.17", "before 0.5.17 a verify returns one state a request (F-042), so nothing is sound there"),),
    "tree": (
        ("0.5.13", "before 0.5.13 a tree needs the v1 worker, whose draft extend is wrong without a mutant (F-001)"),
    ),
}
#: Checks that may kill nothing: no mutant can be asked of them yet, or none on a CPU.
EXCUSED: dict[str, str] = {
    "beams": "needs a tree of three steps, where SGLang itself shows it (F-003)",
    "seeds": "only releases whose verify ignores seeds show it; broken by hand in test_checks_seeds",
    "streamed": "no mutant reaches the pieces of a stream alone; broken by hand in test_checks_answers",
    "states": "asked in half precision only, on a GPU; broken by hand in test_checks_states",
}


def undrivable(need: str, exercises: Iterable[Scenario], *, release: str, device: str) -> str:
    """Why no mutant that needs this can be asked of a release there, empty if it can. exercises: what is driven."""
    before = (why for first, why in SINCE.get(need, ()) if Version(release) < Version(first))
    refused = (refusal(one, version=release, device=device) for one in exercises)
    return next(filter(None, (*before, *refused)), "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """One mutant. killed_by: checks that show it, each by itself. examples: scenarios driven. why: if not killed."""

    mutant: Mutant
    status: Status
    killed_by: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    examples: int = 0
    text_identical: bool | None = None
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All scores of one campaign. unsound: what the engine showed without any mutant. whole: every mutant was asked."""

    engine: str
    scores: tuple[Score, ...]
    unsound: tuple[str, ...] = ()
    whole: bool = True

    @property
    def by_check(self) -> dict[str, list[str]]:
        """Mutants each registered check killed."""
        killed = [score for score in self.scores if score.status is Status.KILLED]
        return {name: [score.mutant.id for score in killed if name in score.killed_by] for name in CHECKS}

    @property
    def idle_checks(self) -> list[str]:
        """Checks that killed nothing and have no excuse; says something only of a whole campaign."""
        idle = [name for name, killed in self.by_check.items() if not killed and name not in EXCUSED]
        return idle if self.whole else []

    @property
    def outcome(self) -> Outcome:
        """PASS: every mutant that ran is killed and no check is idle.

        An unsound engine, none killed at all, or one that was asked for by name and not run, is UNKNOWN.
        """
        statuses = {score.status for score in self.scores}
        if statuses & {Status.SURVIVED, Status.BROKEN}:
            return Outcome.FAIL
        if self.unsound or Status.KILLED not in statuses or (not self.whole and Status.NOT_RUN in statuses):
            return Outcome.UNKNOWN
        return Outcome.FAIL if self.idle_checks else Outcome.PASS


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What the campaign does now, or (score set) what became of a mutant."""

    text: str
    index: int
    total: int
    score: Score | None = None


def document(report: Report) -> dict[str, Any]:
    """The report as JSON; described in docs/json.md."""
    return {
        "schema": SCHEMA,
        "engine": report.engine,
        "verdict": str(report.outcome),
        "unsound": list(report.unsound),
        "mutants": [
            {
                "id": score.mutant.id,
                "family": score.mutant.family,
                "what": score.mutant.what,
                "needs": score.mutant.needs,
                "killed_by": list(score.killed_by),
                "kinds": list(score.kinds),
                "expected_kinds": list(score.mutant.kinds),
                "examples": score.examples,
                "engine": report.engine,
                "verdict": str(score.status),
                "text_identical": score.text_identical,
                "why": score.why,
            }
            for score in report.scores
        ],
        "checks": report.by_check,
        "excused": dict(EXCUSED),
    }
