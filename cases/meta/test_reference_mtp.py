"""The multi-layer MTP reference against Hugging Face's MiMo-V2-Flash and Step-3.7, which share no code with it.

HF has the decoder layers but not MiMo's MTP module around them, so the join of token and state is written out here from
the definition, as is the chain between Step's layers. Rows go through HF's layers window by window with HF's own KV
cache, in the order they would really run.
"""

import json
import shutil
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from safetensors.torch import load_file
from transformers import DynamicCache, MiMoV2FlashConfig, MiMoV2FlashForCausalLM, MiMoV2FlashModel
from transformers.modeling_layers import MtpLayer
from transformers.models.step3p7.configuration_step3p7 import Step3p7TextConfig
from transformers.models.step3p7.modeling_step3p7 import (
    Step3p7DecoderLayer,
    Step3p7RMSNorm,
    Step3p7RotaryEmbedding,
    Step3p7TextModel,
)

from cases.checkpoints import make_recipe
from cases.meta.files import edit_json
from cases.meta.sessions import stopped
from cases.meta.speculating import FreeSession
from cases.mtp_weights import MtpRecipe
from cases.pairs import RECIPES
from harness.checks.evidence import gather
from harness.checks.registry import CHECKS, run_check
from harness.contract.requests import RequestSpec
from harness.contract.scenario import Scenario
from harness.contract.script import Op
from harness.contract.settings import EngineConfig, SpecConfig
from harness.contract.types import Kind, Phase
from reference import mtp
from reference.checkpoint import CheckpointError
from reference.departures import ReadsOtherwise
from reference.pairs import load_pair
from reference.windows import Reads, Window, read_depths

CLOSE = {"mimo": 5e-5, "windowed": 5e-5, "step": 1e-4}
PROMPT = tuple(torch.randint(500, (17,), generator=torch.Generator().manual_seed(7)).tolist())
K = 3


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    recipes = {
        "mimo": MtpRecipe(name="layers", seed=3),
        "windowed": RECIPES["mtp-window"],
        "step": RECIPES["mtp-chained"],
    }
    return {kind: make_recipe(recipe, tmp_path_factory.mktemp(kind)) for kind, recipe in recipes.items()}


@pytest.fixture(scope="module")
def sessions(pairs):
    spec = SpecConfig(algorithm="MTP", num_steps=K, num_draft_tokens=K + 1)
    return {kind: FreeSession.of(pair, spec) for kind, pair in pairs.items()}


@pytest.fixture(scope="module")
def pair(pairs):
    return pairs["mimo"]


@pytest.fixture(scope="module")
def session(sessions):
    return sessions["mimo"]


def mimo_config(pair, layers):
    """Of the target, or of one MTP layer (layers 1), which is in a window where the config has one."""
    raw = json.loads((pair.target / "config.json").read_text())
    sliding = raw["hybrid_layer_pattern"] if layers > 1 else [int(raw["sliding_window_size"] > 0)]
    same = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    return MiMoV2FlashConfig(
        **{name: raw[name] for name in same},
        v_head_dim=raw["head_dim"],
        rms_norm_eps=raw["rms_norm_eps"],
        num_hidden_layers=layers,
        layer_types=[("full_attention", "sliding_attention")[one] for one in sliding],
        sliding_window_size=raw["sliding_window_size"],
        mlp_layer_types=["dense"] * layers,
        rope_parameters={
            kind: {"rope_type": "default", "rope_theta": raw["rope_theta"], "partial_rotary_factor": 1.0}
            for kind in ("full_attention", "sliding_attention")
        },
        attention_value_scale=None,
        attn_implementation="eager",
    )


def of_hf(model, weights):
    """MiMo weights for HF's module, whose layers with windows have sinks, and twice as many key heads."""
    found = dict(weights)
    for name in model.state_dict():
        if name.endswith("self_attn.sinks"):
            found[name] = torch.full((4,), -1e9)
            for short in ("k_proj.weight", "v_proj.weight"):
                heads = weights[name.replace("sinks", short)].unflatten(0, (2, 32))
                found[name.replace("sinks", short)] = heads.repeat_interleave(2, dim=0).flatten(0, 1)
    return found


