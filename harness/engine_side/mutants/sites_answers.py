"""Where mutants act on what is sent back of a request: as it leaves the scheduler, behind all that the probe sees.

Engine side: standard library, torch and SGLang only.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from ..probes.recorder import plain_rid
from .armed import ArmedMutants
from .registry import Share, around

#: Where it leaves; 0.5.13 and later.
SENDER = "sglang.srt.managers.scheduler_components.output_sender"
#: Value of the site -> field of a batch of answers, which has an entry a request.
ANSWERS = {
    "logprobs": "output_token_logprobs_val",
    "states": "output_hidden_states",
    "verifies": "spec_verify_ct",
    "cached": "cached_tokens",
    "completion": "completion_tokens",
}


class AnswerSites:
    """The wrapper of one scheduler process."""

    def __init__(self, mutants: ArmedMutants) -> None:
        self._mutants = mutants

    def install(self) -> None:
        """Wrap the sender, where this release has one."""
        if SENDER in sys.modules:
            hooks = self._mutants.probe.hooks
            hooks.wrap(sys.modules[SENDER], "SenderWrapper.send_output", around(self._sent), innermost=True)

    def _sent(self, original: Callable[..., Any], sender: Any, output: Any, *args: Any, **kwargs: Any) -> Any:
        if self._mutants.at("answers") and hasattr(output, ANSWERS["logprobs"]):
            for number, rid in enumerate(output.rids):
                self._change(output, number, plain_rid(rid))
        return original(sender, output, *args, **kwargs)

    def _change(self, output: Any, number: int, rid: str) -> None:
        for name, attribute in ANSWERS.items():
            column = getattr(output, attribute) or []
            if len(column) <= number or column[number] in (None, []):
                continue
            value = flat(column[number])
            changed = self._mutants.apply("answers", {name: value}, shares=[Share(rid, 0, len(value))])
            if name in changed:
                made = changed[name].tolist()
                column[number] = made if isinstance(column[number], list) else made[0]


def flat(value: Any) -> torch.Tensor:
    """A number [1], numbers [m], or rows [m,h] of which some come in lists of several."""
    if not isinstance(value, list):
        return torch.tensor([value])
    parts = [part if isinstance(part, list) and isinstance(part[0], list) else [part] for part in value]
    return torch.tensor([row for part in parts for row in part])
