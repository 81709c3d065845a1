"""Where mutants of weights act: what is loaded anew, which adapter a request has, and what an update empties.

Engine side: standard library, torch and SGLang only.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from .armed import ArmedMutants
from .registry import around

Original = Callable[..., Any]
#: Where a model's weights are loaded anew.
WEIGHTS = ("sglang.srt.model_executor.model_runner_components.weight_updater", "WeightUpdater")
ADAPTERS = ("sglang.srt.lora.lora_manager", "LoRAManager.prepare_lora_batch")
UPDATES = ("update_weights_from_disk", "update_weights_from_tensor")


class WeightSites:
    """The wrappers of one scheduler process."""

    def __init__(self, mutants: ArmedMutants) -> None:
        self._mutants = mutants

    def install(self, scheduler: Any) -> list[str]:
        """Wrap every site; returns those this release does not have."""
        hooks = self._mutants.probe.hooks
        known = len(hooks.missing)
        loader = sys.modules.get(WEIGHTS[0])  # until 0.5.16 the model runner loads them itself
        module, owner = (
            (loader, WEIGHTS[1]) if loader else (sys.modules["sglang.srt.model_executor.model_runner"], "ModelRunner")
        )
        for name in UPDATES:
            hooks.wrap(module, f"{owner}.{name}", around(self._weights), innermost=True)
        if adapters := sys.modules.get(ADAPTERS[0]):
            hooks.wrap(adapters, ADAPTERS[1], around(self._adapters), innermost=True)
        updater = getattr(scheduler, "weight_updater", None)
        if updater is not None:  # it keeps the method that it calls
            updater.flush_cache = partial(self._flush, updater.flush_cache)
        return hooks.missing[known:]

    def _weights(self, original: Original, owner: Any, *args: Any, **kwargs: Any) -> Any:
        runner = getattr(owner, "get_model_runner", lambda: owner)()
        draft = torch.tensor([bool(getattr(runner, "is_draft_worker", False))])
        changed = self._mutants.apply("weights", {"loads": torch.ones(1, dtype=torch.bool), "draft": draft})
        return (True, "not loaded by a mutant") if "loads" in changed else original(owner, *args, **kwargs)

    def _adapters(self, original: Original, manager: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        known = list(dict.fromkeys(one for one in forward_batch.lora_ids if one is not None))
        ids = torch.tensor([-1 if one is None else known.index(one) for one in forward_batch.lora_ids])
        phase = "VERIFY" if forward_batch.forward_mode.is_target_verify() else "PREFILL"
        if "ids" in (changed := self._mutants.apply("adapters", {"ids": ids}, phase=phase)):
            forward_batch.lora_ids = [None if one < 0 else known[one] for one in changed["ids"].tolist()]
        return original(manager, forward_batch, *args, **kwargs)

    def _flush(self, original: Original, *args: Any, **kwargs: Any) -> Any:
        changed = self._mutants.apply("flush", {"empties": torch.ones(1, dtype=torch.bool)})
        return True if "empties" in changed else original(*args, **kwargs)
