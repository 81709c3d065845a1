"""A hierarchical cache: what the probe says of its copies, what checks make of that, and the points it proves."""

import threading
import time
from dataclasses import replace
from queue import Empty, Queue
from types import SimpleNamespace

import pytest
import torch

from cases.meta import handmade
from cases.meta.batches import decode, prefill, record, trace
from harness.checks.evidence import gather
from harness.checks.registry import CHECKS, run_check
from harness.contract.rows import RowBuilder
from harness.contract.trace import Event
from harness.coverage import POINTS, Where, names
from harness.engine_side.hooks import HookRegistry
from harness.engine_side.host.scheduler_state import COPIES, being_copied
from harness.engine_side.mutants import acts_cache  # noqa: F401  (importing it makes its acts known)
from harness.engine_side.mutants.registry import ACTS, Context
from harness.engine_side.probes.cached_rows import CachedRows
from harness.engine_side.probes.host_probe import HostProbe
from harness.engine_side.probes.recorder import Recorder
from harness.engine_side.replacement_kernels import cpu_hicache
from reference.engine_view import EngineView


def copied(round_, what, host, device, rid="", storage=(), **more):
    data = {"round": round_, "what": what, "rid": rid, "host": host, "device": device, "storage": list(storage), **more}
    return Event(name="host", scheduler_step=round_, data=data)


def test_the_reference_sees_when_rows_that_came_back_had_left_by_way_of_storage_too():
    events = (
        copied(1, "stored", [0, 1, 2], [5, 6, 7]),
        copied(2, "kept", [1, 2], [], storage=[0, 1]),
        copied(3, "stored", [1, 2], [5, 6]),
        copied(4, "fetched", [3], [], storage=[0]),
        copied(5, "loaded", [0, 3, 2], [8, 9, 10], "r1"),
    )
    view = EngineView(trace(record(5, "PREFILL", [("r1", 0, 3, 4, True)]), events=events), GIVEN.spec, 512)
    assert view.from_host(view.attempts("r1")[0][0]) == (1, 1, 3)


# Points

GIVEN = handmade.scenario(prompts=(4, 6), chunk=4, max_new_tokens=5)
HIT = (prefill(0, ("r1", 4, 1, False)), prefill(1, ("r1", 5, 1, True)))
LOADED = copied(0, "loaded", [0, 1], [7, 8], "r1")
EVERYTHING = copied(0, "loaded", [0, 1, 2, 3], [6, 7, 8, 9], "r1")


#: (point, the rounds of a trace, an event with which they show it, and the nearest with which they do not).
SHOWN = [
    ("host_written_back", HIT, copied(0, "stored", [0, 1], [7, 8]), LOADED),
    ("host_hit", HIT, LOADED, copied(0, "loaded", [0, 1], [7, 8], "r0")),
    ("host_hit", HIT, copied(0, "loaded", [], [], "r1", windows=2), copied(0, "loaded", [], [], "r1", windows=0)),
    ("host_hit_in_windows", HIT, copied(0, "loaded", [], [], "r1", windows=2), LOADED),
    ("host_hit_in_chunks", HIT, LOADED, copied(0, "stored", [0, 1], [7, 8])),
    ("host_hit_in_part", HIT, copied(0, "loaded", [], [], "r1", windows=2), EVERYTHING),
    ("host_hit_in_part", HIT, LOADED, EVERYTHING),
    (
        "host_hit_retracted",
        (prefill(0, ("r1", 0, 6, True)), decode(1, ("r1", 6, 1)), record(2, "PREFILL", [("r1", 1, 4, 3, True)])),
        copied(2, "loaded", [0, 1], [7, 8], "r1"),
        copied(0, "loaded", [0, 1], [7, 8], "r1"),
    ),
]


@pytest.mark.parametrize(("name", "rounds", "shows", "lacks"), SHOWN)
def test_points_of_the_host_are_counted_where_they_happen(name, rounds, shows, lacks):
    counts = [POINTS[name].count(GIVEN, trace(*rounds, events=(event,))) for event in (shows, lacks)]
    assert counts == [1, 0]


@pytest.mark.parametrize(
    ("before", "count"),
    [([("fetched", [1])], 1), ([("fetched", [2])], 0), ([("fetched", [1]), ("stored", [1])], 0), ([("kept", [1])], 0)],
)
def test_rows_are_of_storage_while_nothing_else_went_to_their_slots_of_the_host(before, count):
    events = [copied(0, what, host, [7] * len(host), storage=[5]) for what, host in before]
    made = trace(*HIT, events=(*events, LOADED))
    assert POINTS["storage_hit"].count(GIVEN, made) == count


