"""Where mutants of a hand-over act: what is written into metadata, what is read from it, and the pages that travel.

Engine side: standard library, torch and SGLang only. It must leave everything as it is where no mutant acts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..probes.handoff_probe import BONUS
from ..probes.recorder import plain_rid
from ..stand_ins.loopback import CHANGE_PAGES
from .fault_acts import Scene as Scene
from .fault_acts import Share, Values, act

if TYPE_CHECKING:
    from .fault_wraps import Faults

Original = Callable[..., Any]


class HandoffSites:
    """The wrappers of one side of a pair."""

    def __init__(self, faults: Faults) -> None:
        self._faults = faults

    def install(self) -> list[str]:
        """Wrap every place; returns those this release does not have."""
        ledger = self._faults.probe.ledger
        known = len(ledger.missing)
        utils = sys.modules["sglang.srt.disaggregation.utils"]
        batches = sys.modules["sglang.srt.managers.schedule_batch"]
        ledger.wrap(utils, "MetadataBuffers.set_buf", self._sent, innermost=True)
        ledger.wrap(utils, "MetadataBuffers.get_buf", self._rows, innermost=True)
        ledger.wrap(batches, "ScheduleBatch.process_prebuilt", self._arrived, innermost=True)
        CHANGE_PAGES.append(self._pages)
        return ledger.missing[known:]

    def _sent(self, original: Original) -> Original:
        """Prefill side: what a request puts into its row."""

        def set_buf(buffers: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
            if req.output_topk_index is not None:
                values = {"ids": req.output_topk_index, "guess": torch.tensor([req.output_ids[0]])}
                req.output_topk_index = (values | self._apply("sent", values, [req]))["ids"]
            return original(buffers, req, *args, **kwargs)

        return set_buf

    def _rows(self, original: Original) -> Original:
        """Decode side: which row a request's metadata is read from. The room in it stays, or SGLang would notice."""

        def get_buf(buffers: Any, index: int, *args: Any, **kwargs: Any) -> Any:
            row = original(buffers, index, *args, **kwargs)
            full = (buffers.bootstrap_room[:, 0] != 0).to(torch.int64)
            values = {"row": torch.tensor([index]), "full": full}
            other = int((values | self._apply("rows", values, []))["row"][0])
            return row if other == index else (*original(buffers, other, *args, **kwargs)[:-1], row[-1])

        return get_buf

    def _arrived(self, original: Original) -> Original:
        """Decode side: what a prebuilt batch is made of, and the token it begins with."""

        def process_prebuilt(batch: Any, *args: Any, **kwargs: Any) -> Any:
            reqs = list(batch.reqs)
            if self._faults.recorder.round is not None:
                self._faults.batches = self._faults.recorder.round.index + 1
            if reqs:
                held = [req.hidden_states_tensor for req in reqs]
                changed = self._apply("arrived", {"hidden": torch.stack(held)}, reqs)
                for req, state in zip(reqs, changed.get("hidden", held), strict=True):
                    req.hidden_states_tensor = state
            result = original(batch, *args, **kwargs)
            if reqs:
                name = next(name for name in BONUS if hasattr(batch.spec_info, name))
                values = {"bonus": getattr(batch.spec_info, name)}
                changed = self._apply("bonus", values, reqs)
                if "bonus" in changed:
                    setattr(batch.spec_info, name, changed["bonus"])
            return result

        return process_prebuilt

    def _pages(self, buffers: list[np.ndarray], pages: list[int]) -> list[np.ndarray]:
        """Prefill side: the bytes of the pages of one part, buffer by buffer."""
        values = {str(i): torch.from_numpy(one.reshape(len(pages), -1)) for i, one in enumerate(buffers) if pages}
        changed = self._apply("pages", values, []) if values else {}
        return [changed[str(i)].numpy().reshape(-1) if str(i) in changed else one for i, one in enumerate(buffers)]

    def _apply(self, site: str, values: Values, reqs: list[Any]) -> Values:
        shares = [Share(plain_rid(req.rid), i, 1, len(req.origin_input_ids), True, 0) for i, req in enumerate(reqs)]
        return self._faults.apply(site, values, shares=shares)


@act
def state_of_another(scene: Scene, values: Values) -> Values:
    """Each request of the batch gets the row of the one before it."""
    return {"hidden": values["hidden"].roll(1, dims=0)}


@act
def guess_of_the_target(scene: Scene, values: Values) -> Values:
    """The draft is to go on with what the target has chosen already."""
    ids = values["ids"].clone()
    ids[0] = values["guess"][0]
    return {"ids": ids}


@act
def next_token(scene: Scene, values: Values) -> Values:
    return {"bonus": values["bonus"] + int(scene.args["by"])}


@act
def row_of_another(scene: Scene, values: Values) -> Values:
    """The next row that something has been written into."""
    own, full = int(values["row"][0]), values["full"].nonzero().flatten().tolist()
    others = [row for row in full if row != own]
    return {"row": torch.tensor(others[:1])} if others else {}


@act
def page_left_behind(scene: Scene, values: Values) -> Values:
    """The middle page of a part arrives as it was before anything was written to it."""
    changed = {}
    for name, pages in values.items():
        changed[name] = pages.clone()
        changed[name][len(pages) // 2] = 0
    return changed
