"""Custom logit processors of ours, as SGLang wants them: pickled classes of its own base class.

Engine side: torch and SGLang only. Pickled by name, so the module must be importable in the scheduler too. It must not
look at a request's history: what a processor does is a function of the row and its parameters.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

from ...both_sides.logit_processors import PARAMETER


class Forbid(CustomLogitProcessor):
    def __call__(self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> torch.Tensor:
        for row, given in enumerate(custom_param_list or ()):
            logits[row, given[PARAMETER]] = -float("inf")
        return logits


class Force(CustomLogitProcessor):
    def __call__(self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> torch.Tensor:
        for row, given in enumerate(custom_param_list or ()):
            barred = torch.ones_like(logits[row], dtype=torch.bool)
            barred[given[PARAMETER]] = False
            logits[row, barred] = -float("inf")
        return logits


CLASSES: dict[str, Any] = {"forbid": Forbid, "force": Force}


def pickled(name: str) -> str:
    """What a request carries; KeyError for a name that is not in both_sides.logit_processors."""
    return str(CLASSES[name].to_str())
