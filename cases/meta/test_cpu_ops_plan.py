"""F-011 and F-091 taken for granted: who plans for which batch, where, and under which name it stands in the header."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from cases.families import FAMILIES
from harness.both_sides import compat
from harness.contract.known_issues import notes, without_effect
from harness.contract.settings import EngineConfig, SpecConfig
from harness.engine_side.hooks import ImportHooks
from harness.engine_side.replacement_kernels.cpu_ops import EVERYWHERE, KERNELS, CpuOps
from harness.engine_side.replacement_kernels.patches import PATCHES
from harness.night.cells import Cell

LAYERS = SpecConfig(algorithm="MTP", num_steps=3, num_draft_tokens=4)
ASSUMED = {"assumed": ["F-011"]}


class Batch:
    """As of 0.5.13: marked batches are not planned for again."""

    ready = False

    def mark_forward_metadata_ready(self, replan_equivalent=False):
        self.ready = True


def test_a_marked_batch_is_planned_for_all_the_same_and_the_header_names_what_does_it():
    module = SimpleNamespace(__name__="srt.batches", ForwardBatch=type("ForwardBatch", (Batch,), {}))
    before = module.ForwardBatch()
    before.mark_forward_metadata_ready()
    assert before.ready
    ops = CpuOps(ImportHooks())
    ops._apply("unplanned", "mark_forward_metadata_ready", "torch")(module)
    batch = module.ForwardBatch()
    batch.mark_forward_metadata_ready(replan_equivalent=True)
    assert not batch.ready
    (entry,) = ops.describe()
    assert entry["operation"] == "srt.batches.ForwardBatch.mark_forward_metadata_ready"
    assert entry["by"] == "stand-in"
    assert entry["reason"].startswith("assumed F-011: ")


@dataclass
class Rows:
    """As a forward pads them, in place."""

    count: int


class Runner:
    def forward(self, batch):
        batch.count += 2
        return batch.count


class Worker:
    """As of 0.5.23: every layer is given the batch that the one before has padded."""

    def __init__(self):
        self.draft_runner_list = [Runner(), Runner(), Runner()]

    def _draft_extend_for_decode(self, batch):
        return [runner.forward(batch) for runner in self.draft_runner_list]


def test_each_layer_is_given_a_batch_of_its_own_and_logits_of_every_row():
    asked = SimpleNamespace(num_tokens_per_req=4, num_tokens_for_logprob_per_req=1)
    module = SimpleNamespace(__name__="srt.layers", prepare_for_draft_extend=lambda one: one)
    module.Draft = type("Draft", (Worker,), {})
    assert module.Draft()._draft_extend_for_decode(Rows(3)) == [5, 7, 9]
    ops = CpuOps(ImportHooks())
    ops._apply("layer_batches", "Draft", "torch")(module)
    worker, batch = module.Draft(), Rows(3)
    assert worker._draft_extend_for_decode(batch) == [5, 5, 5]
    assert batch == Rows(3)
    assert worker.draft_runner_list[0].forward(Rows(1)) == 3
    assert module.prepare_for_draft_extend(asked).num_tokens_for_logprob_per_req == 4
    (entry,) = ops.describe()
    assert (entry["by"], entry["operation"]) == ("stand-in", "srt.layers.Draft._draft_extend_for_decode")
    assert entry["reason"].startswith("assumed F-091: ")


@pytest.mark.parametrize(
    ("version", "has_it"),
    [("0.5.11", 0), ("0.5.12.post1", 0), ("0.5.13", 1), ("0.5.15.post1", 1), ("0.5.16", 0), ("0.5.23", 0)],
)
def test_only_releases_that_plan_too_little_have_it_and_only_with_layers(version, has_it):
    release = compat.lookup(version, overlap=True)
    assert bool(compat.multi_layer(release).plan_patches) == has_it
    assert release.plan_patches == ()
    assert bool(notes(ASSUMED, LAYERS, release=version)) == has_it
    vain = without_effect(["F-011"], [(LAYERS, EngineConfig())], release=version)
    assert ["0.5.13 to 0.5.15.post1" in line for line in vain] == [True] * (1 - has_it)


def test_graphs_plan_for_themselves_and_a_chain_has_no_layers():
    assert notes(ASSUMED, LAYERS, EngineConfig(cuda_graph=True), release="0.5.13") == []
    assert notes(ASSUMED, SpecConfig(num_steps=3, num_draft_tokens=4), release="0.5.13") == []


@pytest.mark.parametrize(("engine", "assumed"), [("0.5.13", ("F-010", "F-011")), ("0.5.23", ("F-010",))])
def test_a_cell_of_a_night_assumes_only_what_its_release_has(engine, assumed):
    cell = Cell(engine=engine, kind="generated", name="mtp/layers", assumes=("F-010", "F-011"))
    assert cell.assumed_for(FAMILIES["mtp"].scenarios[0]) == assumed


def test_every_patch_of_a_release_is_one_that_there_is():
    rows = [*EVERYWHERE, *(patch for row in compat.RELEASES for patch in (*row.patches, *row.dp_patches))]
    rows += [patch for group in compat.PATCHES.values() for patch in group]
    assert {what for _, what, _ in rows} == {*PATCHES, *KERNELS, "attention"}