class MimoLayers:
    """Every MTP layer as HF's one-layer model with a cache of its own; rows come window by window."""

    def __init__(self, pair, target):
        tensors = load_file(pair.draft / "model.safetensors")
        self.target, self.models, self.caches, self.parts = target, [], [], []
        for index in range(K):
            prefix = f"model.mtp.layers.{index}."
            own = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
            model = MiMoV2FlashModel(mimo_config(pair, 1)).eval()
            renamed = {"norm.weight": own["final_layernorm.weight"], "embed_tokens.weight": target.embedding}
            for name, value in own.items():
                if name.startswith(("self_attn", "mlp", "input_layernorm", "pre_mlp_layernorm")):
                    name = name.replace("pre_mlp_layernorm", "post_attention_layernorm")
                    renamed[f"layers.0.{name}"] = value
            model.load_state_dict(of_hf(model, renamed))
            self.models.append(model)
            self.caches.append(DynamicCache())
            self.parts.append(own)

    def run(self, layer, ids, hidden):
        """What the next layer reads beside tokens, and logits [rows,V], of the next rows of one layer."""
        own = self.parts[layer]
        token = torch.nn.functional.rms_norm(self.target.embed(torch.tensor(ids)), (64,), own["enorm.weight"], 1e-6)
        state = torch.nn.functional.rms_norm(hidden, (64,), own["hnorm.weight"], 1e-6)
        joined = torch.cat((token, state), dim=-1) @ own["eh_proj.weight"].T
        with torch.no_grad():
            out = self.models[layer](inputs_embeds=joined[None], past_key_values=self.caches[layer], use_cache=True)
        return hidden, out.last_hidden_state[0] @ self.target.head.T


def step_config(pair):
    raw = json.loads((pair.target / "config.json").read_text())
    raw["sliding_window"] = raw["max_position_embeddings"]  # HF makes that mask even where no layer takes it
    config = Step3p7TextConfig(**{name: value for name, value in raw.items() if name != "model_type"})
    config._attn_implementation = "eager"
    return config


class StepLayers:
    """Every MTP layer as HF's, with a cache of its own; rows come window by window."""

    def __init__(self, pair, target):
        tensors = load_file(pair.draft / "model.safetensors")
        config = step_config(pair).get_mtp_config()
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
        """As MimoLayers.run; the next layer reads what this one said, g [rows,h]."""
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


LAYERS = MtpRecipe.draft_layers
LAYERS_OF = {"mimo": MimoLayers, "windowed": MimoLayers, "step": StepLayers}


def rows_of(trace, phase, committed, layer):
    ints, rows = trace.rows.ints, trace.rows
    picked = [
        i
        for i in range(len(rows))
        if rows.strings["phase"][i] == phase and ints["committed"][i] == committed and ints["step"][i] == layer
    ]
    return sorted(picked, key=lambda i: ints["slot"][i])


@pytest.mark.parametrize("kind", ["mimo", "windowed"])
def test_mimos_target_equals_hf(pairs, sessions, kind):
    pair, session = pairs[kind], sessions[kind]
    hf = MiMoV2FlashForCausalLM(mimo_config(pair, 3)).eval()
    weights = load_file(pair.target / "model.safetensors")
    hf.load_state_dict(of_hf(hf, {name: value for name, value in weights.items() if ".mtp." not in name}))
    tokens = torch.tensor(PROMPT)
    with torch.no_grad():
        theirs = hf(tokens[None]).logits[0]
    mine = session.target.logits(session.target.forward(tokens))
    assert torch.allclose(mine, theirs, rtol=0, atol=1e-5)


@torch.no_grad()
def test_steps_target_equals_hf_and_hands_over_what_its_final_norm_has_not_seen(pairs, sessions):
    pair, session = pairs["step"], sessions["step"]
    hf = Step3p7TextModel(step_config(pair)).eval()
    weights = load_file(pair.target / "model.safetensors")
    own = {name.removeprefix("model."): value for name, value in weights.items() if name.startswith("model.")}
    hf.load_state_dict({name: own[name] for name in hf.state_dict()})
    seen = []
    hf.norm.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0][0]))
    tokens = torch.tensor(PROMPT)
    theirs = hf(tokens[None]).last_hidden_state[0] @ weights["lm_head.weight"].T
    mine = session.target.forward(tokens)
    assert torch.allclose(mine, seen[0], rtol=0, atol=CLOSE["step"])
    assert torch.allclose(session.target.logits(mine), theirs, rtol=0, atol=CLOSE["step"])


