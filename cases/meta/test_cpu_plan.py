"""F-011 taken for granted: who is asked to plan, on which releases, and under which name it stands in the header."""

from types import SimpleNamespace

import pytest

from cases.families import FAMILIES
from harness.both_sides import compat
from harness.contract.known_issues import notes, without_effect
from harness.contract.settings import EngineConfig, SpecConfig
from harness.engine_side.hooks import ImportHooks
from harness.engine_side.replacement_kernels.cpu_ops import CpuOps
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
    ops._patch_unplanned(module, "mark_forward_metadata_ready")
    batch = module.ForwardBatch()
    batch.mark_forward_metadata_ready(replan_equivalent=True)
    assert not batch.ready
    (entry,) = ops.describe()
    assert entry["operation"] == "srt.batches.ForwardBatch.mark_forward_metadata_ready"
    assert entry["by"] == "stand-in"
    assert entry["reason"].startswith("assumed F-011: ")


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
