"""Random tiny EAGLE and EAGLE-3 heads as they are published, and what Hugging Face's layers say in their place.

Each draws the switches of its kind: names, biases, norms, features, layers, vocabulary, embedding, rotation, sizes.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer

from cases.meta.published import HIDDEN, VOCAB, Raw, common, make_target, randomise, rotated
from reference.attention import Sight
from reference.model import Head

DOUBLE = torch.float64


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """A pair in two folders. says: tokens int64 [T], features [T,w] -> (g [T,h'], logits [T,V']) by Hugging Face.

    layers: whose outputs of the target are features; () is its last state. ids: the target ids of the logits.
    """

    target: Path
    draft: Path
    hf: PreTrainedModel
    says: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    layers: tuple[int, ...] = ()
    ids: Tensor | None = None

    @torch.no_grad()
    def beside(self, head: Head, tokens: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Ours and theirs of features, states and logits of proposable tokens, over tokens int64 [T]."""
        out = self.hf(tokens[None], output_hidden_states=True, use_cache=False)
        chosen = [out.hidden_states[i + 1][0] for i in self.layers] or [out.hidden_states[-1][0]]
        features, rows = torch.cat(chosen, dim=-1)[:-1], len(tokens) - 1
        mine = head.features(head.target.read(tokens, keep=head.states).states)[:-1]
        g, _ = head.forward(tokens[1:], head.enter(mine), torch.arange(rows), Sight.causal(rows))
        theirs, logits = self.says(tokens[1:], features)
        ids = torch.arange(VOCAB) if self.ids is None else self.ids
        return [(mine, features), (g, theirs), (head.logits(g)[:, ids], logits)]


def _layer(raw: Raw, *, biased: bool, out_biased: bool, width: int | None = None) -> tuple[nn.Module, nn.Module]:
    """A decoder layer of Hugging Face's and its rotation; width: what its attention reads, where it is not h."""
    qwen = biased and not out_biased
    raw = raw | {"attention_bias": out_biased, "model_type": "qwen2" if qwen else "llama", "use_sliding_window": False}
    kind = AutoConfig.for_model(**copy.deepcopy(raw))  # which writes into what it is given
    kind._attn_implementation = "eager"
    layer = (Qwen2DecoderLayer if qwen else LlamaDecoderLayer)(kind, 0).to(DOUBLE).eval()
    if width is not None:
        for name in ("q_proj", "k_proj", "v_proj"):
            rows = getattr(layer.self_attn, name).out_features
            setattr(layer.self_attn, name, nn.Linear(width, rows, bias=biased, dtype=DOUBLE))
    for name, tensor in layer.named_parameters():
        randomise(name, tensor.data)
    return layer, LlamaRotaryEmbedding(kind).to(DOUBLE)


def _around(rotary: nn.Module, length: int) -> dict[str, object]:
    """Mask and angles of a causal sequence."""
    mask = torch.full((length, length), float("-inf"), dtype=DOUBLE).triu(1)[None, None]
    return {"attention_mask": mask, "position_embeddings": rotary(mask, torch.arange(length)[None])}


def _stored(name: str, layer: nn.Module) -> dict[str, Tensor]:
    return {f"{name}{key}": value.detach() for key, value in layer.state_dict().items()}


def _write(folder: Path, raw: Raw, tensors: dict[str, Tensor], rng: Random) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(raw))
    own = {name: tensor.clone().contiguous() for name, tensor in tensors.items()}
    if rng.random() < 0.3:
        torch.save(own, folder / "pytorch_model.bin")
    else:
        save_file(own, folder / "model.safetensors")


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return nn.functional.rms_norm(x, weight.shape, weight, 1e-6)


def _draft_config(rng: Random, **more: object) -> Raw:
    raw = rotated(rng, common(rng, model_type="llama", tie_word_embeddings=False, **more))
    del raw["attention_bias"]
    return raw | {"max_position_embeddings": 2048}