@pytest.mark.parametrize("kind", CLOSE)
@pytest.mark.parametrize("chunk", [None, 16, 5, 2, 1])
def test_every_layer_reads_and_says_what_hf_says_with_a_cache_window_by_window(pairs, sessions, kind, chunk):
    """Rotation is done literally here: drop the first token of the window, append the next one or the last proposal."""
    session, layers = sessions[kind], LAYERS_OF[kind](pairs[kind], sessions[kind].target)
    trace = session.speculate(RequestSpec(rid="a", input_ids=PROMPT, max_new_tokens=12), chunk=chunk)
    output = session.generate(PROMPT, 30)
    text, ints, windows = [*PROMPT, *output], trace.rows.ints, 0
    for record in trace.rounds:
        start, stop = record.starts[0], record.starts[0] + record.lens[0]
        decoded = record.mode == "DECODE"
        phase, known = Phase.EXTEND if decoded else Phase.DRAFT_PREFILL, stop + 1
        if not decoded and not record.final[0]:
            known = len(PROMPT)
        states = session.target.forward(torch.tensor(text[:stop]))[start:]
        ids, proposal = text[start:stop], None
        for layer in range(K):
            ahead = stop + layer
            ids = [*ids[1:], text[ahead] if ahead < known else proposal]
            rows = rows_of(trace, phase, start, layer)
            fed = torch.as_tensor(trace.tensors[f"hidden_in.{phase}"][ints["hidden_in"][rows]])
            assert torch.allclose(fed, states, rtol=0, atol=CLOSE[kind]), (record, layer)
            assert ints["input_id"][rows].tolist() == ids, (record, layer)
            assert ints["position"][rows].tolist() == list(range(start, stop))
            states, logits = layers.run(layer, ids, states)
            said, last = torch.log_softmax(logits[-1], dim=-1), rows[-1]
            proposal = int(said.argmax())
            assert trace.rows.lists["chosen_ids"][last].tolist() == [proposal], (record, layer)
            mine = torch.tensor(trace.rows.lists["top_logits"][last]) - trace.rows.floats["lse"][last]
            theirs = said[torch.tensor(trace.rows.lists["top_ids"][last])]
            assert torch.allclose(mine, theirs, rtol=0, atol=CLOSE[kind]), (record, layer)
        windows += 1
    assert windows > 4
    assert list(trace.ends[0].output_ids) == output[:12]


class OtherStates(ReadsOtherwise):
    """others: states [K-1,h] by the start of the window behind them."""

    def __init__(self, others):
        super().__init__(Reads())
        self.others = others

    def states_again(self, window, states):
        return self.others[window.start][-len(states) :] if window.start in self.others else states


@pytest.mark.parametrize("stale", [False, True])
def test_rows_that_layers_run_again_say_what_hf_says_with_its_cache_cut_back(pair, session, stale):
    """Layer i goes back i rows; stale: with states that are not the target's, which their keys and values then keep."""
    text = [*PROMPT, *session.generate(PROMPT, 14)]
    hidden, others = session.target.forward(torch.tensor(text)), {}
    windows, layers = [Window(start=0, stop=len(PROMPT), known=len(PROMPT) + 1)], MimoLayers(pair, session.target)
    for number, length in enumerate((2, 1, 4, 1, 3)):
        start = windows[-1].stop
        if stale:
            others[start] = torch.randn(K - 1, hidden.shape[1], generator=torch.Generator().manual_seed(number))
        windows.append(Window(start=start, stop=start + length, known=start + length + 1, again=tuple(range(K))))
    depths, _ = read_depths(session.head, text, hidden, windows, K, OtherStates(others))
    once = read_depths(session.head, text, hidden, [replace(one, again=()) for one in windows], K)[0]
    for window in windows:
        proposals: list[int] = []
        for layer in range(K):
            first = window.start - (layer if window.start else 0)
            read = [row + 1 + layer for row in range(first, window.stop)]
            ids = [text[at] if at < window.known else proposals[at - window.known] for at in read]
            states = hidden[first : window.stop].clone()
            if stale and window.start:
                states[:layer] = others[window.start][K - 1 - layer :]
            if held := layers.caches[layer].get_seq_length() - first:
                layers.caches[layer].crop(-held)
            said = torch.log_softmax(layers.run(layer, ids, states)[1], dim=-1)
            proposals.append(int(said[-1].argmax()))
            assert depths[layer].tokens[window.start : window.stop].tolist() == ids[-(window.stop - window.start) :]
            mine = torch.log_softmax(session.head.layers[layer].logits(depths[layer].g[window.stop - 1]), dim=-1)
            assert torch.allclose(mine, said[-1], rtol=0, atol=5e-5), (window, layer)
    last = windows[-1].stop - 1
    assert torch.equal(depths[0].g, once[0].g), "layer 0 runs nothing again"
    assert not torch.allclose(depths[2].g[last], once[2].g[last], atol=1e-3), "what ran again must matter here"


