"""What a PASS needs: the handshake, the coverage points asked for, and enough values compared.

Nothing here can fail a scenario; it can only keep a PASS from being empty. "Nothing to compare" is never a pass.
"""

from __future__ import annotations

from collections.abc import Iterator

from harness.checks.accepts import sampler_replaced
from harness.checks.evidence import Evidence
from harness.contract.conditions import PREFILL_GRAPHS
from harness.contract.providers import is_witness
from harness.contract.trace import RECURRENT_ROWS, replaced_kernels
from harness.contract.types import DRAFTING, Phase
from harness.coverage import POINTS, count

#: Subject of a replaced operation -> counters that then prove nothing about the engine.
SUBJECTS: dict[str, tuple[str, ...]] = {"tree": ("parents",), "verify": ("accepts",)}

#: Subjects of which every counter has more than what was replaced -> what to call that part. Which rows go to the host
#: is SGLang's decision, and judged.
IN_PART = {
    "host copies": "host copies",
    "attention": "attention",
    "experts": "experts",
    "index scores": "index scores",
    "recurrent": "recurrent states over prompts",
}

#: `by` of an entry that only says how the release's own kernel was reached: that one is exercised.
OWN_KERNEL = "flag"
#: What a header calls a replacement kernel, and what a verdict does.
NAMES = {"stand-in": "our kernel"}

#: The coverage point of prefill graphs.
IN_GRAPH = "prompt_in_graph"
ALWAYS = ("positions", "tokens", "extend_inputs", "cache_slots")
WHEN_DECODING = ("parents", "accepts")
WITH_REFERENCE = ("hidden_rows", "logits", "proposals")


def check_handshake(evidence: Evidence, *, asked: str) -> list[str]:
    """Reasons for UNKNOWN in the trace header. asked: the id of the scenario that it should be of.

    header['hooks_missing'] lists wrap points the probe did not find; those also in 'hooks_optional' do not count.
    """
    header = evidence.engine.header
    if not header.get("release"):
        return ["no handshake: the engine trace header names no release"]
    missing = sorted(set(header.get("hooks_missing") or ()) - set(header.get("hooks_optional") or ()))
    reasons = [f"the probe found no place for {', '.join(missing)} in release {header['release']}"] if missing else []
    if evidence.engine.scenario_id != asked:
        reasons.append(f"trace of scenario {evidence.engine.scenario_id}, judged as {asked}")
    return reasons


def not_exercised(evidence: Evidence) -> tuple[frozenset[str], list[str]]:
    """(counters that do not count, what to say) for operations that were replaced."""
    exempt: set[str] = set()
    notes = []
    for entry in evidence.engine.header.get("replaced") or ():
        subject = str(entry.get("subject", ""))
        if subject in SUBJECTS and entry.get("by") != OWN_KERNEL:
            exempt.update(SUBJECTS[subject])
            by = NAMES.get(str(entry.get("by")), entry.get("by", "?"))
            notes.append(f"not exercised: {subject} ({entry.get('operation', '?')} replaced by {by})")
    for subject, said in IN_PART.items():
        if replaced := [one for one in replaced_kernels(evidence.engine.header) if one.get("subject") == subject]:
            names = ", ".join(dict.fromkeys(str(one["operation"]).rpartition(".")[2] for one in replaced))
            notes.append(f"not exercised: {said} ({names} replaced by {NAMES['stand-in']})")
    drawing = [not request.greedy for request in evidence.scenario.requests]
    if any(drawing) and (kernel := sampler_replaced(evidence)):
        notes.append(f"not exercised: sampled verify ({kernel} replaced by {NAMES['stand-in']})")
        exempt.update(("accepts",) if all(drawing) else ())
    if all(drawing) and evidence.reference is not None and is_witness(evidence.reference.header):
        exempt.add("accepts")
    if evidence.scenario.engine.rejection_sampling and any(drawing):
        who = "" if all(drawing) else " for requests that sample"
        notes.append(f"not exercised: which tokens are drafted{who} (they are drawn; their probabilities are judged)")
        exempt.update(("proposals",) if all(drawing) else ())
    return frozenset(exempt), notes


def coverage_wanted(evidence: Evidence) -> tuple[dict[str, int], dict[str, int], list[str]]:
    """(coverage point -> times it happened, coverage point -> positions inside it, reasons for UNKNOWN)."""
    seen, inside = count(evidence.scenario, evidence.engine)
    reasons = []
    for name in (*evidence.scenario.wants, *_in_graphs(evidence)):
        if name not in POINTS:
            reasons.append(f"asked for {name}, an unknown coverage point")
        elif not seen.get(name):
            reasons.append(f"asked for {name}, never happened: {POINTS[name].meaning}")
    return seen, inside, reasons


