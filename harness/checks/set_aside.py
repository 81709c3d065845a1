"""Which findings say nothing about SGLang: those of requests that it answered with an error, or that nobody can follow.

What is set aside is never a PASS: the same requests are reasons for UNKNOWN. This module must not judge.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from harness.checks.evidence import Evidence
from harness.checks.registry import CheckResult, Tie
from harness.contract import answers
from harness.contract.batches import Part
from harness.contract.providers import is_witness
from harness.contract.requests import GRAMMARS, PLAIN
from harness.contract.types import TARGET, Divergence, Kind, Phase

#: What a scenario does to a hand-over that its request cannot outlive.
LOSING = ("fail", "drop")
#: SGLang's prompt of a request that it refuses in the scheduler: one token, for an answer to come back at all.
INSTEAD = 0
#: What does not depend on which prompt a request has, by kind and by check.
WHATEVER_PROMPT = (Kind.CACHE_SLOT, Kind.LEAK, Kind.LOCKSTEP, Kind.CRASH, Kind.HANG)
WHO_IS_SERVED = "admission"
#: Where the target chooses, and the checks that hold a choice, or what is committed by choices, against a reference.
CHOOSING = (*TARGET, Phase.ACCEPT)
OF_CHOICES = ("rules", "sampled", "losslessness")
#: Checks that compare choices among other things: what a choice that differs is called there.
CHOICE = "choice-"


def errors(evidence: Evidence) -> dict[str, str]:
    """rid -> what SGLang said instead of an answer, where the scenario does not have it so."""
    scenario = evidence.scenario
    script = scenario.script if scenario.engine.disaggregation else ()
    lost = {rid for op in script if op.kind == "abort" or op.name in LOSING for rid in op.rids}
    asked = {request.rid for request in scenario.requests if request.expect == "answer"} - lost
    said = answers.errors(evidence.engine)
    return {
        end.rid: said.get(end.rid, "without a text")
        for end in evidence.engine.ends
        if end.reason == "error" and end.rid in asked
    }


def misfits(evidence: Evidence) -> Iterator[str]:
    """Reasons for UNKNOWN: batches of which some rows could not be read, since what was reported contradicts them."""
    for event in evidence.engine.named("misfit"):
        yield f"round {event.data['round']}: what the engine reported does not fit its batch: {event.data['why']}"


def answered_with_errors(evidence: Evidence) -> Iterator[str]:
    """Reasons for UNKNOWN, in order of the scenario's requests."""
    found = errors(evidence)
    for request in evidence.scenario.requests:
        if request.rid in found:
            said = (found[request.rid].strip() or "without a text").splitlines()
            more = f" ({len(said) - 1} more lines are in the trace)" if len(said) > 1 else ""
            keys = ", ".join(key for key in request.asked if key not in PLAIN)
            do = f"it asks for {keys}: change that" if keys else "give it another prompt"
            yield (
                f"request {request.rid} was answered with an error: {said[0]}{more}; {do}, or leave it out, and run it "
                "again"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SetAside:
    """refused: rids of another prompt than theirs. unread: those whose choices a grammar decides that nobody reads."""

    refused: frozenset[str]
    unread: frozenset[str]

    def keeps(self, found: Divergence) -> bool:
        """Whether a divergence says something about SGLang."""
        rid = found.key.rid
        if rid in self.refused:
            return found.kind in WHATEVER_PROMPT or found.check == WHO_IS_SERVED
        return not (rid in self.unread and _of_a_choice(found))

    def keeps_tie(self, tie: Tie) -> bool:
        """Whether a tie counts among those that may be too many."""
        return tie.key.rid not in self.refused and not (tie.key.rid in self.unread and tie.key.phase in CHOOSING)

    def leave_out(self, result: CheckResult) -> None:
        """Take out of `result` what it does not keep."""
        result.divergences = [found for found in result.divergences if self.keeps(found)]
        result.ties = [tie for tie in result.ties if self.keeps_tie(tie)]


def set_aside(evidence: Evidence) -> SetAside:
    """Of one scenario. Of a hand-over that fails, checks of their own say what is wrong."""
    refused = frozenset() if evidence.scenario.engine.disaggregation else frozenset(_refused(evidence))
    return SetAside(refused=refused, unread=unread(evidence))


def _refused(evidence: Evidence) -> Iterator[str]:
    """Those that ended in an error and ran at most the one token that SGLang puts in place of a prompt.

    One that had its own prompt, or went on, was taken: what is wrong with it then is a finding.
    """
    for rid in errors(evidence).keys() & answers.errors(evidence.engine).keys():
        parts = evidence.parts_of(rid)
        if len(parts) == 1 and is_instead(evidence, parts[0]):
            yield rid


def is_instead(evidence: Evidence, part: Part) -> bool:
    """Whether it ran SGLang's one token in place of a prompt that was refused."""
    rows = evidence.table.of(part.share, Phase.PREFILL)
    fed = [evidence.table.ints["input_id"][row] for row in rows]
    return part.record.mode == "PREFILL" and (part.start, part.length) == (0, 1) and fed == [INSTEAD]


def unread(evidence: Evidence) -> frozenset[str]:
    """Those whose grammar has no second opinion, or whose texts the reference cannot spell."""
    reference = evidence.reference
    if reference is None:
        return frozenset()
    found = {event.data["rid"] for event in reference.named("unread")}
    if is_witness(reference.header):
        return frozenset(found)
    written = {event.data["rid"] for event in reference.named("written")}
    held = {request.rid for request in evidence.scenario.requests if set(request.rules) & {*GRAMMARS}}
    return frozenset(found | (held - written))


def _of_a_choice(found: Divergence) -> bool:
    if found.check in OF_CHOICES:
        return True
    missing = found.kind in (Kind.MISSING_ROW, Kind.EXTRA_ROW) and found.key.phase == Phase.ACCEPT
    return missing or (found.key.phase in CHOOSING and found.hint.startswith(CHOICE))