def test_chained_layers_read_what_the_layer_before_said(session):
    text = [*PROMPT, *session.generate(PROMPT, 4)]
    hidden = session.target.forward(torch.tensor(text))
    windows = [Window(start=0, stop=len(PROMPT), known=len(text))]
    head = mtp.MtpHead(session.head.layers, session.target, chained=True)
    depths, _ = read_depths(head, text, hidden, windows, K)
    assert torch.equal(depths[0].hidden, hidden[: len(PROMPT)])
    assert all(torch.equal(after.hidden, before.g) for before, after in pairwise(depths))
    with pytest.raises(ValueError, match="run rows again are not built here"):
        read_depths(head, text, hidden, [replace(windows[0], again=(0, 1, 2))], K)


def test_where_a_prompt_is_cut_changes_nothing_that_the_prompt_decides(session):
    """Layers read the prompt across a cut; only the last rows of the prompt itself may read proposals."""
    request = RequestSpec(rid="a", input_ids=PROMPT, max_new_tokens=8)
    columns = []
    for chunk in (None, 10, 6):  # each leaves a last chunk of at least K tokens
        trace = session.speculate(request, chunk=chunk)
        ints = trace.rows.ints
        keep = [
            i for i, phase in enumerate(trace.rows.strings["phase"]) if phase in (Phase.DRAFT_PREFILL, Phase.EXTEND)
        ]
        columns.append(
            sorted(zip(*(ints[name][keep].tolist() for name in ("step", "position", "input_id")), strict=True))
        )
    assert columns[0] == columns[1] == columns[2]


def test_replaying_free_speculation_gives_the_same_rows(session):
    request = RequestSpec(rid="a", input_ids=PROMPT, max_new_tokens=12)
    free = session.speculate(request, chunk=5)
    again = session.replay(scenario_of(request, chunk=5), free)
    assert not stopped(again)
    assert named_rows(again) == named_rows(free)


def test_a_hand_over_brings_the_chain_that_the_prompt_ended_with(session):
    request = RequestSpec(rid="a", input_ids=PROMPT, max_new_tokens=12)
    free = session.speculate(request)
    prompt = free.rounds[0]
    handed = replace(prompt, index=100, mode="PREBUILT", starts=(len(PROMPT),), lens=(0,), forwards={})
    rest = tuple(replace(record, index=record.index + 200) for record in free.rounds[1:])
    late = free.rows.ints["round"] > 0
    free.rows.ints["round"][late] += 200
    replayed = session.replay(scenario_of(request, None), replace(free, rounds=(prompt, handed, *rest)))
    assert not stopped(replayed)
    rows = [row for row in named_rows(replayed) if row[0] == "PREBUILT"]
    assert [row for row in named_rows(replayed) if row[0] != "PREBUILT"] == named_rows(free)
    assert {(step, slot): token for _, _, step, slot, token, *_ in rows} == {
        (layer, slot): token
        for layer in range(K)
        for slot, token in enumerate((*PROMPT[1:], free.ends[0].output_ids[0]))
    }
    last = {row[2]: row[-1] for row in rows if row[3] == len(PROMPT) - 1}
    sent = {row[2]: row[-1] for row in named_rows(free) if row[0] == "DRAFT_PREFILL" and row[3] == len(PROMPT) - 1}
    assert last == sent