def eagle1(seed: int, folder: Path) -> Made:
    """A Llama or Qwen2 target and a head of one or two layers."""
    rng = Random(f"eagle1 {seed}")
    hf = make_target(rng.choice(["llama", "qwen2"]), seed, folder / "target")
    embed = hf.get_input_embeddings().weight.detach()
    named = ["LlamaForCausalLMEagle", "LlamaForCausalLM", "Qwen2ForCausalLMEagle", "Qwen2ForCausalLM"]
    raw = _draft_config(rng, architectures=[rng.choice(named)], num_hidden_layers=rng.choice([1, 1, 2]))
    biased, out_biased, normed = rng.random() < 0.4, rng.random() < 0.5, rng.random() < 0.3
    out_biased = biased and out_biased
    made = [_layer(raw, biased=biased, out_biased=out_biased) for _ in range(raw["num_hidden_layers"])]
    prefix = rng.choice(["", "", "model."])
    tensors = {
        name: own for i, (one, _) in enumerate(made) for name, own in _stored(f"{prefix}layers.{i}.", one).items()
    }
    if not normed:
        del tensors[f"{prefix}layers.0.input_layernorm.weight"]
        made[0][0].input_layernorm = nn.Identity()
    fc = nn.Linear(2 * HIDDEN, HIDDEN, bias=rng.random() < 0.6, dtype=DOUBLE)
    tensors |= _stored(f"{prefix}fc.", fc)
    own = rng.choice([None, embed, torch.randn_like(embed)])
    if own is not None:
        tensors[f"{prefix}embed_tokens.weight"] = own
    _write(folder / "draft", raw | {"bias": fc.bias is not None}, tensors, rng)

    @torch.no_grad()
    def says(tokens: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        x = fc(torch.cat(((embed if own is None else own)[tokens], features), dim=-1))[None]
        for layer, rotary in made:
            x = layer(x, **_around(rotary, len(tokens)))
        return x[0], hf.lm_head(x[0])

    return Made(target=folder / "target", draft=folder / "draft", hf=hf, says=says)


def eagle3(seed: int, folder: Path) -> Made:
    """A Llama, Qwen2 or Qwen3 target and a head of any published variant."""
    rng = Random(f"eagle3 {seed}")
    hf = make_target(rng.choice(["llama", "qwen2", "qwen3"]), seed, folder / "target")
    embed, count = hf.get_input_embeddings().weight.detach(), hf.config.num_hidden_layers
    h = rng.choice([HIDDEN, HIDDEN, 48])
    layers = tuple(sorted(rng.sample(range(count - 1), rng.randint(1, count - 1))))
    raw = _draft_config(rng, architectures=["LlamaForCausalLMEagle3"], num_hidden_layers=rng.choice([1, 1, 2]))
    raw |= {"hidden_size": h, "head_dim": rng.choice([8, 16]), "norm_before_residual": rng.random() < 0.5}
    raw |= {"norm_output": rng.random() < 0.3}
    key = "eagle_aux_hidden_state_layer_ids"  # of layers' inputs, or in eagle_config of their outputs
    named = {"eagle_config": {key: list(layers), "use_aux_hidden_state": True}}
    raw |= rng.choice([{key: [layer + 1 for layer in layers]}, named])
    if h != HIDDEN:
        raw["target_hidden_size"] = HIDDEN
    biased, before = rng.random() < 0.3, rng.choice([None, "each", "all"])
    made = [
        _layer(raw, biased=biased, out_biased=biased, width=None if i else 2 * h)
        for i in range(raw["num_hidden_layers"])
    ]
    first = rng.choice(["midlayer.", "layers.0."]) if len(made) == 1 else "layers.0."
    tensors = {name: own for i, (one, _) in enumerate(made) for name, own in _stored(f"layers.{i}.", one).items()}
    tensors = {name.replace("layers.0.", first): own for name, own in tensors.items()}
    fc = nn.Linear(HIDDEN * len(layers), h, bias=rng.random() < 0.3, dtype=DOUBLE)
    norms = {name: 1 + 0.2 * torch.randn(h, dtype=DOUBLE) for name in (f"{first}hidden_norm.weight", "norm.weight")}
    each = [1 + 0.2 * torch.randn(HIDDEN, dtype=DOUBLE) for _ in layers]
    tensors |= _stored("fc.", fc) | norms
    raw["bias"] = fc.bias is not None
    if before == "each":
        tensors |= {f"fc_norm.{i}.weight": one for i, one in enumerate(each)}
        raw["fc_norm"] = True
    if before == "all":
        tensors["input_norm.weight"] = torch.cat(each)
        raw["norm_before_fc"] = True
    vocab = rng.choice([VOCAB, 40])
    chosen = torch.tensor(sorted(rng.sample(range(VOCAB), vocab)))
    head = torch.randn(vocab, h, dtype=DOUBLE)
    if vocab == VOCAB and h == HIDDEN and rng.random() < 0.6:
        head = hf.lm_head.weight.detach()  # the target's: the draft has none
        raw["draft_vocab_size"] = None
    else:
        tensors["lm_head.weight"] = head
        raw["draft_vocab_size"] = vocab
    if vocab < VOCAB:
        tensors |= {"d2t": chosen - torch.arange(vocab), "t2d": torch.isin(torch.arange(VOCAB), chosen)}
    own = torch.randn(VOCAB, h, dtype=DOUBLE) if h != HIDDEN else rng.choice([None, embed, torch.randn_like(embed)])
    if own is not None:
        tensors["embed_tokens.weight"] = own
    _write(folder / "draft", raw, tensors, rng)

    @torch.no_grad()
    def says(tokens: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        if before == "each":
            parts = features.split(HIDDEN, dim=-1)
            features = torch.cat([_norm(part, weight) for part, weight in zip(parts, each, strict=True)], dim=-1)
        elif before == "all":
            features = _norm(features, torch.cat(each))
        hidden = fc(features)
        normed, (layer, rotary) = _norm(hidden, norms[f"{first}hidden_norm.weight"]), made[0]
        embeds = layer.input_layernorm((embed if own is None else own)[tokens])
        attended, _ = layer.self_attn(torch.cat((embeds, normed), dim=-1)[None], **_around(rotary, len(tokens)))
        x = (normed if raw["norm_before_residual"] else hidden) + attended[0]
        x = (x + layer.mlp(layer.post_attention_layernorm(x)))[None]
        for later, turning in made[1:]:
            x = later(x, **_around(turning, len(tokens)))
        last = _norm(x[0], norms["norm.weight"])
        return last if raw["norm_output"] else x[0], last @ head.T

    target, draft = folder / "target", folder / "draft"
    return Made(target=target, draft=draft, hf=hf, says=says, layers=layers, ids=chosen)


HEADS: dict[str, Callable[[int, Path], Made]] = {"eagle1": eagle1, "eagle3": eagle3}
