"""Driving a scenario, on a pretended engine: what is read while the engine is busy, and what that must not change."""

from types import SimpleNamespace

import numpy as np
import pytest

from harness.contract.requests import RequestSpec
from harness.contract.scenario import Scenario
from harness.contract.script import Op
from harness.driving.drive import ScriptError, drive
from harness.driving.row_arrays import Misfit, parents_of
from harness.engines.errors import EngineCrashed

TURNS = 5


def of_round(step, index):
    """Two messages that make no rows: an event and a batch."""
    said = {"ev": "again", "round": index, "step": 0, "rows": step}
    batch = {"ev": "round", "index": index, "mode": "IDLE", "rids": [], "attempts": [], "starts": [], "lens": []}
    return [({**message, "scheduler_step": step}, {}) for message in (said, {**batch, "final": [], "forwards": {}})]


class Slow:
    """An engine that brings a round one scheduler step late, and has answered after `patience` messages were read."""

    handshakes = ({"dp_rank": 0},)

    def __init__(self, patience, *, falls=False):
        self.patience, self.falls, self.number, self.read = patience, falls, 0, []

    def begin(self, **_asked):
        return [{"pool": {"free": 1}}]

    def submit(self, **_asked):
        return True

    def step(self, *, expect, meanwhile):
        asked = 0

        def answered():
            nonlocal asked
            asked += 1
            return asked >= self.patience

        meanwhile(answered)
        self.read.append(asked)
        self.number += 1
        if self.falls and self.number == TURNS:
            raise EngineCrashed({"error": "x"}, of_round(self.number - 1, self.number - 2))
        late = [*of_round(self.number - 1, 2 * self.number), *of_round(self.number - 1, 2 * self.number + 1)]
        messages = list if self.number == 1 else lambda: late
        state = {"idle": self.number >= TURNS, "running": [], "waiting": [], "chunked": None}
        return [SimpleNamespace(number=self.number, side="", dp_rank=0, tp_rank=0, state=state, messages=messages)]

    def end(self):
        return [{"messages": of_round(self.number, 99), "pool": {"free": 1}, "fired": {}}]

    def collect(self, rids):
        return [{"rid": rid, "reason": "stop", "output_ids": [1], "cached_tokens": 0} for rid in rids]


SCENARIO = Scenario(
    name="slow",
    requests=(RequestSpec(rid="a", input_ids=(1, 2, 3), max_new_tokens=4),),
    script=(Op(kind="submit", rids=("a",)), Op(kind="step", count=2), Op(kind="drain")),
)


def traced(engine):
    trace = drive(engine, SCENARIO)
    return (
        [(event.name, event.scheduler_step, event.data.get("rows")) for event in trace.events],
        [(record.index, record.scheduler_step) for record in trace.rounds],
        [(end.rid, end.scheduler_step) for end in trace.ends],
    )


@pytest.mark.parametrize("falls", [False, True], ids=["to the end", "until it falls"])
def test_a_trace_says_the_same_however_quickly_the_engine_answers(falls):
    patient, quick, halfway = (Slow(patience, falls=falls) for patience in (10**9, 1, 3))
    reported = traced(patient)
    assert traced(quick) == reported
    assert traced(halfway) == reported
    events, rounds, ends = reported
    assert [name for name, _, _ in events if name == "crash"] == ["crash"] * falls
    scheduler_steps = [step for _, step in rounds]
    assert scheduler_steps == sorted(scheduler_steps)
    assert len(rounds) == (2 * (TURNS - 2) + 1 if falls else 2 * (TURNS - 1) + 1)
    assert bool(ends) is not falls


def test_nothing_is_read_while_the_engine_waits():
    quick = Slow(1)
    drive(quick, SCENARIO)
    assert quick.read == [0, 0, 1, 1, 1]
    patient = Slow(10**9)
    drive(patient, SCENARIO)
    assert patient.read == [0, 0, 4, 4, 4]


