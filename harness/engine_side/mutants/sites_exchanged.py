"""Where mutants of what processes exchange act: parts over TP ranks, and what one engine hands to another.

Engine side: standard library, torch and SGLang only.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from ..hooks import Original
from ..probes.distributed_probe import BONUS
from ..transfer_backend.files import CHANGE_PAGES
from .armed import Place, Sites, one_each

RANKS, HANDOFF = "sglang.srt.distributed.parallel_state", "sglang.srt.disaggregation.utils"


class RankSites(Sites):
    """Around what is summed or gathered over TP ranks."""

    def places(self) -> Iterator[Place]:
        yield Place(RANKS, "GroupCoordinator.all_reduce", self._reduced)
        yield Place(RANKS, "GroupCoordinator.all_gather", self._gathered)

    def _reduced(self, original: Original, ranks: Any, part: Any, *args: Any, **kwargs: Any) -> Any:
        """The part is written over by the sum."""
        phase = self._recorder.last.get("phase", "")
        own = part.clone() if ranks.world_size > 1 and self._mutants.at("reduced", phase) else None
        whole = original(ranks, part, *args, **kwargs)
        if own is None:
            return whole
        return self._mutants.apply("reduced", {"part": own, "sum": whole}, phase=phase).get("sum", whole)

    def _gathered(self, original: Original, ranks: Any, part: Any, *args: Any, **kwargs: Any) -> Any:
        phase, whole = self._recorder.last.get("phase", ""), original(ranks, part, *args, **kwargs)
        if ranks.world_size == 1 or not self._mutants.at("gathered", phase):
            return whole
        values = {"part": part, "whole": whole}
        return self._mutants.apply("gathered", values, phase=phase).get("whole", whole)


class HandoffSites(Sites):
    """Of one side of a disaggregated pair: metadata as it is written and read, and the pages that travel."""

    def places(self) -> Iterator[Place]:
        yield Place(HANDOFF, "MetadataBuffers.set_buf", self._sent)
        yield Place(HANDOFF, "MetadataBuffers.get_buf", self._rows)
        yield Place("sglang.srt.managers.schedule_batch", "ScheduleBatch.process_prebuilt", self._arrived)

    def install(self) -> None:
        super().install()
        CHANGE_PAGES.append(self._pages)

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
        if self._recorder.round is not None:
            self._mutants.batches = self._recorder.round.index + 1
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
