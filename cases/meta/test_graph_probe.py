"""The probe inside CUDA graphs, on a pretended torch.cuda: what is captured, when it is reported, what padding is."""

import sys
import types
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from harness.both_sides.compat import lookup
from harness.both_sides.mutants import MUTANTS
from harness.both_sides.wire import named, read
from harness.driving.rounds import Unpacker
from harness.driving.row_arrays import best_first, without_padding
from harness.engine_side.host.scheduler_hooks import keep_from_compiling
from harness.engine_side.mutants.graphs import GraphMutants, inside_graphs
from harness.engine_side.probes import captured_graph
from harness.engine_side.probes.captured_graph import Arena, CapturedGraph
from harness.engine_side.probes.graph_probe import GraphProbe
from harness.engine_side.probes.probe import Probe
from harness.engine_side.probes.recorder import Recorder
from harness.engine_side.probes.snapshot import copied, outputs_of
from harness.engine_side.probes.staging import StagingBuffer

WIDTH, VOCAB, STEPS = 3, 20, 3

#: Mutants that change floats only, or positions and masks that only floats show on a GPU.
FLOAT_MUTANTS = (
    "hidden-neighbour",
    "hidden-neighbour-extend",
    "hidden-previous-round",
    "hidden-zeroed",
    "hidden-zeroed-prompt",
    "hidden-shifted-extend",
    "hidden-dtype",
    "proposal-second-best",
    "proposal-swapped",
    "mask-bit-lost",
    "mask-bit-extra",
    "mask-bit-lost-chain",
    "slot-of-neighbour",
    "draft-position-late",
)


class Graph:
    """Stands for torch.cuda.CUDAGraph: a replay here leaves the buffers as the test filled them."""

    def capture_begin(self, *_pool):
        """Begin."""

    def capture_end(self):
        """End."""

    def replay(self):
        """Run."""


class Model:
    """hidden_out = hidden_in + positions, logits that depend on the token."""

    def forward(self, input_ids, positions, forward_batch):
        hidden = forward_batch.spec_info.hidden_states + positions[:, None]
        logits = torch.arange(VOCAB).float().roll(1)[None] - (input_ids[:, None] - torch.arange(VOCAB)).abs().float()
        return SimpleNamespace(hidden_states=hidden, next_token_logits=logits)


class ModelRunner:
    """The two methods the probes wrap."""

    is_draft_worker = True

    def load_model(self):
        self.model = Model()

    def forward(self, forward_batch):
        output = self.model.forward(forward_batch.input_ids, forward_batch.positions, forward_batch)
        return SimpleNamespace(logits_output=output)


def first_choice(i, topk_p, topk_index, hidden_states):
    return topk_index.flatten(), hidden_states


@pytest.fixture
def place(monkeypatch):
    """Modules as SGLang and torch would have them, with a graph probe in place and its model loaded."""
    cuda = types.ModuleType("torch.cuda")
    cuda.CUDAGraph = type("CUDAGraph", (Graph,), dict(Graph.__dict__))
    runners = types.ModuleType("sglang.srt.model_executor.model_runner")
    runners.ModelRunner = type("ModelRunner", (ModelRunner,), dict(ModelRunner.__dict__))
    worker = types.ModuleType("sglang.srt.speculative.eagle_worker_v2")
    worker.select_top_k_tokens = first_choice
    monkeypatch.setitem(sys.modules, "torch.cuda", cuda)
    for module in (runners, worker):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    graphs = GraphProbe()
    graphs.install(chooser_module=worker, choosers=("select_top_k_tokens", "draft_topk1_postprocess"))
    assert graphs.hooks.missing == []
    runner = runners.ModelRunner()
    runner.load_model()
    return SimpleNamespace(graphs=graphs, cuda=cuda, runner=runner, worker=worker, runners=runners)


def draft(place, batch):
    """A chain's draft loop as a worker runs it: forwards, choices, positions advanced in place."""
    hidden, ids = batch.spec_info.hidden_states, batch.first
    for i in range(STEPS):
        batch.input_ids, hidden = place.worker.select_top_k_tokens(i, torch.ones_like(ids).float(), ids, hidden)
        if i == STEPS - 1:
            break
        batch.out_cache_loc = batch.slots[i]
        batch.spec_info.hidden_states = hidden
        output = place.runner.forward(batch).logits_output
        ids, hidden = output.next_token_logits.argmax(-1, keepdim=True), output.hidden_states
        batch.positions.add_(1)


