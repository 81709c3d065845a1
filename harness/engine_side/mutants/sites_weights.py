"""Where mutants of weights act: what is loaded anew, which adapter a request has, and what an update empties.

Engine side: standard library, torch and SGLang only.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from ..hooks import Original
from .armed import RUNNER, Place, Sites

#: Where a model's weights are loaded anew; until 0.5.16 the model runner loads them itself.
WEIGHTS = ("sglang.srt.model_executor.model_runner_components.weight_updater", "WeightUpdater")
UPDATES = ("update_weights_from_disk", "update_weights_from_tensor")
ADAPTERS = "sglang.srt.lora.lora_manager"


class WeightSites(Sites):
    """Around updates of weights, and the adapters of a batch."""

    def places(self) -> Iterator[Place]:
        module, owner = WEIGHTS if WEIGHTS[0] in sys.modules else (RUNNER, "ModelRunner")
        for name in UPDATES:
            yield Place(module, f"{owner}.{name}", self._weights)
        if ADAPTERS in sys.modules:
            yield Place(ADAPTERS, "LoRAManager.prepare_lora_batch", self._adapters)

    def install(self) -> None:
        super().install()
        updater = getattr(self._scheduler, "weight_updater", None)
        if updater is not None:  # it keeps the method that it calls
            updater.flush_cache = partial(self._flush, updater.flush_cache)

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
