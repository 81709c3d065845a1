"""Where mutants of a disaggregated pair act: metadata as it is written and read, and the pages that travel.

Engine side: standard library, torch and SGLang only. It must leave everything as it is where no mutant acts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ..probes.distributed_probe import BONUS
from ..transfer_backend.files import CHANGE_PAGES
from .armed import ArmedMutants, one_each
from .registry import around

Original = Callable[..., Any]


class HandoffSites:
    """The wrappers of one side of a pair; each is given what it wraps first, then the arguments of the call."""

    def __init__(self, mutants: ArmedMutants) -> None:
        self._mutants = mutants

    def install(self) -> list[str]:
        """Wrap every site; returns those this release does not have."""
        hooks = self._mutants.probe.hooks
        known = len(hooks.missing)
        utils = sys.modules["sglang.srt.disaggregation.utils"]
        batches = sys.modules["sglang.srt.managers.schedule_batch"]
        hooks.wrap(utils, "MetadataBuffers.set_buf", around(self._sent), innermost=True)
        hooks.wrap(utils, "MetadataBuffers.get_buf", around(self._rows), innermost=True)
        hooks.wrap(batches, "ScheduleBatch.process_prebuilt", around(self._arrived), innermost=True)
        CHANGE_PAGES.append(self._pages)
        return hooks.missing[known:]

    def _sent(self, original: Original, buffers: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
        """Prefill side: what a request puts into its row."""
        if req.output_topk_index is not None:
            values = {"ids": req.output_topk_index, "guess": torch.tensor([req.output_ids[0]])}
            req.output_topk_index = (values | self._mutants.apply("sent", values, shares=one_each([req])))["ids"]
        return original(buffers, req, *args, **kwargs)

    def _rows(self, original: Original, buffers: Any, index: int, *args: Any, **kwargs: Any) -> Any:
        """Decode side: which row a request's metadata is read from. The room in it stays, or SGLang would notice."""
        row = original(buffers, index, *args, **kwargs)
        full = (buffers.bootstrap_room[:, 0] != 0).to(torch.int64)
        values = {"row": torch.tensor([index]), "full": full}
        other = int((values | self._mutants.apply("rows", values))["row"][0])
        return row if other == index else (*original(buffers, other, *args, **kwargs)[:-1], row[-1])

    def _arrived(self, original: Original, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Decode side: what a prebuilt batch is made of, and the token it begins with."""
        reqs = list(batch.reqs)
        if self._mutants.recorder.round is not None:
            self._mutants.batches = self._mutants.recorder.round.index + 1
        if reqs:
            held = [req.hidden_states_tensor for req in reqs]
            changed = self._mutants.apply("arrived", {"hidden": torch.stack(held)}, shares=one_each(reqs))
            for req, state in zip(reqs, changed.get("hidden", held), strict=True):
                req.hidden_states_tensor = state
        result = original(batch, *args, **kwargs)
        if reqs:
            name = next(name for name in BONUS if hasattr(batch.spec_info, name))
            changed = self._mutants.apply("bonus", {"bonus": getattr(batch.spec_info, name)}, shares=one_each(reqs))
            if "bonus" in changed:
                setattr(batch.spec_info, name, changed["bonus"])
        return result

    def _pages(self, buffers: list[np.ndarray], pages: list[int]) -> list[np.ndarray]:
        """Prefill side: the bytes of the pages of one part, buffer by buffer."""
        values = {str(i): torch.from_numpy(one.reshape(len(pages), -1)) for i, one in enumerate(buffers) if pages}
        changed = self._mutants.apply("pages", values) if values else {}
        return [changed[str(i)].numpy().reshape(-1) if str(i) in changed else one for i, one in enumerate(buffers)]