def batch_of(tokens, starts, *, size):
    """A decode batch of these requests, with nonsense rows up to `size`."""
    spare = size - len(tokens)
    hidden = torch.arange(size * WIDTH).float().reshape(size, WIDTH)
    return SimpleNamespace(
        batch_size=size,
        forward_mode=SimpleNamespace(name="DECODE"),
        first=torch.tensor([*tokens, *[0] * spare])[:, None],
        positions=torch.tensor([*starts, *[0] * spare]),
        slots=[torch.tensor([100 * (i + 1) + row for row in range(size)]) for i in range(STEPS)],
        out_cache_loc=None,
        input_ids=None,
        spec_info=SimpleNamespace(hidden_states=hidden),
    )


def captured(place, batch):
    graph = place.cuda.CUDAGraph()
    graph.capture_begin("pool")
    draft(place, batch)
    graph.capture_end()
    return graph


def probed(place):
    """A probe in the middle of a decode round of two requests, drafting."""
    recorder = Recorder()
    probe = Probe(recorder, lookup("0.5.13", overlap=True), place.graphs)
    place.graphs.wanted = lambda: recorder.round is not None
    place.graphs.on_replay = probe.forwards._replayed
    recorder.open_round(mode="DECODE", rids=["a", "b"], starts=[7, 9])
    recorder.phase, recorder.step = "DRAFT", 0
    return probe


def reported(recorder):
    """What the control side makes of the round in progress, and of those before it; the round is over then."""
    recorder.close_round()
    unpacker = Unpacker()
    messages = [part for message, held in recorder.take() for part in unpacker.unpack(named(message), held)]
    return [(message, {name: array.tolist() for name, array in held.items()}) for message, held in messages]


def inside_round(messages):
    return [(message, held) for message, held in messages if message["ev"] != "round"]


def values(record):
    """Every call of a graph with the arrays that its buffer holds now."""
    return [(call, read(record.buffer.numpy(), [(0, call.fields)])) for call in record.calls]


def test_a_graph_reports_what_the_same_round_reports_eagerly(place):
    eager = probed(place)
    place.runners.ModelRunner.forward = eager.forwards._forward(place.runners.ModelRunner.forward)
    place.worker.select_top_k_tokens = eager._select(place.worker.select_top_k_tokens)
    draft(place, batch_of([3, 4], [7, 9], size=2))
    expected = reported(eager.recorder)
    assert [message["ev"] for message, _ in expected] == [*["forward", "chosen"] * (STEPS - 1), "round"]
    assert [held["positions"] for message, held in expected if message["ev"] == "forward"] == [[7, 9], [8, 10]]

    graph = captured(place, batch_of([3, 4], [7, 9], size=4))  # a capture belongs to no round
    assert reported(eager.recorder) == []
    inside = probed(place)
    graph.replay()
    found = reported(inside.recorder)
    assert inside_round(found) == inside_round(expected)
    assert found[-1][0]["graphs"] == {"DRAFT": 4}
    assert found[-1][0]["forwards"] == expected[-1][0]["forwards"] == {"DRAFT": STEPS - 1}


def test_a_prompt_that_runs_partly_in_a_graph_shows_what_the_model_is_given_without_its_padding(place):
    """As SGLang's prefill graphs do: a forward that is replayed in the middle, on buffers of its own."""
    body = place.cuda.CUDAGraph()
    body.capture_begin("pool")
    body.capture_end()  # no model's own forward is inside
    asked, given = batch_of([3, 4], [7, 9], size=2), batch_of([3, 5], [7, 9], size=4)  # a token that was copied wrongly
    for batch in (asked, given):
        batch.input_ids, batch.out_cache_loc = batch.first[:, 0], batch.slots[0]
    own = Model.forward

    def forward(runner, forward_batch):
        output = runner.model.forward(given.input_ids, given.positions, given)
        return SimpleNamespace(logits_output=output)

    def replayed(model, *args):
        body.replay()
        return own(model, *args)

    for replays, graphs in ((True, {"DRAFT": 4}), (False, {})):
        probe = probed(place)
        place.graphs.on_eager = probe.forwards._take_given
        place.runner.model.__class__.forward = replayed if replays else own
        del place.runner.model.forward
        place.runner.model.forward = place.graphs._watched(place.runner.model.forward, place.runner)
        probe.forwards._forward(forward)(place.runner, asked)
        (seen, held), (closed, _) = reported(probe.recorder)
        assert (seen["ev"], held["input_ids"], held["positions"]) == ("forward", [3, 5], [7, 9])
        assert len(held["hidden_in"]) == len(held["cache_slots"]) == 2
        assert closed["graphs"] == graphs
    Model.forward = own


