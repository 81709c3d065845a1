"""The small Llama and the two EAGLE heads that `cases.training.train` trains, as PyTorch modules.

Written for training: batches, gradients, all draft steps of all rows at once. The reference does not use it, and it
does not use the reference, so the files that come out of it are judged by code that did not make them.

Shapes: B sequences, T tokens of each, h width, V vocabulary, V' draft vocabulary.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cases.trained_weights import TrainedEagle3Recipe

#: Added to the mean square in every norm.
EPS = 1e-5


def rms(x: Tensor, weight: Tensor | None) -> Tensor:
    """x [...,h] over its root mean square, times weight [h]; as it is where there is no norm."""
    if weight is None:
        return x
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype) * weight


def rope(x: Tensor, theta: float) -> Tensor:
    """x [B,H,T,d], rotated by its row, in halves as Hugging Face lays pairs out."""
    d = x.shape[-1]
    frequency = theta ** (-torch.arange(0, d, 2, device=x.device, dtype=torch.float32) / d)
    angle = torch.arange(x.shape[2], device=x.device, dtype=torch.float32)[:, None] * frequency
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Layer(nn.Module):
    """One decoder layer. width: what attention reads a row; input_norm: whether that is normed here."""

    def __init__(self, shape: TrainedEagle3Recipe, *, width: int | None = None, input_norm: bool = True) -> None:
        super().__init__()
        s, width = shape, width or shape.hidden
        self.shape = s
        self.input_layernorm = nn.Parameter(torch.ones(s.hidden)) if input_norm else None
        self.post_attention_layernorm = nn.Parameter(torch.ones(s.hidden))
        self.q_proj = nn.Linear(width, s.heads * s.head_dim, bias=False)
        self.k_proj = nn.Linear(width, s.kv_heads * s.head_dim, bias=False)
        self.v_proj = nn.Linear(width, s.kv_heads * s.head_dim, bias=False)
        self.o_proj = nn.Linear(s.heads * s.head_dim, s.hidden, bias=False)
        self.gate_proj = nn.Linear(s.hidden, s.intermediate, bias=False)
        self.up_proj = nn.Linear(s.hidden, s.intermediate, bias=False)
        self.down_proj = nn.Linear(s.intermediate, s.hidden, bias=False)

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [B,T,width] -> rotated q, k and v, each [B,heads,T,d]; k and v repeated for their groups."""
        s, (batch, rows) = self.shape, x.shape[:2]

        def split(y: Tensor, count: int) -> Tensor:
            return y.view(batch, rows, count, s.head_dim).transpose(1, 2)

        q = rope(split(self.q_proj(x), s.heads), s.rope_theta)
        k = rope(split(self.k_proj(x), s.kv_heads), s.rope_theta)
        v = split(self.v_proj(x), s.kv_heads)
        group = s.heads // s.kv_heads
        return q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)

    def back(self, y: Tensor) -> Tensor:
        """y [B,H,T,d] -> [B,T,h]"""
        return F.linear(y.transpose(1, 2).flatten(2), self.o_proj.weight)

    def mlp(self, x: Tensor) -> Tensor:
        y = rms(x, self.post_attention_layernorm)
        return x + F.linear(F.silu(self.gate_proj(y)) * self.up_proj(y), self.down_proj.weight)

    def forward(self, x: Tensor) -> Tensor:
        y = rms(x, self.input_layernorm)
        q, k, v = self.heads(y)
        return self.mlp(x + self.back(F.scaled_dot_product_attention(q, k, v, is_causal=True)))

    def named(self, prefix: str) -> dict[str, Tensor]:
        """Tensors by the names Hugging Face gives them."""
        place = {"q_proj": "self_attn", "k_proj": "self_attn", "v_proj": "self_attn", "o_proj": "self_attn"}
        found = {}
        for name, value in self.state_dict().items():
            short, _, kind = name.partition(".")
            inner = f"{place.get(short, 'mlp')}.{short}.weight" if kind else f"{short}.weight"
            found[prefix + inner] = value
        return found


