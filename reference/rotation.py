"""Rotary position embeddings, as configs describe them.

Sources: RoPE (arXiv 2104.09864), with either way of pairing dimensions; position interpolation (arXiv 2306.15595,
"linear"); Llama 3.1 (arXiv 2407.21783, and the scaling in its published code, "llama3"); YaRN (arXiv 2309.00071), whose
temperature goes into the rotated pairs. A kind that depends on how long a text gets ("dynamic", "longrope") is refused:
then keys that were kept do not stay as they are. This module must not know a model.

Shapes: m rows, H heads, d head width, w rotated width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from reference.checkpoint import CheckpointError

Raw = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotation:
    """Turns the first w dimensions of a head. frequencies: float32 [w/2], radians a position for each pair.

    interleaved: pairs are neighbours, not half the width apart. scale: what a turned pair is multiplied by.
    """

    frequencies: Tensor
    interleaved: bool = False
    scale: float = 1.0
    _there: dict[torch.device, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)

    def turn(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [m,H,d] by positions int64 [m]. Half precision cannot hold an angle, so angles are never narrower than
        float32; the sines are rounded to the dtype of x, as it is done everywhere."""
        wide = torch.promote_types(x.dtype, torch.float32)
        if x.device not in self._there:  # brought to a card once: each time would wait for all that runs there
            self._there[x.device] = self.frequencies.to(x.device)
        angle = positions[:, None] * self._there[x.device].to(wide)
        cos = (self.scale * angle.cos())[:, None, :].to(x.dtype)
        sin = (self.scale * angle.sin())[:, None, :].to(x.dtype)
        width = 2 * angle.shape[-1]
        part, rest = x[..., :width], x[..., width:]
        if self.interleaved:
            first, second = part[..., ::2], part[..., 1::2]
            turned = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2)
        else:
            first, second = torch.chunk(part, 2, dim=-1)
            turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
        return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned


def plain_frequencies(width: int, theta: float) -> Tensor:
    """float32 [width/2]: pair i turns by theta^(-2i/width) a position."""
    return 1.0 / theta ** (torch.arange(0, width, 2, dtype=torch.float32) / width)


def yarn_size(factor: float, mscale: float = 1.0) -> float:
    """How much longer contexts sharpen attention, as a factor of queries or keys: YaRN's 0.1 ln(s) + 1."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def theta_of(raw: Raw) -> float:
    """The base of the frequencies, wherever it stands; 10000 where nothing is said, as RoPE has it."""
    found = {float(one["rope_theta"]) for one in (raw, scaling_of(raw)) if one.get("rope_theta") is not None}
    if len(found) > 1:
        raise CheckpointError(f"rope_theta is {' and '.join(map(str, sorted(found)))}; expected one of them")
    return found.pop() if found else 10000.0


def scaling_of(raw: Raw) -> Raw:
    """`rope_parameters`, or `rope_scaling` as older configs call it."""
    newer, older = raw.get("rope_parameters"), raw.get("rope_scaling")
    if newer and older and dict(newer) != dict(older):
        raise CheckpointError(f"rope_parameters is {newer!r} and rope_scaling {older!r}; expected one of them")
    found: Raw = newer or older or {}
    return found


def kind_of(raw: Raw) -> str:
    """What a config calls its rotation; CheckpointError where it says two, or two bases of the frequencies.

    With text alone M-RoPE is the plain one (Qwen2-VL, arXiv 2409.12191, section 2.1), and configs call it either.
    """
    theta_of(raw)
    scaling = scaling_of(raw)
    named = [kind for kind in (scaling.get("rope_type"), scaling.get("type")) if kind is not None] or ["default"]
    kinds = ["default" if kind == "mrope" else kind for kind in named]
    if len(set(kinds)) > 1:
        raise CheckpointError(f"rope_type is {' and '.join(map(repr, kinds))}; expected one of them")
    return str(kinds[0])


def read_rotation(raw: Raw, *, head_dim: int, share: float = 1.0, interleaved: bool = False) -> Rotation:
    """What a config asks for. share: of the head that turns; the architecture says where it is not all."""
    kind, scaling, theta, width = kind_of(raw), scaling_of(raw), theta_of(raw), int(head_dim * share)
    if kind not in _KINDS:
        raise CheckpointError(f"rope_type is {kind!r}; this reference builds {sorted(_KINDS)}")
    frequencies, scale = _KINDS[kind](raw, scaling, width, theta)
    return Rotation(frequencies=frequencies, interleaved=interleaved, scale=scale)


Found = tuple[Tensor, float]


def _default(raw: Raw, scaling: Raw, width: int, theta: float) -> Found:
    for key in ("mrope_section", "mrope_interleaved"):
        scaling.get(key)  # which part of a head turns by which of three positions: of text they are one
    return plain_frequencies(width, theta), 1.0


def _linear(raw: Raw, scaling: Raw, width: int, theta: float) -> Found:
    return plain_frequencies(width, theta) / float(scaling["factor"]), 1.0


def _llama3(raw: Raw, scaling: Raw, width: int, theta: float) -> Found:
    """Pairs that turn more than `high_freq_factor` times in the original context stay, those below `low_freq_factor`
    turn `factor` times slower, between them a blend that is linear in how often they turn."""
    factor, low, high = (float(scaling[key]) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    plain, original = plain_frequencies(width, theta), int(scaling["original_max_position_embeddings"])
    turns = original * plain / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return plain * kept + plain / factor * (1 - kept), 1.0


def _yarn(raw: Raw, scaling: Raw, width: int, theta: float) -> Found:
    """Stretched `factor` times beyond the original context.

    beta_fast, beta_slow: rotations over that context from which on a dimension is left alone, and up to which it is
    stretched by the whole factor; between them a linear blend. truncate: whether the borders are whole dimensions.
    """
    plain, factor = plain_frequencies(width, theta), float(scaling["factor"])
    original = int(scaling.get("original_max_position_embeddings") or raw["max_position_embeddings"])

    def pair(rotations: float) -> float:
        return width * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair(float(scaling.get("beta_fast") or 32)), pair(float(scaling.get("beta_slow") or 1))
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    stretched = ((torch.arange(width // 2, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0, 1)
    frequencies = plain / factor * stretched + plain * (1 - stretched)
    given, mscale, mscale_all = (scaling.get(key) for key in ("attention_factor", "mscale", "mscale_all_dim"))
    if given is not None:
        return frequencies, float(given)
    if mscale and mscale_all:
        return frequencies, yarn_size(factor, mscale) / yarn_size(factor, mscale_all)
    return frequencies, yarn_size(factor)


_KINDS: dict[str, Callable[[Raw, Raw, int, float], Found]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}
