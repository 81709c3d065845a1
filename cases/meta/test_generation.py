"""Generated scenarios are valid, small and repeatable, and their templates say what they do. No engine here."""

import functools
import re
from collections import Counter
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cases.boots import BY_NAME, OF_FAMILY, reasons_of
from cases.builder import CONTEXT, MOST_NEW, TEMPLATES, possible, shortest_life, turns
from cases.generation import BESIDE_TOKENS, MOST_REQUESTS, build, generate, greedy, scenarios
from cases.templates.handoff import MOST
from cases.timeline import Timeline, inserted
from harness.checks.logprobs import LOOSE
from harness.cli.scenario_checks import check_scenarios
from harness.contract.requests import RequestSpec
from harness.contract.scenario import Scenario
from harness.contract.script import Op
from harness.coverage import POINTS, Where, names

BOOTS = [boot for boot in OF_FAMILY["eagle"] if boot.planned_on("0")]
TREES = OF_FAMILY["tree"]
OTHERS = [BY_NAME[name] for name in ("lora", "weights-tp", "hicache-pages", "pd-ranks", "states")]
ALL_BOOTS = [*BOOTS, *TREES, *OF_FAMILY["dp"], *OF_FAMILY["disagg"], *OTHERS]
EVERY_BOOT = pytest.mark.parametrize("boot", ALL_BOOTS, ids=lambda boot: boot.name)


@functools.cache
def some(name, count=60, seed=5):
    """Drawn once for every test that only looks at them."""
    return generate(BY_NAME[name], count=count, seed=seed)


def test_log_probabilities_are_asked_for_only_of_texts_that_one_model_writes():
    asked = Counter()
    for seed in range(40):
        made = build(Random(seed), BY_NAME["weights"], template="updated_while_running")
        kinds = [op.kind for op in made.script]
        later = {rid for op in made.script[kinds.index("update") :] for rid in op.rids}
        for one in made.requests:
            asked[one.rid in later, one.return_logprob] += 1
    assert asked[False, False] > 40
    assert asked[True, True] > 5
    assert not asked[False, True]


def test_no_log_probabilities_keep_a_batch_from_being_mixed():
    """SGLang mixes no batch of requests that ask for them."""
    made = [build(Random(seed), BY_NAME["mixed"], template="mixed_batch") for seed in range(40)]
    assert not any(one.return_logprob for scenario in made for one in scenario.requests)
    assert any(request.asked for scenario in made for request in scenario.requests)


def test_nothing_comes_between_a_pause_and_who_goes_on_behind_it():
    """Else another rank's prompts may hold the request until it is taken back."""
    for seed in range(40):
        kinds = [op.kind for op in build(Random(seed), BY_NAME["dp"], template="pause_resume").script]
        assert kinds[:5] == ["submit", "step", "pause", "step", "resume"]
        assert kinds[5] in ("step", "drain")


def test_boot_configurations_are_all_different():
    assert len({boot.boot_key() for boot in ALL_BOOTS}) == len(ALL_BOOTS)


@pytest.mark.parametrize(
    ("reasons", "why"),
    [
        ({}, "before: unknown reason 'chunks': there is none"),
        ({"chunk": "it fails"}, "before: unknown reason 'chunks'; did you mean 'chunk'?"),
        ({"chunks": "it fails", "trees": "so does this"}, "[reasons] trees: nothing has it"),
    ],
)
def test_a_reason_that_is_not_there_or_that_nothing_has_is_refused(reasons, why):
    family, boot = {"dp": {}}, {"dp": {"wide": {"before": "chunks"}, "other": {}}}
    with pytest.raises(ValueError, match=re.escape(why)):
        reasons_of({"reasons": reasons, "family": family, "boot": boot})


@EVERY_BOOT
def test_scenarios_can_run_share_one_engine_survive_json_and_stay_small(boot):
    made = some(boot.name)
    check_scenarios(made, device="cpu")
    assert {scenario.boot_key() for scenario in made} == {boot.boot_key()}
    for scenario in made:
        assert Scenario.model_validate_json(scenario.model_dump_json()) == scenario
        assert len(scenario.requests) <= (MOST if boot.engine.disaggregation else MOST_REQUESTS + 1)
        assert all(len(request.input_ids) + request.max_new_tokens <= CONTEXT for request in scenario.requests)
        assert all(request.max_new_tokens <= MOST_NEW or request.unlimited for request in scenario.requests)


@pytest.mark.parametrize("family", OF_FAMILY)
def test_what_every_template_makes_in_every_family_can_run(family):
    made = [build(Random(3), boot, template=name) for boot in OF_FAMILY[family] for name in possible(boot)]
    check_scenarios(made, device="cpu")


@EVERY_BOOT
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_strategy_draws_scenarios_that_can_run_on_the_same_engine(boot, data):
    scenario = data.draw(scenarios(boot))
    check_scenarios([scenario], device="cpu")
    assert scenario.boot_key() == boot.boot_key()


