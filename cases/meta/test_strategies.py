"""Generated scenarios are valid, small, labelled, repeatable, and their leads say what they do. No engine here."""

import ast
import functools
import importlib.util
import inspect
import sys
from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cases import leads, strategies
from cases.boots import DP_BOOTS
from cases.leads import LEADS, possible
from cases.strategies import BOOTS, CONTEXT, TREES, collect, programs, scenarios, shortest_life
from cases.timeline import Timeline, inserted
from harness.contract.types import Op, RequestSpec, Scenario
from harness.coverage import POINTS, Where, names

ALL_BOOTS = [*BOOTS.values(), *TREES.values(), *DP_BOOTS.values()]


def some(boot, count=60, seed_value=5):
    return programs(boot, count=count, seed_value=seed_value)


@functools.cache
def sixty(name):
    """Drawn once for every test that only looks at them."""
    return some(next(boot for boot in ALL_BOOTS if boot.name == name))


@pytest.mark.parametrize("boot", ALL_BOOTS, ids=lambda boot: boot.name)
def test_scenarios_of_a_boot_configuration_share_one_engine(boot):
    assert {scenario.boot_key() for scenario in sixty(boot.name)} == {boot.boot_key()}


def test_boot_configurations_are_all_different():
    assert len({boot.boot_key() for boot in ALL_BOOTS}) == len(ALL_BOOTS)


@pytest.mark.parametrize("boot", ALL_BOOTS, ids=lambda boot: boot.name)
def test_scenarios_survive_json_and_stay_small(boot):
    for scenario in sixty(boot.name):
        assert Scenario.model_validate_json(scenario.model_dump_json()) == scenario
        assert len(scenario.requests) <= strategies.MOST_REQUESTS + 1
        assert all(len(request.prompt) + request.max_new_tokens <= CONTEXT for request in scenario.requests)
        assert all(request.max_new_tokens <= strategies.MOST_NEW for request in scenario.requests)


def test_same_seed_gives_the_same_scenarios_and_another_seed_others():
    boot = BOOTS["plain"]
    first = [scenario.id for scenario in some(boot)]
    assert first == [scenario.id for scenario in some(boot)]
    assert set(first).isdisjoint(scenario.id for scenario in some(boot, seed_value=6))


def test_what_else_is_imported_changes_no_draw(tmp_path):
    """Hypothesis draws from the constants of modules outside of site-packages."""
    before = some(BOOTS["plain"])
    file = tmp_path / "constants_of_a_user.py"
    file.write_text(f"VALUES = {list(range(100, 1100))}\n")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    try:
        spec.loader.exec_module(module)
        assert some(BOOTS["plain"]) == before
    finally:
        del sys.modules[file.stem]


def test_scenarios_of_one_seed_are_all_different():
    drawn = some(BOOTS["plain"], count=120)
    assert len({scenario.id for scenario in drawn}) == len(drawn) == 120


def test_every_possible_lead_takes_its_turn():
    boot = BOOTS["pages"]
    names = possible(boot)
    wanted = Counter(name for scenario in some(boot, count=2 * len(names)) for name in scenario.wants)
    assert set(wanted) == {name for name in names if LEADS[name].certain}
    assert set(wanted.values()) == {2}


def test_certain_leads_are_situations_that_the_trace_can_prove():
    assert {name for name, lead in LEADS.items() if lead.certain} <= set(POINTS)


def test_every_situation_has_a_lead_or_comes_by_itself():
    """Those without a lead must be common: `test_generated` and the soak table show that they are reached."""
    by_themselves = {"batch_shrinks", "every_accept_len_seen", "accept_len_1_and_full_in_one_batch"}
    by_themselves |= {"retract_border_in_prompt", "retract_border_in_output"}
    lengths = {name for name in POINTS if name.startswith("accept_len_")}
    elsewhere = {*names(*(set(Where) - {Where.ANYWHERE}))}
    assert set(POINTS) - set(LEADS) == by_themselves | lengths | (elsewhere - set(LEADS))


def test_ranks_are_drawn_where_there_are_several_and_a_lead_keeps_its_own():
    boot = DP_BOOTS["dp"]
    drawn = some(boot, count=4 * len(possible(boot)))
    assert {request.dp_rank for scenario in drawn for request in scenario.requests} == {0, 1}
    uneven = [scenario for scenario in drawn if scenario.wants == ("uneven_ranks",)]
    assert uneven
    for scenario in uneven:
        first, second, beside = (request.dp_rank for request in scenario.requests[:3])
        assert (first, beside) == (second, 1 - second)
    assert all(request.dp_rank == 0 for scenario in some(BOOTS["plain"]) for request in scenario.requests)


def test_every_draw_has_a_label():
    for module in (strategies, leads):
        for call in ast.walk(ast.parse(inspect.getsource(module))):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name | ast.Attribute):
                name = call.func.id if isinstance(call.func, ast.Name) else call.func.attr
                if name == "draw":
                    assert any(keyword.arg == "label" for keyword in call.keywords), ast.unparse(call)