def named_rows(trace):
    names = ("committed", "step", "slot", "input_id", "position", "parent")
    columns = [trace.rows.ints[name].tolist() for name in names]
    chosen = [ids.tolist() for ids in trace.rows.lists["chosen_ids"]]
    return sorted(zip(trace.rows.strings["phase"].tolist(), *columns, chosen, strict=True))


def scenario_of(request, chunk):
    return Scenario(
        name="layers",
        checkpoint="mtp-tiny",
        spec=SpecConfig(algorithm="MTP", num_steps=K, num_draft_tokens=K + 1),
        engine=EngineConfig(chunked_prefill_size=chunk, radix_cache=False),
        requests=(request,),
        script=(Op(kind="submit", rids=("a",)), Op(kind="drain")),
    )


def faults_of(check, scenario, trace):
    return run_check(CHECKS[check], gather(scenario, trace, None)).divergences


@pytest.mark.parametrize("check", ["inputs", "positions", "rounds", "slots"])
def test_sound_layer_rows_pass_every_check_without_a_reference(session, check):
    request = RequestSpec(rid="a", input_ids=PROMPT, max_new_tokens=12)
    assert faults_of(check, scenario_of(request, 5), session.speculate(request, chunk=5)) == []


def test_guesses_at_a_chunk_tail_are_named_layer_by_layer(session):
    """What SGLang does: the target's guess for layer 0, which then travels left, followed by proposals."""
    request = RequestSpec(rid="a", input_ids=PROMPT, max_new_tokens=4)
    trace = session.speculate(request, chunk=5)
    guess, first = 501, int(trace.rows.lists["chosen_ids"][rows_of(trace, Phase.DRAFT_PREFILL, 0, 0)[-1]][0])
    trace.rows.lists["chosen_ids"][rows_of(trace, Phase.PREFILL, 0, 0)[-1]] = torch.tensor([guess]).numpy()
    inputs = trace.rows.ints["input_id"]
    inputs[rows_of(trace, Phase.DRAFT_PREFILL, 0, 0)[4]] = guess
    inputs[rows_of(trace, Phase.DRAFT_PREFILL, 0, 1)[3]] = guess
    inputs[rows_of(trace, Phase.DRAFT_PREFILL, 0, 1)[4]] = first
    found = faults_of("inputs", scenario_of(request, 5), trace)
    assert [(one.kind, one.key.step, one.key.slot, one.expected, one.hint) for one in found] == [
        (Kind.EXTEND_INPUT, 0, 4, PROMPT[5], "chunk-tail-target-guess"),
        (Kind.EXTEND_INPUT, 1, 3, PROMPT[5], "chunk-tail-target-guess"),
        (Kind.EXTEND_INPUT, 1, 4, PROMPT[6], "chunk-tail-proposal"),
    ]


def test_a_layer_that_did_not_rotate_and_one_that_did_not_run_are_found(session):
    request = RequestSpec(rid="a", input_ids=PROMPT, max_new_tokens=4)
    trace = session.speculate(request)
    shallow, deep = (rows_of(trace, Phase.DRAFT_PREFILL, 0, layer) for layer in (0, 1))
    trace.rows.ints["input_id"][deep] = trace.rows.ints["input_id"][shallow]
    assert {one.hint for one in faults_of("inputs", scenario_of(request, None), trace)} == {"not-rotated", "final-tail"}
    trace.rows.ints["step"][rows_of(trace, Phase.DRAFT_PREFILL, 0, 2)] = 7
    kinds = {one.kind for one in faults_of("rounds", scenario_of(request, None), trace)}
    assert kinds == {Kind.MISSING_ROW, Kind.EXTRA_ROW}


def test_reading_the_targets_states_instead_would_show(sessions):
    """A pair in which a missing chain could hide would be useless here."""
    session = sessions["step"]
    text = torch.tensor([*PROMPT, *session.generate(PROMPT, 40)])
    hidden, windows = session.target.forward(text), [Window(start=0, stop=len(text) - K, known=len(text))]
    chained, _ = read_depths(session.head, text.tolist(), hidden, windows, K)
    loose = mtp.MtpHead(session.head.layers, session.target)
    other, _ = read_depths(loose, text.tolist(), hidden, windows, K)
    for depth in range(1, K):
        says = session.head.layers[depth].logits
        changed = says(chained[depth].g).argmax(-1) != says(other[depth].g).argmax(-1)
        assert changed.float().mean() > 0.1, depth


