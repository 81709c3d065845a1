"""Hooks on the EAGLE worker: turns rounds, and what is drafted in them, into recorder calls.

Engine side: standard library, torch and SGLang only. It must not change any value SGLang computes, and must not
record a name it could not find as if it had been observed: what is missing is listed in the handshake.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from ...both_sides.compat import Release
from ..hooks import HookRegistry, Original
from .forward_probe import ForwardProbe
from .graph_probe import GraphProbe
from .names import CHAIN_CHOOSER, TRIVIAL_VERIFY, read_batch
from .recorder import Recorder, ints
from .verify_probe import VerifyProbe


class Probe:
    """Installs every hook of one release in one scheduler process."""

    def __init__(
        self,
        recorder: Recorder,
        release: Release,
        graphs: GraphProbe | None = None,
        *,
        adaptive: bool = False,
        receives: bool = False,
    ) -> None:
        """adaptive: steps change from round to round. receives: KV arrives from another engine."""
        self.recorder = recorder
        self.release = release
        self.graphs = graphs
        self.hooks = HookRegistry() if graphs is None else graphs.hooks
        self._verify = VerifyProbe(recorder, release, self.hooks)
        rows = recorder.staging is None and graphs is None and not receives
        self.forwards = ForwardProbe(recorder, self.hooks, graphs, packs=release.generation == "v1", rows=rows)
        #: small tensors of a round's own, which only the older workers write to before it is over
        self._kept = recorder.copied if release.generation == "v1" else recorder.held
        #: the worker's table of target ids, as it was found and as int64 [V']
        self._hot_ids: tuple[Any, np.ndarray] | None = None
        #: whether the number of steps changes while SGLang serves
        self._adaptive = adaptive

    def install(self) -> None:
        """Wrap the worker, the drafting calls, the verify and the forwards; call once their modules are imported."""
        release = self.release
        module = sys.modules[release.worker_module]
        wrap = self.hooks.wrap
        wrap(module, f"{release.worker}.forward_batch_generation", self._round)
        wrap(module, f"{release.draft}.draft", self._draft)
        if self._adaptive:  # a round without steps verifies the last token alone
            wrap(module, f"{release.worker}.{TRIVIAL_VERIFY}", self._draft)
        wrap(module, f"{release.draft}.{release.draft_prefill}", self._draft_prefill)
        wrap(module, f"{release.draft}.{release.draft_extend}", self._draft_extend)
        wrap(module, "select_top_k_tokens", self._select)
        if hasattr(module, CHAIN_CHOOSER):  # GPU releases from 0.5.16 on, for chains
            wrap(module, CHAIN_CHOOSER, self._choose_chain)
        self._verify.install()
        self.forwards.install()

    # -- rounds ------------------------------------------------------------------------------------------------

    def _round(self, original: Original) -> Original:
        recorder = self.recorder

        def forward_batch_generation(worker: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
            if not recorder.active:
                return original(worker, batch, *args, **kwargs)
            recorder.open_round(**read_batch(batch, self._kept))
            self.forwards.prefills = bool(batch.forward_mode.is_extend() or getattr(batch, "is_extend_in_batch", False))
            try:
                result = original(worker, batch, *args, **kwargs)
            except BaseException:
                recorder.drop_round()
                raise
            finally:
                recorder.phase = None
            if self._adaptive and recorder.round is not None and recorder.round.mode == "DECODE":
                recorder.round.num_steps = int(worker.speculative_num_steps)  # chosen as the round began
            recorder.close_round()
            return result

        return forward_batch_generation

    def _in_phase(self, phase: str, original: Original, after: Callable[..., None]) -> Original:
        recorder = self.recorder

        def call(worker: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
            if recorder.round is None:
                return original(worker, batch, *args, **kwargs)
            recorder.phase, recorder.step = phase, 0
            self._use_ids(getattr(worker, "hot_token_id", None))
            try:
                result = original(worker, batch, *args, **kwargs)
            finally:
                recorder.phase = None
            after(batch, args, result)
            return result

        return call

    def _use_ids(self, hot_ids: Any) -> None:
        """The table of the worker that drafts now; read once, since reading it waits for the device."""
        self.forwards.mapped = hot_ids is not None
        if hot_ids is None:
            return
        if self._hot_ids is None or self._hot_ids[0] is not hot_ids:
            self._hot_ids = hot_ids, ints(hot_ids)
        self.recorder.map_ids(self._hot_ids[1])

    # -- drafting ----------------------------------------------------------------------------------------------

    def _draft(self, original: Original) -> Original:
        return self._in_phase("DRAFT", original, self._after_draft)

    def _after_draft(self, batch: Any, args: tuple[Any, ...], verify_input: Any) -> None:
        links = verify_input.retrieve_next_token
        if links is None or links.numel() == 0:
            return
        width = links.shape[-1]
        copy = self._kept({"next": links, "sibling": verify_input.retrieve_next_sibling})
        self.recorder.note("tree", copy, width=width)

    def _draft_prefill(self, original: Original) -> Original:
        return self._in_phase("DRAFT_PREFILL", original, self._after_draft_prefill)

    def _after_draft_prefill(self, batch: Any, args: tuple[Any, ...], result: Any) -> None:
        requests = list(range(len(self._rids())))
        next_token_ids = args[1]
        if next_token_ids is not None and requests:
            self._chose("PREFILL", 0, requests, next_token_ids, None)
        self._proposals("DRAFT_PREFILL", result if result is not None else batch.spec_info, requests)

    def _draft_extend(self, original: Original) -> Original:
        return self._in_phase("EXTEND", original, self._after_draft_extend)

    def _after_draft_extend(self, batch: Any, args: tuple[Any, ...], result: Any) -> None:
        if self.release.generation == "v2":
            draft_input = args[0].next_draft_input
        else:
            draft_input = result if result is not None else batch.spec_info
        current = self.recorder.round
        assert current is not None
        self._proposals("EXTEND", draft_input, current.extend_rids)

    def _proposals(self, phase: str, draft_input: Any, requests: list[int]) -> None:
        if not requests:
            return
        copy = self._kept({"ids": draft_input.topk_index, "probs": draft_input.topk_p})
        mapped, layered = self.forwards.mapped, self.release.layered
        self.recorder.note("proposals", copy, phase=phase, requests=requests, mapped=mapped, layered=layered)

    def _chose(self, phase: str, step: int, requests: list[int], ids: Any, probs: Any) -> None:
        copy = self.recorder.copied({"ids": ids, "probs": probs})
        self.recorder.note("chosen", copy, phase=phase, step=step, requests=requests)

    def _select(self, original: Original) -> Original:
        recorder = self.recorder

        def select_top_k_tokens(i: int, topk_p: Any, topk_index: Any, *args: Any, **kwargs: Any) -> Any:
            if recorder.phase == "DRAFT" and recorder.round is not None and i > 0 and topk_index.numel():
                ids = topk_index.reshape(-1, topk_index.shape[-1])
                self._chose("DRAFT", i - 1, list(range(len(recorder.round.rids))), ids, topk_p)
            return original(i, topk_p, topk_index, *args, **kwargs)

        return select_top_k_tokens

    def _choose_chain(self, original: Original) -> Original:
        """A fused kernel that stands where a chain's `select_top_k_tokens` was: returns (probabilities, ids)."""
        recorder = self.recorder

        def choose(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if recorder.phase == "DRAFT" and recorder.round is not None and result[1].numel():
                ids = result[1].reshape(-1, result[1].shape[-1])
                self._chose("DRAFT", recorder.step - 1, list(range(len(recorder.round.rids))), ids, result[0])
            return result

        return choose

    def _rids(self) -> list[str]:
        return [] if self.recorder.round is None else self.recorder.round.rids