def test_every_point_of_the_host_is_shown_here():
    assert {"storage_hit", *(name for name, *_ in SHOWN)} == set(names(Where.HOST))


# Rows


def buffers(slots=6):
    return torch.arange(slots * 4, dtype=torch.float32).reshape(slots, 2, 2), torch.zeros(slots, 2, 2)


def changed(rows, pool, written, read):
    return rows.changed(pool, torch.tensor(written), torch.tensor(read)).tolist()


@pytest.mark.parametrize(("loads", "found"), [(1, False), (2, True), (None, True)])
def test_a_row_from_the_host_must_be_the_one_that_was_stored(loads, found):
    """Slot 1 goes to host slot 40 and comes back in slot 4; loads: what really arrives there, None for nothing."""
    pool, rows = buffers(), CachedRows()
    changed(rows, pool, [1, 2, 4], [1])
    rows.copied("device", torch.tensor([1]), "host", torch.tensor([40]))
    if loads is not None:
        pool[0][4] = pool[0][loads].clone()
    rows.copied("host", torch.tensor([40]), "device", torch.tensor([4]))
    assert changed(rows, pool, [5], [4]) == [found]


def test_of_what_was_never_stored_nothing_is_known_after_it_was_loaded():
    pool, rows = buffers(), CachedRows()
    changed(rows, pool, [1], [1])
    nothing = torch.tensor([], dtype=torch.int64)
    rows.copied("device", nothing, "host", nothing)
    rows.copied("device", torch.tensor([2]), "host", torch.tensor([3]))
    rows.copied("host", torch.tensor([3]), "device", torch.tensor([1]))
    pool[0][1] += 1
    assert changed(rows, pool, [5], [1]) == [False]


# The check

ALIKE = handmade.scenario(prompts=(4, 4), chunk=8, max_new_tokens=3)
ALIKE = ALIKE.model_copy(
    update={
        "requests": tuple(
            one.model_copy(update={"input_ids": (7, 8, 9, 3 + i)}) for i, one in enumerate(ALIKE.requests)
        )
    }
)


def hit(*, stored=(0, 1, 2), loaded=(10, 11, 12), layers=2, between=()):
    """r0's prompt in slots 0 to 3, of which three go to the host, then r1 behind them, in slots 20 to 22.

    between: copies on the host and to and from storage, before rows are loaded.
    """
    rows = RowBuilder()
    for slot in range(4):
        rows.add(rid="r0", phase="PREFILL", slot=slot, committed=0, round=0, cache_slot=slot)
        for layer in range(layers):
            rows.add(rid="r0", phase="DRAFT_PREFILL", slot=slot, committed=0, round=0, step=layer, cache_slot=slot)
    rows.add(rid="r1", phase="DRAFT_PREFILL", slot=0, committed=3, round=1, step=layers - 1, cache_slot=23)
    rows.add(rid="r1", phase="PREFILL", slot=0, committed=3, round=1, cache_slot=23)
    events = (
        copied(1, "stored", [10, 11, 12], list(stored)),
        *between,
        copied(1, "loaded", list(loaded), [20, 21, 22], "r1"),
    )
    made = trace(prefill(0, ("r0", 0, 4, True)), prefill(1, ("r1", 3, 1, True)), events=events)
    return run_check(CHECKS["host"], gather(ALIKE, replace(made, rows=rows.build()), None))


def test_rows_of_the_same_tokens_from_the_host_are_the_prefix_of_whoever_needs_them():
    result = hit()
    assert (result.divergences, result.compared) == ([], {"host_rows": 9})


@pytest.mark.parametrize(
    ("facts", "expected", "observed"),
    [
        ({"stored": (0, 1, 3)}, "position 2 in the {} pool, loaded to slot 22", "position 3 of request r0, and 0 more"),
        ({"stored": (1, 2, 3)}, "position 0 in the {} pool, loaded to slot 20", "position 1, and 2 more"),
        ({"loaded": (10, 11, 40)}, "position 2 in the {} pool, loaded to slot 22", "nobody wrote it, and 0 more"),
    ],
)
def test_other_rows_from_the_host_are_named_pool_by_pool(facts, expected, observed):
    found = hit(**facts).divergences
    assert [one.expected for one in found] == [expected.format(pool) for pool in ("target", "draft 0", "draft 1")]
    assert {one.observed for one in found} == {f"{observed} that are not its own"}
    assert {(one.kind, one.key.rid, one.key.phase) for one in found} == {("CACHE_SLOT", "r1", "PREFILL")}