@EVERY_BOOT
def test_scenario_is_decided_by_boot_configuration_seed_and_number_alone(boot):
    first = some(boot.name)
    assert generate(boot, count=20, seed=5) == first[:20]
    content = {(scenario.requests, scenario.script) for scenario in first}
    assert len(content) == len(first)
    assert content.isdisjoint((one.requests, one.script) for one in generate(boot, count=20, seed=6))


@EVERY_BOOT
def test_every_possible_template_is_drawn_and_is_wanted_where_it_is_certain(boot):
    """And what a boot configuration is for comes every second time."""
    cycle = turns(boot, Random(0))
    assert set(cycle) == set(possible(boot))
    wanted = Counter(name for one in some(boot.name, count=2 * len(cycle)) for name in one.wants)
    assert wanted == Counter(2 * [name for name in cycle if TEMPLATES[name].certain])
    often = [name for name in possible(boot) if TEMPLATES[name].often]
    assert not often or 2 * sum(cycle.count(name) for name in often) == len(cycle)


def test_certain_templates_are_points_that_the_trace_can_prove():
    assert {name for name, one in TEMPLATES.items() if one.certain} <= set(POINTS)


def test_every_point_of_one_engine_has_a_template_or_comes_by_itself():
    """Those without a template must be common: the coverage table of `eaglecheck fuzz` shows that they are reached."""
    by_themselves = {"batch_shrinks", "every_accept_len_seen", "accept_len_1_and_full_in_one_batch"}
    by_themselves |= {"retract_border_in_prompt", "retract_border_in_output", "top_logprobs", "chosen_logprobs"}
    lengths = {name for name in POINTS if name.startswith("accept_len_")}
    assert set(names(Where.ANYWHERE)) - set(TEMPLATES) == by_themselves | lengths


def test_requests_of_any_program_ask_for_what_comes_back_and_need_no_other_batches_for_it():
    asked = [request for boot in ("plain", "states") for one in some(boot) for request in one.requests]
    for key in ("return_logprob", "top_logprobs_num", "token_ids_logprob", "stream", "return_hidden_states"):
        assert any(key in request.asked for request in asked), key
    assert all(not request.return_hidden_states for one in some("plain") for request in one.requests)
    for scenario in (*some("plain"), *some("pages")):
        prefixed = any(name.startswith("prefix") for name in scenario.wants)
        assert not (prefixed and any(request.logprob_start_len >= 0 for request in scenario.requests)), scenario.wants
        answered = [request for request in scenario.requests if request.expect == "answer"]
        assert len({request.token_ids_logprob for request in answered}) == 1


def test_what_a_witness_follows_is_the_same_batches_of_greedy_tokens():
    whole = some("plain", count=len(possible(BY_NAME["plain"])))
    left = {one.name: one for one in greedy(whole)}
    beside = {"verify_by_top_p", "accepted_run_logprobs"}
    assert (
        {want for one in whole for want in one.wants} > {want for one in left.values() for want in one.wants} != set()
    )
    assert beside.isdisjoint(want for one in left.values() for want in one.wants)
    for one in whole:
        if one.name in left:
            assert left[one.name].script == one.script
            assert not any({*BESIDE_TOKENS} & {*request.asked} for request in left[one.name].requests)


def test_what_a_template_asks_for_is_judged_beside_whatever_is_drawn():
    asking = [request for one in some("plain") for request in one.requests if request.return_logprob]
    assert asking
    assert not any({*LOOSE} & {*request.asked} for request in asking)


def test_a_request_that_a_template_samples_goes_on_sampling_whatever_is_drawn():
    made = [build(Random(seed), BY_NAME["plain"], template="sampled_logprobs").request("r0") for seed in range(100)]
    assert all(one.temperature and one.return_logprob for one in made)


@pytest.mark.parametrize("boot", [boot.name for boot in (*BOOTS, *TREES)])
def test_one_request_of_every_program_is_verified_token_by_token(boot):
    """What samples, stops or has rules of its own is judged otherwise, or by a replacement kernel not at all."""
    for scenario in some(boot, count=200):
        gone = {rid for op in scenario.script if op.kind == "abort" for rid in op.rids}
        left = [one for one in scenario.requests if one.rid not in gone and not one.stop_token_ids and not one.rules]
        assert any(one.greedy and one.max_new_tokens > 1 for one in left), scenario.name


@pytest.mark.parametrize("boot", ["plain", "no-cache", "states"])
def test_nobody_asks_for_log_probabilities_that_nothing_judges(boot):
    for request in (one for scenario in some(boot, count=300) for one in scenario.requests):
        assert not (request.return_logprob and {*LOOSE} & {*request.asked})


