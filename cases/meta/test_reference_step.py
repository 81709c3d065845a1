"""The chained MTP reference against Hugging Face's Step-3.7 text model, whose layers are Step-3.5's.

HF has the target, and an MTP layer that joins token and state before a decoder layer; the chain between layers is
written out here window by window, with HF's own KV cache, in the order rows would really run.
"""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import DynamicCache
from transformers.modeling_layers import MtpLayer
from transformers.models.step3p7.configuration_step3p7 import Step3p7TextConfig
from transformers.models.step3p7.modeling_step3p7 import (
    Step3p7DecoderLayer,
    Step3p7RMSNorm,
    Step3p7RotaryEmbedding,
    Step3p7TextModel,
)

from cases.checkpoints import RECIPES, make_recipe
from cases.step_weights import LAYERS
from harness.contract.types import Phase, RequestSpec, SpecConfig
from reference import mtp
from reference.checkpoint import CheckpointError
from reference.pairs import load_pair
from reference.session import ReferenceSession
from reference.windows import Window, read_depths

torch.set_num_threads(1)

CLOSE = 1e-4
PROMPT = tuple(torch.randint(500, (17,), generator=torch.Generator().manual_seed(7)).tolist())
K = 3


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return make_recipe(RECIPES["mtp-chained"], tmp_path_factory.mktemp("pairs"))


@pytest.fixture(scope="module")
def session(pair):
    return ReferenceSession(*load_pair(pair.target, pair.draft), SpecConfig(algorithm="MTP", k=K, n=K + 1))


def hf_config(pair):
    raw = json.loads((pair.target / "config.json").read_text())
    raw["sliding_window"] = raw["max_position_embeddings"]  # HF makes that mask even where no layer takes it
    config = Step3p7TextConfig(**{name: value for name, value in raw.items() if name != "model_type"})
    config._attn_implementation = "eager"
    return config


class HfLayers:
    """Every MTP layer as HF's, with a cache of its own; rows come window by window."""

    def __init__(self, pair):
        tensors = load_file(pair.draft / "model.safetensors")
        config = hf_config(pair).get_mtp_config()
        config._attn_implementation = "eager"
        self.rotary = Step3p7RotaryEmbedding(config)
        self.embed, self.layers = tensors["model.embed_tokens.weight"], []
        for index in range(K):
            prefix = f"model.layers.{45 + index}."
            own = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
            head = own.pop("transformer.shared_head.output.weight")
            norm = Step3p7RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
            norm.load_state_dict({"weight": own.pop("transformer.shared_head.norm.weight")})
            layer = MtpLayer(config, Step3p7DecoderLayer, Step3p7RMSNorm, 0, use_post_norm=False).eval()
            joins = ("enorm", "hnorm", "eh_proj")
            layer.load_state_dict(
                {name if name.startswith(joins) else f"mtp_block.{name}": value for name, value in own.items()}
            )
            self.layers.append((layer, norm, head, DynamicCache()))

    @torch.no_grad()
    def run(self, index, ids, states):
        """g [rows,h] and logits [rows,V] of the next rows of one layer."""
        layer, norm, head, cache = self.layers[index]
        tokens, past = self.embed[torch.tensor(ids)][None], cache.get_seq_length()
        positions = torch.arange(past, past + len(ids))[None]
        hidden = torch.full((len(ids), past + len(ids)), float("-inf")).triu(past + 1)
        g = layer(
            tokens,
            states[None],
            position_embeddings=self.rotary(tokens, positions, "full_attention"),
            attention_mask=hidden[None, None],
            position_ids=positions,
            cache=cache,
        )[0]
        return g, norm(g) @ head.T


@torch.no_grad()
def test_the_target_equals_hf_and_hands_over_what_its_final_norm_has_not_seen(pair, session):
    hf = Step3p7TextModel(hf_config(pair)).eval()
    weights = load_file(pair.target / "model.safetensors")
    own = {name.removeprefix("model."): value for name, value in weights.items() if name.startswith("model.")}
    hf.load_state_dict({name: own[name] for name in hf.state_dict()})
    seen = []
    hf.norm.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0][0]))
    tokens = torch.tensor(PROMPT)
    theirs = hf(tokens[None]).last_hidden_state[0] @ weights["lm_head.weight"].T
    mine = session.target.forward(tokens)
    assert torch.allclose(mine, seen[0], rtol=0, atol=CLOSE)
    assert torch.allclose(session.target.logits(mine), theirs, rtol=0, atol=CLOSE)


def rows_of(trace, phase, committed, layer):
    ints, phases = trace.rows.ints, trace.rows.strings["phase"]
    picked = [
        i
        for i in range(len(trace.rows))
        if (phases[i], ints["committed"][i], ints["step"][i]) == (phase, committed, layer)
    ]
    return sorted(picked, key=lambda i: ints["slot"][i])