def test_a_warm_up_and_a_graph_without_a_model_leave_nothing(place):
    draft(place, batch_of([3], [7], size=1))
    empty = place.cuda.CUDAGraph()
    empty.capture_begin()
    empty.capture_end()
    assert place.graphs.captured == []
    graph = captured(place, batch_of([3], [7], size=1))
    assert list(place.graphs._captured) == [graph]
    assert len(place.graphs.captured[0].calls) == 2 * (STEPS - 1)


def test_nothing_is_read_outside_a_round_and_a_graph_that_runs_again_before_its_round_is_over_is_told_first(place):
    graph = captured(place, batch_of([3], [7], size=1))
    (record,) = place.graphs.captured
    seen, again = [], []
    place.graphs.on_replay, place.graphs.before_replay = seen.append, again.append
    graph.replay()
    assert seen == []
    place.graphs.wanted = lambda: True
    graph.replay()
    assert (len(seen), again) == (1, [])
    record.kept = object()
    graph.replay()
    assert again == [record]


def test_a_replay_shows_what_is_in_the_buffer_then(place):
    graph = captured(place, batch_of([3, 4], [7, 9], size=4))
    other = captured(place, batch_of([5, 6], [17, 19], size=4))
    first, second = place.graphs.captured
    first.buffer.copy_(second.buffer)  # what a real replay with other inputs does
    probe = probed(place)
    graph.replay()
    positions = [held["positions"] for message, held in reported(probe.recorder) if message["ev"] == "forward"]
    assert positions == [[17, 19], [18, 20]]
    assert other is not graph


@pytest.fixture
def mutated(place):
    """Graphs that hold mutants, each behind its flag."""
    mutants = GraphMutants()
    mutants.prepare("cpu")
    place.graphs.mutants = mutants
    return mutants


def inside(place, *, size=2):
    """What the forwards and choices of a graph of two requests hold, captured as things stand now."""
    graph = captured(place, batch_of([3, 4], [7, 9], size=size))
    record = place.graphs._captured[graph]
    found = values(record)
    del place.graphs._captured[graph]
    return {
        "hidden_in": [held["hidden_in"][:2].tolist() for call, held in found if call.what == "forward"],
        "positions": [held["positions"][:2].tolist() for call, held in found if call.what == "forward"],
        "ids": [held["ids"][:2].tolist() for call, held in found if call.what == "chosen"],
    }


def test_mutants_that_are_not_armed_change_nothing_inside_a_graph(place, mutated):
    found = inside(place)
    place.graphs.mutants = None
    assert found == inside(place)
    assert set(mutated.fired().values()) == {0}


def test_an_armed_mutant_acts_inside_a_graph_and_is_counted(place, mutated):
    sound = inside(place)
    mutated.arm(["draft-position-late"])
    assert inside(place)["positions"] == [[place + 1 for place in row] for row in sound["positions"]]
    mutated.arm(["hidden-neighbour"])
    assert inside(place)["hidden_in"][0] == sound["hidden_in"][0][::-1]
    mutated.arm(["proposal-second-best"])
    assert all(one != other for one, other in zip(inside(place)["ids"], sound["ids"], strict=True))
    counted = {name: count for name, count in mutated.fired().items() if count}
    assert counted == {"draft-position-late": 2, "hidden-neighbour": 2, "proposal-second-best": 2}
    mutated.forget()
    assert inside(place) == sound
    assert set(mutated.fired().values()) == {0}