@pytest.mark.parametrize(("back", "observed"), [((0, 1, 2), []), ((0, 2, 1), ["position 2, and 1 more"] * 3)])
def test_rows_may_have_been_in_storage_between(back, observed):
    """What the host has is kept, its rows are overwritten, and read back to slots 40 to 42."""
    between = (
        copied(1, "kept", [10, 11, 12], [], storage=[0, 1, 2]),
        copied(1, "stored", [10, 11, 12], [3, 3, 3]),
        copied(1, "fetched", [40, 41, 42], [], storage=back),
    )
    found = hit(between=between, loaded=(40, 41, 42)).divergences
    assert [one.observed for one in found] == [f"{said} that are not its own" for said in observed]


# The probe


class Controller:
    """As SGLang's: queues that are emptied where copying begins."""

    def __init__(self):
        self.write_queue, self.load_queue = [], []

    def start_writing(self):
        self.write_queue.clear()

    def start_loading(self):
        self.load_queue.clear()


class Tree:
    def __init__(self, controller):
        self.controller = controller

    def init_load_back(self, params):
        self.controller.load_queue.append(operation([7], [2], windows=3))


def operation(host, device, windows=0):
    """windows: rows of a pool of its own that go with it."""
    beside = SimpleNamespace(name="swa", device_indices=torch.arange(windows))
    device = torch.tensor(device, dtype=torch.int64)
    return SimpleNamespace(host_indices=torch.tensor(host), device_indices=device, pool_transfers=[beside])


def test_the_probe_tells_in_the_next_round_what_was_copied_and_for_whom():
    recorder, controller, hooks = Recorder(), Controller(), HookRegistry()
    tree = Tree(controller)
    HostProbe(recorder, controller, tree, None).install(hooks)
    recorder.begin()
    recorder.active = True
    controller.write_queue.append(operation([0, 1], [4, 5]))
    controller.start_writing()
    tree.init_load_back(SimpleNamespace(req=SimpleNamespace(rid="b@3")))
    controller.start_loading()
    current = recorder.open_round(mode="PREFILL", rids=["b"], starts=[1], lens=[2])
    assert [one["message"] for one in current.events] == [
        {"ev": "host", "what": "stored", "rid": "", "host": [0, 1], "device": [4, 5], "windows": 0, "round": 0},
        {"ev": "host", "what": "loaded", "rid": "b", "host": [7], "device": [2], "windows": 3, "round": 0},
    ]
    assert not hooks.missing
    recorder.close_round()
    assert recorder.open_round(mode="PREFILL", rids=["b"], starts=[3], lens=[1]).events == []


class Stored(Controller):
    """With storage behind it: threads of its own that read and write, each page a moment long."""

    enable_storage, page_size, mem_pool_host = True, 2, None

    def __init__(self):
        super().__init__()
        self.prefetch_queue, self.prefetch_buffer, self.backup_queue = Queue(), Queue(), Queue()
        self.written, self.read = [], []
        self.works = (
            (self.prefetch_queue, lambda one: self.prefetch_buffer.put(one)),
            (self.prefetch_buffer, lambda one: self._page_transfer(one)),
            (self.backup_queue, self.written.append),
        )
        for queue, work in self.works:
            threading.Thread(target=self._serve, args=(queue, work), daemon=True).start()

    def _serve(self, queue, work):
        while (one := self._next(queue)) is not None:
            time.sleep(0.01)
            work(one)

    def _next(self, queue):
        while True:
            try:
                return queue.get(block=True, timeout=0.05)
            except Empty:
                continue

    def write_storage(self, host_indices, token_ids, hash_value, prefix_keys):
        self.backup_queue.put(hash_value)

    def _page_transfer(self, operation):
        self.read.append(operation.hash_value)

    def end(self):
        for queue, _ in self.works:
            queue.put(None)


class StoredTree(Tree):
    def check_prefetch_progress(self, rid):
        return list(self.controller.read)

    def clear_storage_backend(self):
        self.controller.written.clear()