@pytest.mark.parametrize("chunk", [None, 5, 2])
def test_every_layer_reads_what_hfs_layer_before_it_said_window_by_window(pair, session, chunk):
    trace = session.speculate(RequestSpec(rid="a", prompt=PROMPT, max_new_tokens=10), chunk=chunk)
    layers, output = HfLayers(pair), session.generate(PROMPT, 30)
    for record in trace.rounds:
        start, stop = record.starts[0], record.starts[0] + record.lens[0]
        decoded = record.mode == "DECODE"
        text = [*PROMPT, *output]
        known = stop + 1 if decoded or record.final[0] else len(PROMPT)
        states = session.target.forward(torch.tensor(text[:stop]))[start:]
        ids, proposal = text[start:stop], None
        for layer in range(K):
            ahead = stop + layer
            ids = [*ids[1:], text[ahead] if ahead < known else proposal]
            rows = rows_of(trace, Phase.EXTEND if decoded else Phase.DRAFT_PREFILL, start, layer)
            fed = trace.tensors[f"hidden_in.{Phase.EXTEND if decoded else Phase.DRAFT_PREFILL}"]
            mine = torch.as_tensor(fed[trace.rows.ints["hidden_in"][rows]])
            assert torch.allclose(mine, states, rtol=0, atol=CLOSE), (record, layer)
            assert trace.rows.ints["input_id"][rows].tolist() == ids
            states, logits = layers.run(layer, ids, states)  # the next layer reads what this one said
            proposal = int(logits[-1].argmax())
            last = rows[-1]
            assert trace.rows.lists["chosen_ids"][last].tolist() == [proposal]
            said = torch.tensor(trace.rows.lists["top_logits"][last])
            ids_of = torch.tensor(trace.rows.lists["top_ids"][last])
            assert torch.allclose(said, logits[-1][ids_of], rtol=0, atol=CLOSE)
    assert list(trace.ends[0].output_ids) == output[:10]


def test_reading_the_targets_states_instead_would_show(session):
    """A pair in which a missing chain could hide would be useless here."""
    text = torch.tensor([*PROMPT, *session.generate(PROMPT, 40)])
    hidden, windows = session.target.forward(text), [Window(start=0, stop=len(text) - K, known=len(text))]
    chained, _ = read_depths(session.head, text.tolist(), hidden, windows, K)
    loose = mtp.MtpHead(session.head.layers, session.target)
    other, _ = read_depths(loose, text.tolist(), hidden, windows, K)
    for depth in range(1, K):
        says = session.head.layers[depth].logits
        changed = says(chained[depth].g).argmax(-1) != says(other[depth].g).argmax(-1)
        assert changed.float().mean() > 0.1, depth


def test_text_is_lossless_and_every_accept_length_occurs(session):
    lengths = []
    for number in range(4):
        prompt = tuple(torch.randint(500, (9,), generator=torch.Generator().manual_seed(number)).tolist())
        trace = session.speculate(RequestSpec(rid="a", prompt=prompt, max_new_tokens=16))
        assert list(trace.ends[0].output_ids) == session.generate(prompt, 16)
        lengths += [record.lens[0] for record in trace.rounds if record.mode == "DECODE"]
    assert set(lengths) == set(range(1, K + 2))
    assert min(lengths.count(length) for length in set(lengths)) >= 0.03 * len(lengths), lengths


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layer_types": ["sliding_attention"] * (45 + LAYERS)}, "layer_types is "),
        ({"partial_rotary_factors": [0.5] * (45 + LAYERS)}, "partial_rotary_factors is "),
        ({"use_head_wise_attn_gate": False}, "use_head_wise_attn_gate is False; this reference builds only True"),
        ({"swiglu_limits_shared": [7.0] * (45 + LAYERS)}, "swiglu_limits_shared"),
        ({"moe_layers_enum": "3,4"}, r"moe_layers_enum names layers \[3, 4\]; this reference builds no experts"),
        ({"rope_theta": [1e4] * 45 + [5e6] * LAYERS}, "rope_theta"),
        ({"architectures": ["MiMoV2FlashForCausalLM"]}, "architectures is .*expected .*Step3p5ForCausalLM"),
    ],
)
def test_a_target_that_is_more_than_this_is_refused(pair, tmp_path, changes, words):
    place = shutil.copytree(pair.target, tmp_path / "target")
    file = place / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(CheckpointError, match=words):
        mtp.load_step_target(place)


def test_more_steps_than_layers_are_refused(pair):
    with pytest.raises(ValueError, match=f"k is {LAYERS + 1}; this head has {LAYERS} layers"):
        ReferenceSession(*load_pair(pair.target, pair.draft), SpecConfig(algorithm="MTP", k=LAYERS + 1, n=LAYERS + 2))