def test_ranks_are_drawn_where_there_are_several_and_a_template_keeps_its_own():
    drawn = some("dp", count=4 * len(possible(BY_NAME["dp"])))
    assert {request.dp_rank for scenario in drawn for request in scenario.requests} == {0, 1}
    uneven = [scenario for scenario in drawn if scenario.wants == ("uneven_ranks",)]
    assert uneven
    for scenario in uneven:
        first, second, beside = (request.dp_rank for request in scenario.requests[:3])
        assert (first, beside) == (second, 1 - second)
    assert all(request.dp_rank == 0 for scenario in some("plain") for request in scenario.requests)


def test_requests_handed_over_beside_a_template_have_every_fate():
    made = some("pd", count=200)
    assert {len(one.requests) for one in made} == set(range(1, MOST + 1))
    kinds = {op.name or op.kind for one in made for op in one.script}
    assert {"hold", "release", "fail", "drop", "abort"} <= kinds


@pytest.mark.parametrize("boot", BOOTS, ids=lambda boot: boot.name)
def test_aborted_requests_surely_live_when_the_abort_comes(boot):
    """SGLang may or may not pass on an abort of a request that has just ended, so such a program would not repeat."""
    every = []
    for scenario in some(boot.name, count=100):
        now, arrived, aborted = 0, {}, []
        for op in scenario.script:
            now += op.count if op.kind == "step" else 0
            arrived |= dict.fromkeys(op.rids, now) if op.kind == "submit" else {}
            if op.kind == "abort":
                (rid,) = op.rids
                life = shortest_life(scenario.request(rid), k=boot.spec.num_steps)
                assert now - arrived[rid] <= life + most_prefill(scenario)
                aborted.append(rid)
        assert len(set(aborted)) == len(aborted)
        every += aborted
    assert every


def most_prefill(scenario):
    return max(-(-len(request.input_ids) // scenario.engine.chunked_prefill_size) for request in scenario.requests)


def test_shortest_life_counts_the_prefill_and_full_verifies():
    lives = [shortest_life(RequestSpec(rid="a", input_ids=(1,), max_new_tokens=new), k=3) for new in (1, 2, 5, 6, 24)]
    assert lives == [1, 1, 1, 2, 6]


# Timelines


def request(rid):
    return RequestSpec(rid=rid, input_ids=(1, 2))


def kinds(script):
    return [(op.kind, op.count) if op.kind == "step" else op.kind for op in script]


@pytest.mark.parametrize(
    ("arrivals", "ops", "script"),
    [
        ({"b": 3, "a": 0}, [(1, "retract")], ["submit", ("step", 1), "retract", ("step", 2), "submit", "drain"]),
        ({"a": 0, "b": 2}, [(2, "pause")], ["submit", ("step", 2), "pause", ("step", 1), "resume", "submit", "drain"]),
        ({"a": 4}, [(1, "abort", "a")], ["submit", "abort", "drain"]),
    ],
    ids=["in order", "a pause is ended and holds arrivals back", "an abort never comes before its request"],
)
def test_timeline(arrivals, ops, script):
    timeline = Timeline()
    for rid, step in arrivals.items():
        timeline.arrive(step, request(rid))
    for op in ops:
        timeline.at(*op)
    assert kinds(timeline.script()) == script


def test_requests_of_one_step_arrive_in_one_submit():
    timeline = Timeline()
    timeline.arrive(0, request("a"), request("b"))
    assert timeline.script()[0].rids == ("a", "b")


TURNS = st.integers(0, 6)


@settings(deadline=None)
@given(
    arrivals=st.lists(TURNS, min_size=1, max_size=4),
    ops=st.lists(st.tuples(TURNS, st.sampled_from(["pause", "resume", "retract", "flush"])), max_size=6),
)
def test_every_timeline_is_a_valid_script(arrivals, ops):
    timeline = Timeline()
    for number, scheduler_step in enumerate(arrivals):
        timeline.arrive(scheduler_step, request(f"r{number}"))
    for scheduler_step, kind in ops:
        timeline.at(scheduler_step, kind)
    made = Scenario(name="x", requests=timeline.requests, script=timeline.script())
    taken, now = [], 0
    for op in made.script:
        now += op.count if op.kind == "step" else 0
        taken += [now] if op.kind in ("pause", "resume", "retract") else []
    assert len(set(taken)) == len(taken), "a step takes one pause or resume, and a retraction is one of each"


@pytest.mark.parametrize(("scheduler_step", "expected"), [(0, 1), (2, 2), (5, 4), (9, 4)])
def test_inserted_op_comes_before_its_step(scheduler_step, expected):
    script = (
        Op(kind="submit", rids=("a",)),
        Op(kind="step", count=3),
        Op(kind="submit", rids=("b",)),
        Op(kind="drain"),
    )
    made = inserted(script, scheduler_step, Op(kind="retract"))
    assert made[expected].kind == "retract"
    assert sum(op.count for op in made[:expected] if op.kind == "step") == scheduler_step
    assert sum(op.count for op in made if op.kind == "step") == max(3, scheduler_step)
    assert made[-1].kind == "drain"