class Target(nn.Module):
    """A Llama: embedding, layers, norm, head."""

    def __init__(self, shape: TrainedEagle3Recipe) -> None:
        super().__init__()
        self.shape = shape
        self.embed = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.Parameter(torch.ones(shape.hidden))
        self.head = nn.Linear(shape.hidden, shape.vocab, bias=False)
        for name, value in self.named_parameters():
            if value.dim() == 2:
                deep = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(value, std=0.02 / (math.sqrt(2 * shape.layers) if deep else 1.0))

    def forward(self, tokens: Tensor) -> tuple[Tensor, list[Tensor]]:
        """tokens [B,T] -> logits [B,T,V] and L+1 states [B,T,h], the last one after the final norm."""
        states = [self.embed(tokens)]
        for layer in self.layers:
            states.append(layer(states[-1]))
        states[-1] = rms(states[-1], self.norm)
        return self.head(states[-1]), states


class Head(nn.Module):
    """Either kind of head: EAGLE-3 reads several layers and has a head of its own, EAGLE-1 reads the last state.

    ids: the target id of each draft id, ascending, int64 [V'].
    """

    ids: Tensor
    layer: Layer

    def __init__(self, shape: TrainedEagle3Recipe, *, three: bool, ids: Tensor) -> None:
        super().__init__()
        s = shape
        self.shape, self.three = s, three
        self.register_buffer("ids", ids if three else torch.arange(s.vocab), persistent=False)
        if three:
            self.fc = nn.Linear(s.hidden * len(s.aux_layers), s.hidden, bias=False)
            self.layer = Layer(s, width=2 * s.hidden)
            self.hidden_norm = nn.Parameter(torch.ones(s.hidden))
            self.norm = nn.Parameter(torch.ones(s.hidden))
            self.lm_head = nn.Linear(s.hidden, s.draft_vocab, bias=False)
        else:
            self.fc = nn.Linear(2 * s.hidden, s.hidden)
            self.layer = Layer(s, input_norm=False)

    def start(self, states: list[Tensor]) -> Tensor:
        """The target's L+1 states [B,T,h] -> what the first step reads, [B,T,h]."""
        if not self.three:
            return states[-1]
        return F.linear(torch.cat([states[i + 1] for i in self.shape.aux_layers], dim=-1), self.fc.weight)

    def step(self, embedded: Tensor, hidden: Tensor, cache: list[tuple[Tensor, Tensor]]) -> Tensor:
        """One draft step over all rows at once: embedded, hidden [B,T,h] -> g [B,T,h].

        Row t of step s stands for a chain that left the text s rows before: it attends the text's rows up to t - s
        (step 0's keys) and its own chain's rows, which step i computed at row t - s + i.
        """
        s, layer, number = self.shape, self.layer, len(cache)
        if self.three:
            read = torch.cat((rms(embedded, layer.input_layernorm), rms(hidden, self.hidden_norm)), dim=-1)
            residual = hidden
        else:
            read = residual = self.fc(torch.cat((embedded, hidden), dim=-1))
        q, k, v = layer.heads(read)
        cache.append((k, v))
        if number == 0:
            return layer.mlp(residual + layer.back(F.scaled_dot_product_attention(q, k, v, is_causal=True)))
        rows = q.shape[2]
        first_k, first_v = cache[0]
        scale = s.head_dim**-0.5
        seen = torch.ones(rows, rows, dtype=torch.bool, device=q.device).tril(-number)
        scores = [(q @ first_k.transpose(-1, -2) * scale).masked_fill(~seen, float("-inf"))]
        own = []
        for i in range(1, number + 1):
            shifted = [F.pad(part, (0, 0, number - i, 0))[:, :, :rows] for part in cache[i]]
            scores.append((q * shifted[0]).sum(-1, keepdim=True) * scale)
            own.append(shifted[1])
        weights = torch.cat(scores, dim=-1).softmax(-1)
        mixed = weights[..., :rows] @ first_v
        for i, value in enumerate(own):
            mixed = mixed + weights[..., rows + i : rows + i + 1] * value
        return layer.mlp(residual + layer.back(mixed))

    def logits(self, g: Tensor, target: Target) -> Tensor:
        """[B,T,V'] for EAGLE-3, [B,T,V] for EAGLE-1"""
        normed, head = (rms(g, self.norm), self.lm_head) if self.three else (g, target.head)
        return F.linear(normed, head.weight)
