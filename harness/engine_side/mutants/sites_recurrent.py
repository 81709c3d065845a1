"""Where mutants of recurrent states act: which of a verify's states becomes the request's own.

Engine side: standard library, torch and SGLang only. It must leave everything as it is where no mutant acts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from .armed import ArmedMutants
from .registry import Share, around

BACKEND = "sglang.srt.layers.attention.hybrid_linear_attn_backend"
COMMIT = "HybridLinearAttnBackend.update_mamba_state_after_mtp_verify"
#: Of that call: the tree node, or the place in the chain, behind which a request's state is kept, -1 for none.
STEPS = "last_correct_step_indices"


class RecurrentSites:
    """The wrapper of one scheduler process whose target keeps recurrent states."""

    def __init__(self, mutants: ArmedMutants, *, last: int) -> None:
        """last: the last step of a verify."""
        self._mutants, self._last = mutants, last

    def install(self) -> list[str]:
        """Wrap the site; returns it where this release does not have it."""
        hooks = self._mutants.probe.hooks
        known = len(hooks.missing)
        hooks.wrap(sys.modules[BACKEND], COMMIT, around(self._commit), innermost=True)
        return hooks.missing[known:]

    def _commit(self, original: Callable[..., Any], backend: Any, *args: Any, **kwargs: Any) -> Any:
        steps, rest = (kwargs.pop(STEPS), args) if STEPS in kwargs else (args[0], args[1:])
        current = self._mutants.recorder.round
        rids = [] if current is None else current.rids
        shares = [Share(rid, number, 1) for number, rid in enumerate(rids)]
        values = {"steps": steps, "last": torch.tensor(self._last)}
        changed = self._mutants.apply("commit", values, shares=shares)
        return original(backend, changed.get("steps", steps), *rest, **kwargs)
