"""Shrinking keeps the signature, ends at the smallest program, stays in its budget; failures are counted."""

import itertools
from dataclasses import dataclass, replace

import pytest

from cases.boots import BY_NAME
from cases.generation import generate
from cases.meta import handmade
from harness.checks import group, judge
from harness.checks.findings import root_signatures
from harness.contract.scenario import Scenario
from harness.contract.script import Op
from harness.contract.types import Kind
from harness.search.fuzz import failures
from harness.search.shrink import Budget, shrink, simpler_boots, size, smaller, tidy

SIGNATURE = "EXTEND_INPUT:inputs:DRAFT_PREFILL:chunk-tail"
OTHER = "POSITION:positions:DRAFT:one-ahead"
GENERATED = generate(BY_NAME["plain"], count=24, seed=11)


def long_prompt(scenario):
    """Fails where a prompt exceeds the chunk; and in another way where more than one request is in play."""
    chunk = scenario.engine.chunked_prefill_size
    found = {SIGNATURE} if chunk and any(len(r.input_ids) > chunk for r in scenario.requests) else set()
    return frozenset(found | ({OTHER} if len(scenario.requests) > 1 else set()))


def failing():
    return max((s for s in GENERATED if SIGNATURE in long_prompt(s) and len(s.requests) > 2), key=size)


def test_smallest_program_with_the_same_signature_is_found():
    shrunk = shrink(failing(), long_prompt, SIGNATURE)
    small = shrunk.scenario
    assert shrunk.finished
    assert SIGNATURE in long_prompt(small)
    assert len(small.requests) == 1
    assert [op.kind for op in small.script] == ["submit", "drain"]
    assert len(small.requests[0].input_ids) == small.engine.chunked_prefill_size + 1
    assert small.requests[0].max_new_tokens == 1
    assert small.wants == ()


def test_another_failure_is_not_followed_but_reported():
    shrunk = shrink(failing(), long_prompt, SIGNATURE)
    assert shrunk.other == {OTHER}
    small = shrink(failing(), long_prompt, OTHER).scenario
    assert len(small.requests) == 2
    assert SIGNATURE not in long_prompt(small)


def test_nothing_smaller_leaves_the_scenario_as_it_was():
    given = failing()
    shrunk = shrink(given, lambda scenario: frozenset({SIGNATURE} if scenario == given else ()), SIGNATURE)
    assert shrunk.scenario == given
    assert shrunk.finished


def test_tries_are_bounded_and_the_best_so_far_is_kept():
    shrunk = shrink(failing(), long_prompt, SIGNATURE, budget=Budget(tries=5))
    assert not shrunk.finished
    assert shrunk.tries == 5
    assert size(shrunk.scenario) < size(failing())


def test_no_time_means_no_try():
    shrunk = shrink(failing(), long_prompt, SIGNATURE, budget=Budget(seconds=0.0))
    assert (shrunk.tries, shrunk.finished) == (0, False)


def test_a_crash_costs_a_restart():
    def crashes(_scenario):
        return frozenset({"CRASH:ledger:DRAFT:somewhere"})

    shrunk = shrink(failing(), crashes, "CRASH:ledger:DRAFT:somewhere", budget=Budget(restarts=3))
    assert shrunk.restarts == 3
    assert not shrunk.finished


def test_no_scenario_is_tried_twice():
    tried = []

    def fails(scenario):
        tried.append(scenario.id)
        return long_prompt(scenario)

    shrunk = shrink(failing(), fails, SIGNATURE)
    assert len(set(tried)) == len(tried) == shrunk.tries


def test_shrinking_repeats():
    first, second = (shrink(failing(), long_prompt, SIGNATURE).scenario for _ in range(2))
    assert first == second


@pytest.mark.parametrize("scenario", GENERATED[:8], ids=lambda scenario: scenario.id)
def test_candidates_are_valid_and_share_the_engine(scenario):
    for candidate in itertools.islice(smaller(scenario), 200):
        assert Scenario.model_validate(candidate.model_dump()) == candidate
        assert candidate.boot_key() == scenario.boot_key()


def test_simpler_boots_need_another_engine():
    pages = generate(BY_NAME["pages"], count=1, seed=1)[0]
    candidates = list(simpler_boots(pages))
    assert [candidate.engine.page_size for candidate in candidates] == [1, 4]
    assert all(candidate.boot_key() != pages.boot_key() for candidate in candidates)


def test_shared_prefixes_stay_shared_when_prompts_are_cut():
    drawn = generate(BY_NAME["pages"], count=60, seed=2)
    shared = next(s for s in drawn if "prefix_hit" in s.wants)
    first, second = (request.input_ids for request in shared.requests[:2])
    for candidate in smaller(shared):
        for request in candidate.requests:
            original = first if request.rid == "r0" else second if request.rid == "r1" else request.input_ids
            assert original[: len(request.input_ids)] == request.input_ids


def test_tidy_joins_scheduler_steps_and_waits_for_nothing_at_the_ends():
    scheduler_step, drain, submit = Op(kind="step", count=2), Op(kind="drain"), Op(kind="submit", rids=("a",))
    assert tidy(
        [scheduler_step, submit, scheduler_step, scheduler_step, Op(kind="retract"), scheduler_step, drain]
    ) == (submit, Op(kind="step", count=4), Op(kind="retract"), drain)


# Failures of a run


@dataclass(frozen=True)
class Result:
    scenario: Scenario
    findings: list


def broken(round_number):
    """A hand-made trace whose draft position is wrong from one round on, with its judgement."""
    given = handmade.scenario()
    engine, reference = handmade.build(given)
    engine = handmade.copy_trace(engine)
    rows = engine.rows
    wrong = (rows.strings["phase"] == "DRAFT") & (rows.ints["round"] >= round_number)
    rows.ints["position"][wrong] += 1
    _, divergences = judge(given, engine, reference)
    return given, engine, reference, divergences


def first_of(divergences):
    return next(found for found in divergences if found.first)


def test_the_same_failure_in_many_scenarios_is_one_with_a_count_and_the_smallest_of_them():
    given, _, _, divergences = broken(2)
    larger = given.model_copy(update={"requests": given.requests[:2], "script": given.script[-1:]})
    other = replace(first_of(divergences), kind=Kind.CACHE_SLOT, check="slots")
    judged = [(given, divergences), (larger, divergences), (given, [other])]
    found = failures([Result(scenario, group(shown)) for scenario, shown in judged])
    assert [(one.signature, one.scenarios) for one in found] == [
        (first_of(divergences).signature, 2),
        (other.signature, 1),
    ]
    assert found[0].smallest == larger


def test_a_consequence_is_no_failure_of_its_own():
    given, _, _, divergences = broken(2)
    first = first_of(divergences)
    later = replace(first, kind=Kind.NUMERIC, check="chain", cause=first.signature, first=False)
    findings = group([later, first])
    assert root_signatures(findings) == {first.signature}
    assert [one.signature for one in failures([Result(given, findings)])] == [first.signature]