@pytest.mark.parametrize("kind", CLOSE)
def test_text_is_lossless_and_every_accept_length_occurs(sessions, kind):
    session, lengths = sessions[kind], []
    for number in range(4):
        prompt = tuple(torch.randint(500, (9 + 7 * number,), generator=torch.Generator().manual_seed(number)).tolist())
        trace = session.speculate(RequestSpec(rid="a", input_ids=prompt, max_new_tokens=24))
        assert list(trace.ends[0].output_ids) == session.generate(prompt, 24)
        lengths += [record.lens[0] for record in trace.rounds if record.mode == "DECODE"]
    assert set(lengths) == set(range(1, K + 2))
    assert min(lengths.count(length) for length in set(lengths)) >= 0.03 * len(lengths), lengths


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        ("mimo", {"attention_value_scale": 0.707}, "attention_value_scale is 0.707; this reference builds only None"),
        ("mimo", {"sliding_window_size": 0}, "sliding_window_size is 0 .*\n  allowed: a number of rows"),
        ("windowed", {"hybrid_layer_pattern": [1, 0]}, r"hybrid_layer_pattern \[1, 0\]\n.* 3 entries of 0 or 1"),
        ("mimo", {"hybrid_layer_pattern": [0, 1, 0]}, r"hybrid_layer_pattern is \[0, 1, 0\]"),
        ("mimo", {"moe_layer_freq": [0, 1, 1]}, "moe_layer_freq"),
        ("mimo", {"partial_rotary_factor": 0.334}, "partial_rotary_factor"),
        ("mimo", {"layernorm_epsilon": 1e-5}, "layernorm_epsilon"),
        ("mimo", {"architectures": ["Step3p5ForCausalLM"]}, "architectures"),
        ("step", {"layer_types": ["sliding_attention"] * (45 + LAYERS)}, "layer_types is "),
        ("step", {"partial_rotary_factors": [0.5] * (45 + LAYERS)}, "partial_rotary_factors is "),
        ("step", {"use_head_wise_attn_gate": False}, "use_head_wise_attn_gate is False; .* builds only True"),
        ("step", {"swiglu_limits_shared": [7.0] * (45 + LAYERS)}, "swiglu_limits_shared"),
        ("step", {"moe_layers_enum": "3,4"}, r"moe_layers_enum names layers \[3, 4\]; .* no experts"),
        ("step", {"rope_theta": [1e4] * 45 + [5e6] * LAYERS}, "rope_theta"),
        ("step", {"architectures": ["MiMoV2FlashForCausalLM"]}, "architectures is .*expected .*Step3p5ForCausalLM"),
    ],
)
def test_a_target_that_is_more_than_what_is_built_here_is_refused(pairs, tmp_path, kind, changes, words):
    place = shutil.copytree(pairs[kind].target, tmp_path / "target")
    edit_json(place / "config.json", **changes)
    load = mtp.load_step_target if kind == "step" else mtp.load_mimo_target
    with pytest.raises(CheckpointError, match=words):
        load(place, torch.float32, held=torch.float32, device="cpu")


@pytest.mark.parametrize("kind", CLOSE)
def test_more_steps_than_layers_and_other_drafts_are_refused(pairs, kind):
    models = load_pair(pairs[kind].target, pairs[kind].draft)
    with pytest.raises(ValueError, match=f"k is {LAYERS + 1}; this head has {LAYERS} layers"):
        FreeSession(*models, SpecConfig(algorithm="MTP", num_steps=LAYERS + 1, num_draft_tokens=LAYERS + 2))
    with pytest.raises(ValueError, match="algorithm is 'EAGLE'; the head is made for 'MTP'"):
        FreeSession(*models, SpecConfig())


def test_layers_propose_a_chain_only():
    with pytest.raises(ValueError, match="eagle_topk 2 of MTP, whose layers propose one chain"):
        SpecConfig(algorithm="MTP", num_steps=3, eagle_topk=2, num_draft_tokens=6)