def _in_graphs(evidence: Evidence) -> tuple[str, ...]:
    """What is wanted of whoever asks for prefill graphs and has a batch of prompts that fits one."""
    fewest, most = PREFILL_GRAPHS
    fits = (fewest <= sum(one.lens) <= most for one in evidence.engine.rounds if one.mode == "PREFILL")
    return (IN_GRAPH,) if evidence.scenario.engine.prefill_cuda_graph and any(fits) else ()


def compared_enough(evidence: Evidence, compared: dict[str, int], exempt: frozenset[str]) -> list[str]:
    """Reasons for UNKNOWN where something that must have been compared was not."""
    alone = [] if evidence.reference is not None else ["no reference to compare with: only what needs none was judged"]
    return [
        *alone,
        *(f"nothing compared: {name}" for name in _due(evidence) if name not in exempt and not compared.get(name)),
        *_empty_phases(evidence),
        *_silent_requests(evidence),
    ]


def undrafted(evidence: Evidence) -> tuple[list[str], list[str]]:
    """(reasons for UNKNOWN, what to say) where no verify had a proposal, so that nothing is said about drafts.

    A scenario that wants something else, or whose requests are all to be refused, asks for no draft.
    """
    rows = evidence.engine.rows
    if ((rows.strings["phase"] == Phase.VERIFY) & (rows.ints["slot"] > 0)).any():
        return [], []
    scenario, said = evidence.scenario, "nothing was drafted: no verify had a proposal"
    if scenario.wants or all(request.expect != "answer" for request in scenario.requests):
        return [], [f"{said}, and the scenario asks for none"]
    return [f"{said}; let a request write two tokens or more"], []


def _modes(evidence: Evidence) -> set[str]:
    return {record.mode for record in evidence.engine.rounds if record.rids}


def _due(evidence: Evidence) -> Iterator[str]:
    yield from ALWAYS
    if "DECODE" in _modes(evidence):
        yield from WHEN_DECODING
    if evidence.reference is not None:
        yield from WITH_REFERENCE
        if "DECODE" in _modes(evidence) and any(one.name == RECURRENT_ROWS for one in evidence.reference.events):
            yield "recurrent_states"
    if evidence.scenario.engine.attention_tp_size > 1:
        yield "tp_rows"
    if evidence.scenario.engine.dp_size > 1:
        yield "token_counts"
        # where an idle rank brings a draft state that can be seen; inside a CUDA graph it is a buffer of the graph
        if any(event.data["phase"] in DRAFTING for event in evidence.engine.named("idle_state")):
            yield "idle_states"


def _empty_phases(evidence: Evidence) -> Iterator[str]:
    """Phases that ran by the batch records but left no aligned row."""
    modes = _modes(evidence)
    due = [Phase.PREFILL, Phase.DRAFT_PREFILL] if "PREFILL" in modes else []
    if "PREBUILT" in modes:
        due.append(Phase.PREBUILT)
    if decoding := [one for one in evidence.engine.rounds if one.mode == "DECODE" and any(one.lens)]:
        rounds = (evidence.scenario.spec.of_round(one.num_steps) for one in decoding)
        due += [Phase.DRAFT] if any(spec.draft_steps for spec in rounds) else []
        due += [Phase.VERIFY, Phase.ACCEPT]
    if not due:
        yield "nothing to compare: no batch with a request"
    rows = evidence.engine.rows.strings["phase"]
    present = set(rows[evidence.aligned.engine] if evidence.aligned is not None else rows)
    for phase in due:
        if phase not in present:
            yield f"nothing to compare: no {phase} row" + (" on both sides" if evidence.aligned is not None else "")


def _silent_requests(evidence: Evidence) -> Iterator[str]:
    """Requests that were never answered, or answered with nothing; of errors `set_aside` speaks."""
    ends = {end.rid: end for end in evidence.engine.ends}
    for request in evidence.scenario.requests:
        end = ends.get(request.rid)
        if end is None and any(request.rid == f"{one.rpartition('.')[0]}.0" for one in ends):
            continue  # it only read the prompt of its samples: SGLang keeps that answer to itself
        if end is None:
            yield f"request {request.rid} never ended"
        elif request.max_new_tokens and not end.output_ids and end.reason not in ("abort", "error"):
            yield f"request {request.rid} produced no tokens"