def test_strategies_name_no_bug():
    for module in (strategies, leads):
        source = inspect.getsource(module)
        assert not any(word in source for word in ("25015", "26329", "pr2"))


def test_greedy_stop_ids_are_tokens_of_the_greedy_text():
    def greedy(prompt, new):
        return tuple(range(400, 400 + new))

    drawn = collect(scenarios(BOOTS["plain"], greedy=greedy, lead="stop_inside_accepted_run"), count=10, seed_value=1)
    stops = [(request.stop_ids, request.max_new_tokens) for scenario in drawn for request in scenario.requests]
    assert any(ids for ids, _ in stops)
    assert all(400 <= ids[0] < 400 + new for ids, new in stops if ids)


@pytest.mark.parametrize("boot", BOOTS.values(), ids=lambda boot: boot.name)
def test_aborted_requests_surely_live_when_the_abort_comes(boot):
    """SGLang may or may not pass on an abort of a request that has just ended, so such a program would not repeat."""
    for scenario in some(boot, count=100):
        now, arrived = 0, {}
        for op in scenario.script:
            now += op.count if op.kind == "tick" else 0
            arrived |= dict.fromkeys(op.rids, now) if op.kind == "submit" else {}
            if op.kind == "abort":
                (rid,) = op.rids
                assert now - arrived[rid] <= shortest_life(scenario.request(rid), k=boot.spec.k) + most_prefill(
                    scenario
                )
        aborts = [rid for op in scenario.script if op.kind == "abort" for rid in op.rids]
        assert len(set(aborts)) == len(aborts)


def most_prefill(scenario):
    return max(-(-len(request.prompt) // scenario.engine.chunk) for request in scenario.requests)


def test_shortest_life_counts_the_prefill_and_full_verifies():
    lives = [shortest_life(RequestSpec(rid="a", prompt=(1,), max_new_tokens=new), k=3) for new in (1, 2, 5, 6, 24)]
    assert lives == [1, 1, 1, 2, 6]


# Timelines


def request(rid):
    return RequestSpec(rid=rid, prompt=(1, 2))


def kinds(script):
    return [(op.kind, op.count) if op.kind == "tick" else op.kind for op in script]


def test_timeline_puts_things_in_order_of_turns():
    timeline = Timeline()
    timeline.arrive(3, request("b"))
    timeline.arrive(0, request("a"))
    timeline.at(1, "retract")
    assert kinds(timeline.script()) == ["submit", ("tick", 1), "retract", ("tick", 2), "submit", "drain"]


def test_requests_of_one_turn_arrive_in_one_submit():
    timeline = Timeline()
    timeline.arrive(0, request("a"), request("b"))
    assert timeline.script()[0].rids == ("a", "b")


def test_pause_without_an_end_is_ended_and_holds_arrivals_back():
    timeline = Timeline()
    timeline.arrive(0, request("a"))
    timeline.arrive(2, request("b"))
    timeline.at(2, "pause")
    assert kinds(timeline.script()) == ["submit", ("tick", 2), "pause", ("tick", 1), "resume", "submit", "drain"]


def test_abort_never_comes_before_its_request():
    timeline = Timeline()
    timeline.arrive(4, request("a"))
    timeline.at(1, "abort", "a")
    assert kinds(timeline.script()) == ["submit", "abort", "drain"]


TURNS = st.integers(0, 6)


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(
    arrivals=st.lists(TURNS, min_size=1, max_size=4),
    ops=st.lists(st.tuples(TURNS, st.sampled_from(["pause", "resume", "retract", "flush"])), max_size=6),
)
def test_every_timeline_is_a_valid_script(arrivals, ops):
    timeline = Timeline()
    for number, turn in enumerate(arrivals):
        timeline.arrive(turn, request(f"r{number}"))
    for turn, kind in ops:
        timeline.at(turn, kind)
    made = Scenario(name="x", requests=timeline.requests, script=timeline.script())
    turns, now = [], 0
    for op in made.script:
        now += op.count if op.kind == "tick" else 0
        turns += [now] if op.kind in ("pause", "resume", "retract") else []
    assert len(set(turns)) == len(turns), "a turn takes one pause or resume, and a retraction is one of each"


@pytest.mark.parametrize(("turn", "expected"), [(0, 1), (2, 2), (5, 4), (9, 4)])
def test_inserted_op_comes_before_its_turn(turn, expected):
    script = (
        Op(kind="submit", rids=("a",)),
        Op(kind="tick", count=3),
        Op(kind="submit", rids=("b",)),
        Op(kind="drain"),
    )
    made = inserted(script, turn, Op(kind="retract"))
    assert made[expected].kind == "retract"
    assert sum(op.count for op in made[:expected] if op.kind == "tick") == turn
    assert sum(op.count for op in made if op.kind == "tick") == max(3, turn)
    assert made[-1].kind == "drain"
