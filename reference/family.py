"""One published family as its config describes it: its layers, its next-token layer, and its weights as they are held.

`reference.families` reads the configs. This module must not compute anything.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from reference.checkpoint import Config, Weights
from reference.mixtures import ClampedMixture, Mixture
from reference.model import Attends, DecoderLayer
from reference.nextn import Join

#: Kept in float32 whatever the rest is held in: biases that only choose experts, and the rates of a recurrence.
EXACT = ("e_score_correction_bias", "A_log", "dt_bias")


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What a config describes. attention: of layer i. centred: norms are stored less one.

    join, draft: its next-token layer's parts, and the prefix of that layer's weights. alone: nothing else is there.
    """

    config: Config
    attention: Callable[[Weights, str, int | None], Attends]
    mixture: Mixture | ClampedMixture
    centred: bool = False
    join: Join | None = None
    draft: str = ""
    alone: bool = False

    def weights(self, path: Path, dtype: torch.dtype, device: torch.device | str) -> Weights:
        """The folder's tensors, norms as they are multiplied."""
        return Weights(path, dtype, device, exact=EXACT, raised=_is_centred if self.centred else None)

    def beside(self, name: str) -> bool:
        """Whether a tensor belongs to a next-token layer."""
        parts = name.split(".")
        behind_last = parts[:2] == ["model", "layers"] and int(parts[2]) >= self.config.layers
        return behind_last or name.startswith(("mtp.", "model.mtp_"))

    def layer(self, weights: Weights, prefix: str, number: int | None) -> DecoderLayer:
        """Decoder layer `number`, whose weights start with `prefix`; None is the next-token layer."""
        h = self.config.hidden
        return DecoderLayer(
            input_norm=weights.take(f"{prefix}input_layernorm.weight", h),
            attention=self.attention(weights, prefix, number),
            post_norm=weights.take(f"{prefix}post_attention_layernorm.weight", h),
            mlp=self.mixture.mlp(weights, prefix, number),
            eps=self.config.eps,
        )


def _is_centred(name: str) -> bool:
    """Whether a tensor is a norm that is stored less one; those behind a recurrence's heads are not."""
    *_, parent, module, _ = ("", "", *name.split("."))
    return "norm" in module and parent != "linear_attn"
