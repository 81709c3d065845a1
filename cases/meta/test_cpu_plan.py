"""F-011 taken for granted: who is asked to plan, on which releases, and under which name it stands in the header."""

from types import SimpleNamespace

import pytest

from harness import compat, compat_mtp
from harness.cpu_ops import CpuOps
from harness.cpu_plan import WAYS
from harness.deviations import in_vain, notes
from harness.hooks import ImportHooks
from harness.types import SpecConfig

LAYERS = SpecConfig(algorithm="MTP", k=3, n=4)
ASSUMED = {"assumed": ["F-011"]}


class Batch:
    """As of 0.5.13: marked batches are not planned for again."""

    ready = False

    def mark_forward_metadata_ready(self, replan_equivalent=False):
        self.ready = True


class Runner:
    """As of 0.5.11: each call says whether it plans."""

    def forward(self, forward_batch, skip_attn_backend_init=False, pp_proxy_tensors=None, reinit_attn_backend=False):
        return forward_batch, skip_attn_backend_init, pp_proxy_tensors, reinit_attn_backend


def test_a_marked_batch_is_planned_for_all_the_same():
    module = SimpleNamespace(ForwardBatch=type("ForwardBatch", (Batch,), {}))
    module.ForwardBatch().mark_forward_metadata_ready()
    assert WAYS["marked"](module) == "ForwardBatch.mark_forward_metadata_ready"
    batch = module.ForwardBatch()
    batch.mark_forward_metadata_ready(replan_equivalent=True)
    assert not batch.ready


@pytest.mark.parametrize("how", [((True,), {}), ((), {"skip_attn_backend_init": True}), ((), {})])
def test_a_forward_that_was_told_to_skip_it_plans_and_keeps_all_else(how):
    module = SimpleNamespace(ModelRunner=type("ModelRunner", (Runner,), {}))
    assert WAYS["skipped"](module) == "ModelRunner.forward"
    skip, named = how
    rest = {"pp_proxy_tensors": "stages", "reinit_attn_backend": True}
    assert module.ModelRunner().forward("batch", *skip, **named, **rest) == ("batch", False, "stages", True)


def test_it_is_named_among_our_stand_ins():
    ops = CpuOps(ImportHooks())
    module = SimpleNamespace(__name__="srt.batches", ForwardBatch=type("ForwardBatch", (Batch,), {}))
    ops._seam_unplanned(module, "marked")
    (entry,) = ops.describe()
    assert entry["operation"] == "srt.batches.ForwardBatch.mark_forward_metadata_ready"
    assert entry["by"] == "stand-in"
    assert entry["reason"].startswith("assumed F-011: ")


@pytest.mark.parametrize(
    ("version", "ways"),
    [
        ("0.5.11", ["skipped"]),
        ("0.5.12.post1", ["skipped"]),
        ("0.5.13", ["marked"]),
        ("0.5.15", ["marked"]),
        ("0.5.16", []),
        ("0.5.23", []),
    ],
)
def test_only_releases_that_plan_too_little_have_it_and_only_with_layers(version, ways):
    release = compat.lookup(version, overlap=True)
    assert [way for _, what, way in compat_mtp.multi_layer(release).plan_seams if what == "unplanned"] == ways
    assert release.plan_seams == ()
    told = notes(ASSUMED, LAYERS, dp=1, release=version)
    assert bool(told) == bool(ways)
    vain = in_vain(["F-011"], [(LAYERS, 1)], release=version)
    assert bool(vain) != bool(ways)
    assert all(line.endswith("(it needs MTP layers, SGLang 0.5.15 or older)") for line in vain)


def test_graphs_plan_for_themselves_and_a_chain_has_no_layers():
    assert notes(ASSUMED, LAYERS, dp=1, graphs=True, release="0.5.13") == []
    assert notes(ASSUMED, SpecConfig(k=3, n=4), dp=1, release="0.5.13") == []
