"""A hierarchical cache: what the probe says of its copies, what checks make of that, and the points it proves."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from cases.meta import handmade
from cases.meta.test_coverage_points import decode, prefill, trace
from harness.checks.evidence import gather
from harness.checks.registry import CHECKS, run_check
from harness.contract.trace import Event
from harness.coverage import POINTS, Where, names
from harness.engine_side.hooks import HookRegistry
from harness.engine_side.probes.cached_rows import CachedRows
from harness.engine_side.probes.host_probe import HostProbe
from harness.engine_side.probes.recorder import Recorder
from harness.engine_side.replacement_kernels import cpu_hicache


def copied(round_, what, host, device, rid=""):
    return Event(
        name="host",
        scheduler_step=round_,
        data={"round": round_, "what": what, "rid": rid, "host": host, "device": device},
    )


# Points

GIVEN = handmade.scenario(prompts=(4, 6), chunk=4, max_new_tokens=5)
HIT = (prefill(0, ("r1", 4, 1, False)), prefill(1, ("r1", 5, 1, True)))
LOADED = copied(0, "loaded", [0, 1], [7, 8], "r1")


@pytest.mark.parametrize(
    ("name", "rounds", "shows", "lacks"),
    [
        ("host_written_back", HIT, copied(0, "stored", [0, 1], [7, 8]), LOADED),
        ("host_hit", HIT, LOADED, copied(0, "loaded", [0, 1], [7, 8], "r0")),
        ("host_hit_in_chunks", HIT, LOADED, copied(0, "stored", [0, 1], [7, 8])),
        ("host_hit_in_part", HIT, LOADED, copied(0, "loaded", [0, 1, 2, 3], [6, 7, 8, 9], "r1")),
        (
            "host_hit_retracted",
            (prefill(0, ("r1", 0, 6, True)), decode(1, ("r1", 6, 1)), prefill(2, ("r1", 4, 3, True), attempt=1)),
            copied(2, "loaded", [0, 1], [7, 8], "r1"),
            copied(0, "loaded", [0, 1], [7, 8], "r1"),
        ),
    ],
)
def test_points_of_the_host_are_counted_where_they_happen(name, rounds, shows, lacks):
    counts = [POINTS[name].count(GIVEN, trace(*rounds, events=(event,))) for event in (shows, lacks)]
    assert counts == [1, 0]


def test_every_point_of_the_host_is_shown_here():
    cases = test_points_of_the_host_are_counted_where_they_happen.pytestmark[0].args[1]
    assert {case[0] for case in cases} == set(names(Where.HOST))


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
    rows.stored(torch.tensor([40]), torch.tensor([1]))
    if loads is not None:
        pool[0][4] = pool[0][loads].clone()
    rows.loaded(torch.tensor([40]), torch.tensor([4]))
    assert changed(rows, pool, [5], [4]) == [found]


def test_of_what_was_never_stored_nothing_is_known_after_it_was_loaded():
    pool, rows = buffers(), CachedRows()
    changed(rows, pool, [1], [1])
    rows.stored(torch.tensor([3]), torch.tensor([2]))
    rows.loaded(torch.tensor([3]), torch.tensor([1]))
    pool[0][1] += 1
    assert changed(rows, pool, [5], [1]) == [False]


# The check

PROMPTS = handmade.scenario(prompts=(4, 4), chunk=8, max_new_tokens=3)


def hit(made, *, loaded, stored=(3, 4, 5)):
    """r1 as if the first three tokens of its prompt, those of r0, had come from the host; stored: slots of r0."""
    rounds = [record for record in made.rounds if "r1" in record.rids]
    first = rounds[0].index
    events = (copied(first, "stored", [10, 11, 12], list(stored)), copied(first, "loaded", *loaded, "r1"))
    return replace(made, events=(*made.events, *events))


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
        self.controller.load_queue.append(operation([7], [2]))


def operation(host, device):
    return SimpleNamespace(host_indices=torch.tensor(host), device_indices=torch.tensor(device))


def test_the_probe_tells_in_the_next_round_what_was_copied_and_for_whom():
    recorder, controller, hooks = Recorder(), Controller(), HookRegistry()
    tree = Tree(controller)
    HostProbe(recorder, controller, None).install(hooks, tree)
    recorder.begin()
    recorder.active = True
    controller.write_queue.append(operation([0, 1], [4, 5]))
    controller.start_writing()
    tree.init_load_back(SimpleNamespace(req=SimpleNamespace(rid="b@3")))
    controller.start_loading()
    current = recorder.open_round(mode="PREFILL", rids=["b"], starts=[1], lens=[2])
    assert [one["message"] for one in current.events] == [
        {"ev": "host", "what": "stored", "rid": "", "host": [0, 1], "device": [4, 5], "round": 0},
        {"ev": "host", "what": "loaded", "rid": "b", "host": [7], "device": [2], "round": 0},
    ]
    assert not hooks.missing
    recorder.close_round()
    assert recorder.open_round(mode="PREFILL", rids=["b"], starts=[3], lens=[1]).events == []


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
    assert torch.equal(back[0][[0, 9]], device[0][[3, 1]]) and not back[0][1:9].any()
