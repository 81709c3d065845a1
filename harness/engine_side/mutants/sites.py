"""Where mutants of forwards and drafts act, and where all sites are put in.

A site wraps a call of SGLang's, reads what is there, and puts back what the mutants make of it. Engine side: standard
library, torch and SGLang only. Changes of what goes in sit outside the probe, changes of what comes out inside it.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ..hooks import Original
from ..probes.attention_probe import BACKEND
from ..probes.pool_probe import WINDOW_SLOTS
from ..probes.probe import Probe
from .armed import RUNNER, ArmedMutants, Place, Sites
from .registry import COUNTS, Share, Values, inputs_of, mapped, replaced
from .sites_exchanged import HandoffSites, RankSites
from .sites_pools import RECURRENT, HostSites, RecurrentSites, WindowSites
from .sites_requests import AnswerSites, RequestSites
from .sites_verify import VerifySites
from .sites_weights import WeightSites

PROPOSALS = {"ids": "topk_index", "probs": "topk_p", "hidden": "hidden_states"}


def make_mutants(probe: Probe, scheduler: Any, *, tp_rank: int) -> ArmedMutants:
    """The mutants of a scheduler process, with every site wrapped."""
    mutants = ArmedMutants(probe, page=int(scheduler.token_to_kv_pool_allocator.page_size), tp_rank=tp_rank)
    kinds: list[type[Sites]] = [ForwardSites, RequestSites, RankSites, WeightSites, VerifySites, AnswerSites]
    if getattr(scheduler.token_to_kv_pool_allocator, WINDOW_SLOTS, None) is not None:
        kinds.append(WindowSites)
    if RECURRENT in sys.modules and getattr(scheduler.req_to_token_pool, "mamba_pool", None) is not None:
        kinds.append(RecurrentSites)
    if getattr(scheduler.tree_cache, "cache_controller", None) is not None:
        kinds.append(HostSites)
    if getattr(scheduler, "disagg_metadata_buffers", None) is not None:
        kinds.append(HandoffSites)
    for kind in kinds:
        kind(mutants, scheduler).install()
    return mutants


class ForwardSites(Sites):
    """Around forwards, their attention, and what is drafted from them."""

    def __init__(self, mutants: ArmedMutants, scheduler: Any) -> None:
        super().__init__(mutants, scheduler)
        self._target_head: Any = None
        #: phase, step and shares of the forward in progress; what its plans became, by the identity of each
        self._place: tuple[str, int, list[Share]] | None = None
        self._plans: dict[int, tuple[Any, Any]] = {}

    def places(self) -> Iterator[Place]:
        release = self._release
        worker, drafter = release.worker_module, release.draft
        yield Place(RUNNER, "ModelRunner.forward", self._forward, outside=True)
        yield Place(worker, "select_top_k_tokens", self._choices, outside=True)
        if BACKEND in sys.modules:
            for name in ("forward_decode", "forward_extend"):
                yield Place(BACKEND, f"TritonAttnBackend.{name}", self._attends, outside=True)
        yield Place(worker, f"{drafter}.{release.draft_prefill}", self._prompt_proposals)
        yield Place(worker, f"{drafter}.{release.draft_extend}", self._extend_proposals)
        yield Place(worker, f"{drafter}.draft_forward", self._candidates)

    def _forward(self, original: Original, runner: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        mutants, current = self._mutants, self._recorder.round
        if not mutants.armed or current is None:
            return original(runner, forward_batch, *args, **kwargs)
        phase = self._probe.forwards.phase_of(is_draft=runner.is_draft_worker)
        step = self._recorder.step if runner.is_draft_worker else 0
        busy = bool(current.rids)
        acts = {armed.mutant.act: armed for armed in mutants.at("forward" if busy else "idle", phase, step=step)}
        if "skip" in acts and phase in mutants.outputs:  # else there is nothing to give in its place yet
            acts["skip"].fired += 1
            return mutants.outputs[phase]
        self._plans = {}
        with replaced(forward_batch, self._inputs(forward_batch, phase, step, busy=busy)), self._head(runner, phase):
            self._place = (phase, step, mutants.shares(phase, len(forward_batch.input_ids))) if busy else None
            output = original(runner, forward_batch, *args, **kwargs)
            if "twice" in acts:
                acts["twice"].fired += 1
                output = original(runner, forward_batch, *args, **kwargs)
        mutants.outputs[phase], self._place = output, None
        return output

    def _attends(
        self,
        original: Original,
        backend: Any,
        q: Any,
        k: Any,
        v: Any,
        layer: Any,
        forward_batch: Any,
        *args: Any,
        **kw: Any,
    ) -> Any:
        """A layer's attention, by another plan: the same for every layer that goes by one."""
        if self._place is None or not self._mutants.at("plan", self._place[0], step=self._place[1]):
            return original(backend, q, k, v, layer, forward_batch, *args, **kw)
        own = backend.forward_metadata
        if id(own) not in self._plans:
            pool = getattr(backend, "token_to_kv_pool", None) or forward_batch.token_to_kv_pool  # until 0.5.12
            self._plans[id(own)] = own, self._planned(own, pool.get_key_buffer(layer.layer_id))
        backend.forward_metadata = self._plans[id(own)][1]
        try:
            return original(backend, q, k, v, layer, forward_batch, *args, **kw)
        finally:
            backend.forward_metadata = own

    def _planned(self, own: Any, keys: torch.Tensor) -> Any:
        assert self._place is not None
        phase, step, shares = self._place
        values = {"slots": own.kv_indices, "starts": own.kv_indptr, "keys": keys}
        changed = self._mutants.apply("plan", values, phase=phase, step=step, shares=shares)
        if "keys" in changed:
            keys.copy_(changed["keys"])
        plan = copy.copy(own)
        plan.kv_indices, plan.kv_indptr = changed.get("slots", own.kv_indices), changed.get("starts", own.kv_indptr)
        return plan

    @contextmanager
    def _head(self, runner: Any, phase: str) -> Iterator[None]:
        """The weights behind a draft's logits, for one forward; the target's are those of its newest forward."""
        head: Any = getattr(getattr(runner.model, "lm_head", None), "weight", None)
        target = self._target_head
        if not runner.is_draft_worker:
            self._target_head = head
        changed: Values = {}
        if runner.is_draft_worker and head is not None and target is not None and head.shape == target.shape:
            changed = self._mutants.apply("head", {"own": head.data, "target": target.data}, phase=phase)
        if head is None or "own" not in changed:
            yield
            return
        own, head.data = head.data, changed["own"]
        try:
            yield
        finally:
            head.data = own

    def _inputs(self, forward_batch: Any, phase: str, step: int, *, busy: bool) -> Values:
        """What goes in instead."""
        values = inputs_of(forward_batch)
        if busy:
            if "hidden" in values and len(values["hidden"]):
                self._mutants.states[phase] = values["hidden"].clone()
            shares = self._mutants.shares(phase, len(values["input_ids"]))
            return self._mutants.apply("inputs", values, phase=phase, step=step, shares=shares)
        counts = getattr(forward_batch, COUNTS, None)
        values |= {} if counts is None else {"counts": torch.tensor(counts)}
        return self._mutants.apply("idle", values, phase=phase, step=step)

    def _choices(
        self,
        original: Original,
        i: int,
        probs: Any,
        ids: Any,
        hidden: Any,
        scores: Any,
        topk: int,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        # At i = 0 these are the proposals handed over from the round before.
        if i and self._recorder.phase == "DRAFT" and self._recorder.round is not None and ids.numel():
            values = {"probs": probs, "ids": ids} | ({} if scores is None else {"scores": scores})
            shares = self._mutants.shares("DRAFT", len(ids))
            made = values | self._mutants.apply("choices", values, phase="DRAFT", step=i, shares=shares)
            probs, ids, scores = made["probs"], made["ids"], made.get("scores")
        return original(i, probs, ids, hidden, scores, topk, *args, **kwargs)

    def _candidates(self, original: Original, worker: Any, *args: Any, **kwargs: Any) -> Any:
        # for one round's steps; the probe reads the worker's own map beside it
        with mapped(worker, partial(self._mutants.apply, "vocabulary", phase="DRAFT")):
            result = original(worker, *args, **kwargs)
        if not self._mutants.at("candidates", "DRAFT"):
            return result
        names = ("parents", "selected", "tokens")
        values = dict(zip(names, result[:3], strict=True))
        made = values | self._mutants.apply("candidates", values, phase="DRAFT")
        return (*(made[name] for name in names), *result[3:])

    def _prompt_proposals(self, original: Original, worker: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(worker, batch, *args, **kwargs)
        self._proposals("DRAFT_PREFILL", result if result is not None else batch.spec_info)
        return result

    def _extend_proposals(self, original: Original, worker: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(worker, batch, *args, **kwargs)
        owner = result if result is not None else batch.spec_info
        self._proposals("EXTEND", args[0].next_draft_input if self._release.generation == "v2" else owner)
        return result

    def _proposals(self, phase: str, draft_input: Any) -> None:
        if self._mutants.at("proposals", phase):
            shares = self._mutants.shares(phase, 0)
            each = [replace(one, first=i, rows=1) for i, one in enumerate(shares)]
            self._mutants.change("proposals", draft_input, PROPOSALS, phase=phase, shares=each)
