"""Drafts that were drawn: from what, by an EAGLE head and by layers, and what a hand-over carries of it."""

import numpy as np
import pytest

from cases.checkpoints import make
from cases.meta.batches import lone_part
from harness.contract.rows import RowBuilder
from harness.contract.settings import SpecConfig
from harness.contract.trace import Trace
from reference.draft import Forced
from reference.engine_view import Conditions, EngineView
from reference.head_drafts import HeadDrafts
from reference.layer_drafts import LayerDrafts
from reference.pairs import load_pair
from reference.rows import Writer
from reference.timeline import RequestTimeline

TEXT = [5, 17, 130, 42, 9, 77]
CHAIN = {
    "eagle-tiny": (HeadDrafts, SpecConfig()),
    "mtp-tiny": (LayerDrafts, SpecConfig(algorithm="MTP", num_steps=3, num_draft_tokens=4)),
}


@pytest.mark.parametrize("handed", [False, True])
@pytest.mark.parametrize("name", CHAIN)
def test_each_token_has_the_distribution_that_it_was_drawn_from(name, handed, tmp_path):
    kind, spec = CHAIN[name]
    pair = make(name, tmp_path)
    _, head = load_pair(pair.target, pair.draft)
    c = len(TEXT) - 1
    nothing = Trace(side="reference", scenario_id="", header={}, rows=RowBuilder().build())
    parts = [(lone_part("PREFILL", start=0, length=c, final=True), (TEXT[-1],))]
    parts += [(lone_part("PREBUILT", index=c, start=c, length=0, final=False), ())] if handed else []
    timeline = RequestTimeline(tokens=list(TEXT), parts=parts)
    drafts = kind(head, spec, timeline, EngineView(nothing, spec, head.target.vocab), temperature=0.7)
    round_ = (lone_part("DECODE", index=c, start=c, length=1, final=False), Conditions(forced=Forced(first=(7,))))
    ((tree, drafted),) = drafts.trees(Writer(), [round_])
    assert drafted.shape == (3, head.target.vocab)
    assert drafted.sum(axis=1) == pytest.approx(np.ones(3))
    carried = [row.max() == 1.0 and row.argmax() == token for row, token in zip(drafted, tree.tokens[1:], strict=True)]
    assert carried == [handed, handed and name == "mtp-tiny", handed and name == "mtp-tiny"]
