"""Checks what a verify commits: the walk that the target's choices, or the recorded uniforms, allow.

A greedy walk needs no reference: it starts at the engine's own root and follows the engine's own target choices, which
a separate comparison holds against the reference (a tie there is followed, not repaired). Where a request's rules
choose otherwise than by the best logit, or uniforms do, it is compared with what the reference commits by the same
rules and recorded uniforms; whether those are uniform is a question for many runs (see `cases.meta.sampling`).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from harness.checks.evidence import Evidence, Table, tabulate
from harness.checks.registry import CheckResult, register
from harness.checks.set_aside import unread
from harness.contract.batches import Share, share_of
from harness.contract.noise import TIE_MULTIPLE
from harness.contract.providers import is_witness
from harness.contract.trace import Trace
from harness.contract.types import Divergence, Kind, Phase, Policy

#: Subject of replaced operations that only a batch with a temperature asks for.
SAMPLED = "sampled"
#: A uniform this near to the end of an interval may fall on either side of it, whatever rounding does to logits: the
#: softmax of two float32 programs differs by a few 1e-7 of a probability.
ARITHMETIC = 1e-5
#: One farther away than this never does: in half precision a logit is off by up to a few 1e-2. In between it may where
#: rounding reaches that end (see `tie_margin`).
NEAREST = {"float32": ARITHMETIC, "float16": 2e-2, "bfloat16": 1e-1}

#: (token, node that chose it), in order of commitment.
Walk = list[tuple[int, int]]


@register(id="walk", kinds=(Kind.ACCEPT, Kind.PARENT), reads=("scenario", "engine"))
def check_greedy_walk(evidence: Evidence) -> CheckResult:
    """What is committed is exactly the longest line of the tree that the target itself would have chosen.

    ACCEPT and PARENT at ACCEPT rows of greedy requests that ask for no other rule.
    """
    result = CheckResult()
    greedy = {request.rid for request in evidence.scenario.requests if request.greedy and not request.rules}
    drawn = _drawn_rounds(evidence)
    for share, nodes in evidence.table.each(Phase.VERIFY):
        if share[1] in greedy and evidence.table.of(share, Phase.ACCEPT):
            ties = _drawn_ties(evidence, share, nodes, drawn)
            _judge_walk(evidence, share, walk(evidence, nodes, ties), result)
            for node, token in ties.items():
                row = next(row for row in nodes if evidence.table.ints["slot"][row] == node)
                best = evidence.table.chosen(row)[0]
                found = evidence.divergence(row, kind=Kind.ACCEPT, expected=best, observed=token, hint="wrong-token")
                result.decide(replace(found, policy=Policy.TIE, margin=0.0), limit=sys.float_info.min)
    return result


def _drawn_rounds(evidence: Evidence) -> set[tuple[int, int]]:
    """(DP rank, round) of batches that uniforms decide."""
    return {(event.dp_rank, event.data["round"]) for event in evidence.engine.named("uniforms")}


def _drawn_ties(
    evidence: Evidence, share: Share, nodes: list[int], drawn: Collection[tuple[int, int]]
) -> dict[int, int]:
    """node -> token that was committed there instead of the engine's own choice, whose logit is the very same.

    Uniforms decide a whole batch, and draw from all tokens that share the best logit, which in half precision are two
    at times; alone, a greedy request takes the first of them. nodes: VERIFY rows of a share. drawn: _drawn_rounds.
    """
    found: dict[int, int] = {}
    if not nodes or (share[0], evidence.table.ints["round"][nodes[0]]) not in drawn:
        return found
    rows = {evidence.table.ints["slot"][row]: row for row in nodes}
    committed = _walked(evidence.table, evidence.table.of(share, Phase.ACCEPT))
    for _ in nodes:
        expected = walk(evidence, nodes, found) or []
        pairs = zip(committed, expected, strict=False)
        token, node = next(((seen[0], due[1]) for seen, due in pairs if seen[0] != due[0]), (-1, -1))
        if node not in rows or token not in _as_good(evidence, rows[node]):
            return found
        found[node] = token
    return found


def _as_good(evidence: Evidence, row: int) -> list[int]:
    """Tokens that have the best logit of an engine row."""
    ids, logits = (evidence.table.rows.lists[name][row] for name in ("top_ids", "top_logits"))
    return [int(token) for token, logit in zip(ids, logits, strict=True) if logit == logits[0]]


def truncated(evidence: Evidence, share: Share) -> bool:
    """Whether the share's walk may be shorter than the tree allows: its request ended there and the release cuts it.

    Older workers cut the accepted run at the stop token or the length limit, newer ones only the output.
    """
    if not evidence.engine.header.get("truncates_at_finish") or share[1] not in evidence.ended:
        return False
    return evidence.last[share[1]].share == share


def walk(evidence: Evidence, nodes: list[int], instead: Mapping[int, int] = MappingProxyType({})) -> Walk | None:
    """(token, node that chose it) in order of commitment, the bonus last; None if a choice is not recorded.

    nodes: VERIFY row numbers of one share, by slot. instead: node -> token that counts as its choice.
    """
    table = evidence.table
    children: dict[tuple[int, int], int] = {}
    chosen: dict[int, int] = {}
    for index in nodes:
        slot = table.ints["slot"][index]
        children.setdefault((table.ints["parent"][index], table.ints["input_id"][index]), slot)
        if table.chosen(index):
            chosen[slot] = instead.get(slot, table.chosen(index)[0])
    committed: Walk = []
    node: int | None = 0
    while node is not None and len(committed) <= len(nodes):
        if node not in chosen:
            return None
        committed.append((chosen[node], node))
        node = children.get((node, chosen[node]))
    return committed


def _judge_walk(evidence: Evidence, share: Share, expected: Walk | None, result: CheckResult) -> None:
    if expected is None:
        return
    rows = evidence.table.of(share, Phase.ACCEPT)

    def fault(index: int, kind: Kind, wanted: int, seen: int, hint: str) -> None:
        result.divergences.append(evidence.divergence(index, kind=kind, expected=wanted, observed=seen, hint=hint))

    for place, (index, (token, parent)) in enumerate(zip(rows, _walked(evidence.table, rows), strict=True)):
        result.count("accepts", 1)
        if place >= len(expected):
            return fault(index, Kind.ACCEPT, len(expected), len(rows), "too-many")
        if token != expected[place][0]:
            return fault(index, Kind.ACCEPT, expected[place][0], token, "wrong-token")
        if parent != expected[place][1]:
            fault(index, Kind.PARENT, expected[place][1], parent, "accept-parent")
    if len(rows) < len(expected) and not truncated(evidence, share):
        fault(rows[-1], Kind.ACCEPT, len(expected), len(rows), "too-few")


def _walked(table: Table, rows: list[int]) -> Walk:
    """(token, node that it follows) of ACCEPT rows in order."""
    return [(table.ints["input_id"][row], table.ints["parent"][row]) for row in rows]


@register(id="sampled", kinds=(Kind.ACCEPT, Kind.PARENT), reads=("scenario", "engine", "reference"))
def check_sampled_walk(evidence: Evidence) -> CheckResult:
    """With a temperature, what is committed follows from the recorded uniforms and the target's probabilities.

    ACCEPT and PARENT at ACCEPT rows of requests with a temperature.
    """
    drawing = {request.rid for request in evidence.scenario.requests if not request.greedy}
    return _walks(evidence, drawing, "sampled", nothing="the probe saw no uniforms of it")


@register(id="rules", kinds=(Kind.ACCEPT, Kind.PARENT, Kind.TOKEN), reads=("scenario", "engine", "reference"))
def check_rules(evidence: Evidence) -> CheckResult:
    """Penalties, bias, processors and cuts decide each token, as they would without speculation.

    ACCEPT and PARENT at ACCEPT rows of greedy requests with rules; TOKEN at the last prompt row of all with them.
    """
    ruled = {request.rid for request in evidence.scenario.requests if request.rules}
    greedy = {request.rid for request in evidence.scenario.requests if request.rules and request.greedy}
    result = _walks(evidence, greedy, "ruled", nothing="the reference does not know its logits")
    decided = {} if evidence.reference is None else _decided(evidence.reference, Phase.PREFILL)
    for parts in evidence.parts.values():
        for part in parts:
            rows = evidence.table.of(part.share, Phase.PREFILL) if part.final and part.rid in ruled else []
            if rows and part.share in decided and evidence.table.chosen(rows[-1]):
                _judge_first(evidence, rows[-1], decided[part.share], result)
    return result


def _judge_first(evidence: Evidence, row: int, decided: dict[str, Any], result: CheckResult) -> None:
    """The token after a prompt: the best by the rules, or one that they leave to be drawn."""
    (seen,), wanted = evidence.table.chosen(row), int(decided["token"])
    result.count("tokens", 1)
    result.choices += 1
    if seen != wanted:
        found = evidence.divergence(row, kind=Kind.TOKEN, expected=wanted, observed=seen, hint=_by_rule(decided))
        _decide(evidence, found, decided, result)


def _walks(evidence: Evidence, rids: set[str], event: str, *, nothing: str) -> CheckResult:
    """Committed tokens of some requests against what the reference committed, where an event says how near it was."""
    result = CheckResult()
    if not rids or is_witness(evidence.truth.header):
        return result  # it knows no probabilities: the verdict says so
    decided, truth = _decided(evidence.truth, Phase.ACCEPT, event), tabulate(evidence.truth.rows)
    left = list[str]()
    for share, rows in evidence.table.each(Phase.ACCEPT):
        if share[1] in rids and share in decided:
            _judge_sampled(evidence, share, rows, _walked(truth, truth.of(share, Phase.ACCEPT)), decided[share], result)
        elif share[1] in rids:
            left.append(share[1])
    aside = unread(evidence) if left else frozenset()  # check `grammar` says why
    missed = (rid for rid in dict.fromkeys(left) if rid not in aside)
    result.unknown = [f"{event} acceptance of {rid} not judged: {nothing}" for rid in missed]
    return result


def judged_walks(evidence: Evidence) -> frozenset[Share]:
    """Shares whose walk another length of is a finding, or a near tie, of checks `walk`, `sampled` and `rules`."""
    if evidence.reference is None:
        return frozenset()
    decided = _decided(evidence.reference, Phase.ACCEPT)
    drawn = _drawn_rounds(evidence)
    tied = {share for share, nodes in evidence.table.each(Phase.VERIFY) if _drawn_ties(evidence, share, nodes, drawn)}
    return frozenset(
        tied
        | {share for share, data in decided.items() if data.get("keys") or data["margin"] < tie_margin(evidence, data)}
    )


def tie_margin(evidence: Evidence, decided: dict[str, Any]) -> float:
    """Margins nearer than this are ties: of probability where something was drawn, of logits else."""
    if not evidence.scenario.request(decided["rid"]).greedy:
        most = NEAREST.get(evidence.dtype, NEAREST["bfloat16"])
        reached = "spread" not in decided or reach(decided) < TIE_MULTIPLE * noise_of(evidence, decided["rid"])
        return most if reached else ARITHMETIC
    return evidence.choice_limit(decided["rid"])


def reach(decided: dict[str, Any]) -> float:
    """How far the nearest end of an interval is, as the margin of two logits that errors turn around as easily."""
    return math.sqrt(2) * float(decided["distance"]) / float(decided["spread"])


def noise_of(evidence: Evidence, rid: str) -> float:
    """What rounding does to the greatest of a row's top logits, as the ends of a request's intervals show it."""
    return max(evidence.choice_limit(rid) / TIE_MULTIPLE, evidence.end_noise, sys.float_info.min)


def _decided(reference: Trace, phase: Phase, *names: str) -> dict[Share, dict[str, Any]]:
    """What the reference says of each choice that is no question of the best logit, by share.

    A stored margin without end is a word.
    """
    return {
        share_of(event): event.data | {"margin": float(event.data["margin"])}
        for event in reference.named(*(names or ("sampled", "ruled")))
        if event.data.get("phase", Phase.ACCEPT) == phase
    }


def _by_rule(decided: dict[str, Any]) -> str:
    """Which keys explain what the engine did by not being followed, or else which it was asked to follow."""
    return (
        f"{'-or-'.join(decided['explains'])}-ignored" if decided["explains"] else f"not-by-{'-'.join(decided['keys'])}"
    )


def sampler_replaced(evidence: Evidence) -> str:
    """The kernel that walks trees by uniforms, if ours replaces it; else empty. Rejection sampling has its own."""
    if evidence.scenario.engine.rejection_sampling:
        return ""
    replaced = evidence.engine.header.get("replaced") or ()
    names = (str(entry.get("operation", "?")) for entry in replaced if entry.get("subject") == SAMPLED)
    return next((name for name in names if "sampling" in name.rpartition(".")[2]), "")


def _judge_sampled(
    evidence: Evidence, share: Share, rows: list[int], expected: Walk, decided: dict[str, Any], result: CheckResult
) -> None:
    found = _walked(evidence.table, rows)
    if evidence.scenario.request(share[1]).greedy or not sampler_replaced(evidence):
        result.count("accepts", len(found))  # else it says nothing of the release's own kernel
    result.choices += len(found)
    fault = _difference(found, expected)
    if fault is None or (len(found) < len(expected) and found == expected[: len(found)] and truncated(evidence, share)):
        return
    place, kind, hint, wanted, seen = fault
    hint = _by_rule(decided) if decided.get("keys") else hint
    differs = evidence.divergence(rows[min(place, len(rows) - 1)], kind=kind, expected=wanted, observed=seen, hint=hint)
    _decide(evidence, differs, decided, result)


def _decide(evidence: Evidence, found: Divergence, decided: dict[str, Any], result: CheckResult) -> None:
    result.decide(replace(found, policy=Policy.TIE, margin=decided["margin"]), limit=tie_margin(evidence, decided))


def _difference(found: Walk, expected: Walk) -> tuple[int, Kind, str, int, int] | None:
    """(place, kind, hint, expected, observed) of the first difference of two walks, None if there is none."""
    for place, (seen, wanted) in enumerate(zip(found, expected, strict=False)):
        if seen[0] != wanted[0]:
            return place, Kind.ACCEPT, "sampled-other-token", wanted[0], seen[0]
        if seen[1] != wanted[1]:
            return place, Kind.PARENT, "sampled-other-node", wanted[1], seen[1]
    if len(found) == len(expected):
        return None
    hint = "sampled-too-many" if len(found) > len(expected) else "sampled-too-few"
    return min(len(found), len(expected)), Kind.ACCEPT, hint, len(expected), len(found)