class Sampling(Slow):
    """It answers a request of two samples with what SGLang says of each, and notes what was announced when."""

    def __init__(self):
        super().__init__(1)
        self.announced = []

    def step(self, *, expect, meanwhile):
        self.announced.append(list(expect))
        return super().step(expect=expect, meanwhile=meanwhile)

    def collect(self, rids):
        meta = {"hidden_states": [[[1.0, 2.0], [3.0, 4.0]], [5.0, 6.0]], "prompt_tokens": 3}
        piece = {"output_ids": [1], "meta": {"hidden_states": [[[1.0, 2.0]]]}}
        end = {"reason": "stop", "output_ids": [1], "cached_tokens": 0, "pieces": [piece]}
        return [{"rid": f"{rid}.{number}", "meta": dict(meta), **end} for rid in rids for number in (1, 2)]


def of_samples(*script):
    requests = [RequestSpec(rid="a", input_ids=(1, 2, 3), n=2), RequestSpec(rid="b", input_ids=(1,))]
    alone = Scenario(
        name="samples",
        requests=requests,
        script=[each for rid in "ab" for each in (Op(kind="submit", rids=(rid,)), Op(kind="drain"))],
    )
    return alone.model_copy(update={"script": (*script, Op(kind="drain"))})  # what is refused before it is driven


def test_samples_arrive_when_the_request_that_reads_their_prompt_has_ended():
    engine = Sampling()
    trace = drive(engine, of_samples(Op(kind="submit", rids=("a",)), Op(kind="submit", rids=("b",))))
    assert engine.announced == [["a.0"], [], [], [], [], ["a.1", "a.2", "b"]]
    assert [end.rid for end in trace.ends] == ["a.1", "a.2", "b.1", "b.2"]
    answers = [event.data for event in trace.named("answer")]
    assert answers[0] == {"rid": "a.1", "meta": {"prompt_tokens": 3}, "pieces": [{"output_ids": [1], "meta": {}}]}
    assert trace.tensors["returned.a.1"].tolist() == [[1, 2], [3, 4], [5, 6]]


def test_samples_beside_a_request_that_is_alive_are_refused():
    with pytest.raises(ScriptError, match="submitted beside others"):
        drive(Sampling(), of_samples(Op(kind="submit", rids=("b",)), Op(kind="submit", rids=("a",))))


class Refusing(Sampling):
    """It answers a request of two samples with an error, as SGLang does: with one for all."""

    def collect(self, rids):
        return [{"rid": rid, "reason": "error", "error": "no", "output_ids": [], "cached_tokens": 0} for rid in rids]


def test_an_error_of_a_request_is_the_end_of_each_of_its_samples():
    trace = drive(Refusing(), of_samples(Op(kind="submit", rids=("a",)), Op(kind="submit", rids=("b",))))
    assert [end.rid for end in trace.ends] == ["a.0", "a.1", "a.2", "b"]
    errors = [event.data for event in trace.named("request_error")]
    assert errors == [{"rid": rid, "error": "no"} for rid in ("a.0", "a.1", "a.2", "b")]


class Torn(Slow):
    """Its last batch but one has more rows than its requests."""

    def end(self):
        about = {
            "round": 98,
            "rids": ["a"],
            "attempts": [0],
            "committed": [3],
            "lens": [2],
            "phase": "VERIFY",
            "step": 0,
        }
        forward = {"ev": "forward", "scheduler_step": self.number, "index": 98, **about}
        found = {"input_ids": np.arange(3), "positions": np.arange(3), "cache_slots": np.arange(3)}
        return [{"messages": [(forward, found), *of_round(self.number, 99)], "pool": {"free": 1}, "fired": {}}]


def test_a_batch_whose_rows_do_not_fit_is_left_out_and_named():
    trace = drive(Torn(1), SCENARIO)
    (misfit,) = trace.named("misfit")
    assert misfit.data == {"round": 98, "why": "3 input_ids in VERIFY of requests that have 2 rows"}
    assert trace.rounds[-1].index == 99, "what came behind it is read"
    assert not len(trace.rows)


@pytest.mark.parametrize(("children", "siblings"), [([1, -1, -1], [-1, 3, -1]), ([1, -1, -1], [-1, 1, -1])])
def test_links_that_are_no_tree_are_a_misfit(children, siblings):
    with pytest.raises(Misfit, match="no tree of 3 nodes"):
        parents_of(np.array(children), np.array(siblings), 3)


def test_links_are_read_as_parents():
    assert parents_of(np.array([1, -1, 3, -1]), np.array([-1, 2, -1, -1]), 4).tolist() == [[-1, 0, 0, 2]]