def test_a_state_of_the_round_before_is_remembered_from_replay_to_replay(place, mutated):
    mutated.arm(["hidden-previous-round"])
    draft(place, batch_of([3, 4], [7, 9], size=2))  # a warm-up makes room
    first, second = inside(place), inside(place)
    assert first["hidden_in"][0] == [[0.0] * WIDTH] * 2
    assert second["hidden_in"][0] == batch_of([3, 4], [7, 9], size=2).spec_info.hidden_states.tolist()


def test_a_captured_round_looks_its_choices_up_in_the_map_that_an_armed_mutant_leaves(place, mutated):
    class EagleDraftWorker:
        hot_token_id = torch.tensor([5, 9, 2])

        def draft_forward(self):
            return self.hot_token_id.clone()

    place.worker.EagleDraftWorker = EagleDraftWorker
    graphs = GraphProbe(mutants=mutated)
    graphs.install(chooser_module=place.worker, choosers=(), drafter="EagleDraftWorker")
    graph, worker = place.cuda.CUDAGraph(), EagleDraftWorker()

    def looked_up():
        graph.capture_begin()
        found = worker.draft_forward().tolist()
        graph.capture_end()
        return found

    assert looked_up() == [5, 9, 2]
    mutated.arm(["token-map-left-out"])
    assert looked_up() == [0, 1, 2]
    mutated.arm(["map-twice"])
    assert looked_up() == [9, 9, 2]
    assert worker.draft_forward().tolist() == worker.hot_token_id.tolist() == [5, 9, 2]
    assert {name: count for name, count in mutated.fired().items() if count} == {
        "token-map-left-out": 1,
        "map-twice": 1,
    }


def test_every_float_mutant_can_be_captured_or_acts_outside_graphs():
    left = {name for name in FLOAT_MUTANTS if not inside_graphs(MUTANTS[name])}
    outside = {MUTANTS[name].site for name in left} - {"inputs", "choices"}
    prompts = {name for name in left if MUTANTS[name].phases == ("DRAFT_PREFILL",)}  # no prompt runs in a graph
    assert {name for name in left if MUTANTS[name].site in ("inputs", "choices")} == prompts
    assert outside == {"tree"}


def test_sizes_say_whose_graphs_there_are(place):
    graphs = [captured(place, batch_of([3], [7], size=size)) for size in (2, 1)]
    assert len(graphs) == len(place.graphs.captured)
    assert place.graphs.sizes() == {f"draft x{STEPS - 1}": [1, 2]}


def test_a_choice_that_is_returned_is_seen_like_one_that_is_shown(place):
    place.worker.draft_topk1_postprocess = lambda logits: (torch.ones(2, 1), logits.argmax(-1, keepdim=True))
    graphs = GraphProbe()
    graphs.install(chooser_module=place.worker, choosers=("draft_topk1_postprocess",))
    graph = place.cuda.CUDAGraph()
    graph.capture_begin()
    place.worker.draft_topk1_postprocess(torch.eye(2))
    graph.capture_end()
    (record,) = graphs.captured
    ((call, arrays),) = values(record)
    assert (call.what, arrays["ids"].tolist()) == ("chosen", [[0], [1]])


