"""The recurrent states that the reference says a text has, against those that Hugging Face's modules keep of it."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from cases.boots import BY_NAME
from cases.fixed import request
from cases.meta.handmade import asking
from cases.meta.speculating import FreeSession
from harness.both_sides.projections import OF_A_HEAD, OF_A_ROW, weights

#: Of values up to 20: HF computes states in float32 and in chunks.
GREATEST = 2e-4


@pytest.fixture(scope="module", params=["hybrid", "hybrid-tree", "hybrid-dense", "hybrid-mamba", "hybrid-mamba-next"])
def boot(request):
    return BY_NAME[request.param]


@pytest.fixture(scope="module")
def pair(boot, made_pair):
    return made_pair(boot.checkpoint)


@pytest.fixture(scope="module")
def replayed(pair, request_of, boot):
    """A free run as an engine's, and what the reference says of it."""
    scenario = asking(request_of, checkpoint=boot.checkpoint, spec=boot.spec, engine=boot.engine)
    session = FreeSession.of(pair, boot.spec)
    ran = session.speculate(request_of, chunk=8)
    return ran, session.replay(scenario, ran)


@pytest.fixture(scope="module")
def request_of():
    return request("a", 21, seed=3, new=20)


@pytest.fixture(scope="module")
def states_of(pair):
    """Tokens -> what Hugging Face keeps of them, as sums."""
    model = AutoModelForCausalLM.from_pretrained(pair.target, dtype=torch.float32).eval()
    layers = [i for i, kind in enumerate(model.config.layer_types) if kind == "linear_attention"]

    @torch.inference_mode()
    def states(tokens):
        cache = model(torch.tensor([tokens]), use_cache=True).past_key_values
        matrices = torch.stack([cache.get_recurrent_state(i, state_idx=0)[0] for i in layers])  # [L,H,n,v]
        if model.config.model_type == "nemotron_h":
            matrices = matrices.mT
        rows = torch.stack([cache.get_conv_state(i, state_idx=0)[0] for i in layers])[..., 1:]  # [L,C,w]
        of_heads = weights(OF_A_HEAD, matrices[0, 0].numel()).reshape(-1, *matrices.shape[:1:-1])
        return {
            "state": np.einsum("lhkv,pvk->lhp", matrices.numpy(), of_heads).ravel(),
            "conv": np.einsum("lcw,pc->lwp", rows.numpy(), weights(OF_A_ROW, rows.shape[1])).ravel(),
        }

    return states


def test_states_behind_prefixes_and_refused_tokens_are_hugging_faces(replayed, states_of, request_of):
    ran, said = replayed
    (data,) = (event.data for event in said.named("recurrent_rows"))
    text = [*request_of.input_ids, *ran.ends[0].output_ids]
    assert len(data["refused"]) >= 3, "most verifies of this pair refuse something"

    asked = {(tuple(text[:length]), data["first"] + length - 1) for length in (1, 2, 3, 21, 22, 30)}
    for place, row in [(int(place), row) for place, row in data["refused"].items()][:3]:
        asked.add(((*text[:place], _refused(ran, place)), row))
    for tokens, row in asked:
        theirs = states_of(list(tokens))
        for part in ("state", "conv"):
            mine = said.tensors[f"recurrent.{part}"][row]
            assert np.abs(mine - theirs[part]).max() < GREATEST * max(1.0, np.abs(theirs[part]).max()), (part, row)


def _refused(ran, place):
    """The token that hangs behind the last node that was accepted, by the rows of the verify that ended at `place`."""
    ints, phases = ran.rows.ints, ran.rows.strings["phase"]
    start = next(one.starts[0] for one in ran.rounds if one.mode == "DECODE" and one.starts[0] + one.lens[0] == place)
    walked = [ints["parent"][i] for i in np.flatnonzero((phases == "ACCEPT") & (ints["committed"] == start))]
    rows = np.flatnonzero((phases == "VERIFY") & (ints["committed"] == start))
    return next(int(ints["input_id"][i]) for i in rows if ints["parent"][i] == walked[-1])