@pytest.fixture
def storage():
    controller, hooks, recorder = Stored(), HookRegistry(), Recorder()
    tree = StoredTree(controller)
    probe = HostProbe(recorder, controller, tree, None)
    probe.install(hooks)
    assert not hooks.missing
    recorder.begin()
    recorder.active = True
    yield SimpleNamespace(controller=controller, tree=tree, probe=probe, recorder=recorder)
    controller.end()


def fetch(name, host):
    return SimpleNamespace(host_indices=torch.tensor(host), hash_value=[name], is_terminated=lambda: name == "x")


def test_a_step_begins_when_the_threads_of_storage_wait_for_work(storage):
    """Before that, one of them has taken nothing yet, the other is busy, and what it leads to is still to come."""
    controller = storage.controller
    controller.write_storage(torch.tensor([4, 5, 8, 9]), [1, 2, 3, 4], ["p", "q"], None)
    storage.probe.settle()
    assert controller.written == [["p", "q"]]
    for name, host in (("q", [0, 1]), ("x", [2, 3])):
        controller.prefetch_queue.put(fetch(name, host))
    assert storage.tree.check_prefetch_progress("a") == [["q"], ["x"]]
    current = storage.recorder.open_round(mode="PREFILL", rids=["b"], starts=[1], lens=[2])
    same = {"ev": "host", "rid": "", "device": [], "round": 0}
    assert [one["message"] for one in current.events] == [
        {**same, "what": "kept", "host": [4, 5, 8, 9], "storage": [0, 1, 2, 3]},
        {**same, "what": "fetched", "host": [0, 1], "storage": [2, 3]},
    ]
    storage.probe.forget()
    assert controller.written == []


@pytest.mark.parametrize(("waiting", "held"), [("ack_write_queue", 5), ("load_queue", 5), ("", 0)])
def test_rows_that_are_still_copied_are_the_caches_and_locked_ones_that_are_not_are_lost(waiting, held):
    controller = SimpleNamespace(**{name: [1] if name == waiting else [] for name in COPIES})
    cache = SimpleNamespace(cache_controller=controller, protected_size=lambda: 5, swa_protected_size=lambda: 7)
    assert (being_copied(cache), being_copied(cache, pool="swa_")) == (held, held and 7)
    assert being_copied(SimpleNamespace(cache_controller=None)) == being_copied(SimpleNamespace()) == 0


# Mutants


@pytest.mark.parametrize(
    ("act", "args", "expected"),
    [
        ("rows_left_out", {}, ([], [])),
        ("rows_left_out", {"rows": "first"}, ([6, 7], [2, 3])),
        ("one_page_off", {}, ([6, 7, 4, 5], [0, 1, 2, 3])),
        ("layer_before", {}, ([4, 5, 6, 7], [0, 1, 2, 3])),
        ("page_before", {}, ([2, 3, 4, 5], [0, 1, 2, 3])),
    ],
)
def test_what_mutants_make_of_a_copy_in_pages_of_two(act, args, expected):
    for draft in (False, True):
        values = {"host": torch.arange(4, 8), "device": torch.arange(4), "layer": torch.tensor(2)}
        values["draft"] = torch.tensor(draft)
        made = values | ACTS[act](Context(args={**args, "of": "draft"}, memory={}, page=2), values)
        kept = ([4, 5, 6, 7], [0, 1, 2, 3])
        assert (made["host"].tolist(), made["device"].tolist()) == (expected if draft else kept)
        assert int(made["layer"]) == 2 - (draft and act == "layer_before")


# Replacement kernels


def test_rows_go_to_host_pages_and_back_layer_by_layer():
    pages, layers, size = 3, 2, 4
    device = [torch.randn(12, 1, 2) for _ in range(2 * layers)]  # keys of both layers, then values
    host = [torch.zeros(pages, layers, size, 1, 2) for _ in range(2)]
    there, here = torch.arange(4, 12), torch.arange(8)
    cpu_hicache.store_layers_in_pages(device, host, here, there, size)
    for layer in range(layers):
        back = [torch.zeros(12, 1, 2) for _ in range(2)]
        cpu_hicache.load_layer_of_pages(host, back, there, here, layer, size)
        assert torch.equal(back[0][:8], device[layer][:8])
        assert torch.equal(back[1][:8], device[layers + layer][:8])
    back = [torch.zeros(12, 1, 2)]
    cpu_hicache.transfer_rows([device[0]], back, torch.tensor([3, 1]), torch.tensor([0, 9]), 1)
    assert torch.equal(back[0][[0, 9]], device[0][[3, 1]])
    assert not back[0][1:9].any()