def test_copies_come_back_with_their_shapes_and_kinds():
    record = CapturedGraph()
    whole = torch.arange(6, dtype=torch.int32).reshape(2, 3)
    halves = torch.tensor([[0.5], [1.5]], dtype=torch.bfloat16)
    column = torch.arange(3).reshape(1, 3)[:, 1]  # one element with a stride of three
    record.put("forward", is_draft=True, batch=2, copies=[copied({"a": whole, "b": halves, "c": None, "d": column})])
    whole.zero_()
    record.close()
    ((_call, arrays),) = values(record)
    assert set(arrays) == {"a", "b", "d"}
    assert arrays["d"].tolist() == [1]
    assert arrays["a"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert arrays["a"].dtype == np.int64
    assert arrays["b"].tolist() == [[0.5], [1.5]]
    assert arrays["b"].dtype == np.float32


def test_of_equal_logits_the_argmax_comes_first():
    logits = torch.zeros(2, 40)
    logits[0, [7, 31]] = 2.0
    logits[1, 5] = 1.0
    output = SimpleNamespace(next_token_logits=logits, hidden_states=None)
    arrays = copied(outputs_of(output)).read()
    first, second = best_first(arrays["top_ids"], arrays["best"]).tolist()
    assert first[:2] == [7, 31]
    assert second[0] == 5
    swapped = np.asarray([[31, 7, 1], [5, 0, 2], [1, 2, 3]])
    assert best_first(swapped, np.asarray([7, 5, 9])).tolist() == [[7, 31, 1], [5, 0, 2], [9, 1, 2]]


@pytest.mark.parametrize(
    ("rows", "batch", "requests", "packed", "kept"),
    [
        (8, 4, 3, 0, 6),  # blocks of two rows
        (4, 4, 3, 0, 3),  # one row a request
        (16, 4, 3, 7, 7),  # rows of accepted tokens, one after the other
        (4, 4, 3, 7, 3),  # what such a forward gives: one row a request
        (4, 4, 4, 0, 4),
    ],
)
def test_padding_is_left_out(rows, batch, requests, packed, kept):
    array = np.arange(rows)
    assert without_padding(array, batch=batch, requests=requests, packed=packed).tolist() == list(range(kept))


def test_what_is_kept_is_copied_before_it_is_written_to_again_and_only_then():
    launched = []
    staging = StagingBuffer(
        move=lambda moves, _stream: launched.append([origin for _, origin, _ in moves]),
        event=lambda _used, _stream: None,
        new=lambda size: torch.empty(size, dtype=torch.uint8),
        wait=lambda: None,
    )
    recorder = Recorder(staging)
    record = CapturedGraph(buffer=SimpleNamespace(nbytes=8, is_cuda=True, data_ptr=lambda: 4711), lasting=True)
    for _ in range(2):
        recorder.open_round(mode="DECODE", rids=["a"], starts=[3])
        recorder.before_replay(record)  # the round before kept it, and that is over
        recorder.replayed(record, ("VERIFY", "DRAFT"), {"step": 0})
        recorder.close_round()
    assert launched == [[4711], [4711]]
    recorder.open_round(mode="DECODE", rids=["a"], starts=[3])
    recorder.replayed(record, ("VERIFY", "DRAFT"), {"step": 0})
    assert len(launched) == 2
    recorder.before_replay(record)
    recorder.replayed(record, ("VERIFY", "DRAFT"), {"step": 1})
    assert len(launched) == 3
    recorder.close_round()
    assert len(launched) == 4


def test_buffers_last_where_there_is_room_for_them(monkeypatch):
    def closed(arena, values):
        record = CapturedGraph()
        data = torch.tensor(values)
        record.put("forward", is_draft=True, batch=1, copies=(copied({"x": data}),))
        record.close(arena)
        return record

    monkeypatch.setattr(captured_graph, "ARENA_BYTES", 300)
    arena = Arena("cpu")
    records = [closed(arena, values) for values in ([1, 2], [3, 4], [5, 6, 7, 8, 9, 10])]
    assert [record.lasting for record in records] == [True, True, False]
    assert [record.buffer.view(torch.int64).tolist() for record in records] == [[1, 2], [3, 4], [5, 6, 7, 8, 9, 10]]
    assert not closed(None, [1]).lasting


def test_what_is_compiled_of_a_model_is_the_model_alone():
    """torch.compile is given one graph of what SGLang wrote, and the copies around it are made as ever.

    A capture after its warm-up compiles nothing more: torch refuses that.
    """
    found = []

    def backend(module, _inputs):
        found.append([node.target for node in module.graph.nodes if node.op.startswith("call")])
        return module.forward

    probe = GraphProbe()
    keep_from_compiling(probe)
    forward = probe._beside_compiler(Model().forward, SimpleNamespace(is_draft_worker=True))
    batch = batch_of([3, 4], [7, 9], size=2)
    given = torch.tensor([3, 4]), batch.positions, batch
    compiled = torch.compile(torch.no_grad()(forward), backend=backend)
    compiled(*given)
    probe._open = CapturedGraph()
    forward(*given)
    assert not probe.compiled
    with torch.compiler.set_stance("fail_on_recompile"):
        compiled(*given)
    assert probe.compiled
    assert len(found) == 1
    assert torch.cat not in found[0]
    assert [call.what for call in probe._open.calls] == ["forward", "forward"]
