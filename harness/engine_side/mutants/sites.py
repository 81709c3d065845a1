"""Where mutants act: wraps calls of SGLang's, reads what is there, and puts back what the mutants make of it.

Engine side: standard library, torch and SGLang only. Changes of what goes in sit outside the probe, changes of what
comes out inside it. It must leave everything as it is where no mutant acts.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from ..probes.attention_probe import BACKEND
from ..probes.probe import Probe
from ..probes.window_probe import WINDOW_SLOTS
from .armed import ArmedMutants, one_each
from .registry import COUNTS, Share, Values, around, inputs_of, mapped, replaced
from .sites_answers import AnswerSites
from .sites_handoff import HandoffSites
from .sites_host import HostSites
from .sites_recurrent import BACKEND as RECURRENT
from .sites_recurrent import RecurrentSites
from .sites_verify import VerifySites
from .sites_windows import WindowSites

Original = Callable[..., Any]
#: Where a model's weights are loaded anew.
WEIGHTS = ("sglang.srt.model_executor.model_runner_components.weight_updater", "WeightUpdater")
ADAPTERS = ("sglang.srt.lora.lora_manager", "LoRAManager.prepare_lora_batch")
UPDATES = ("update_weights_from_disk", "update_weights_from_tensor")

#: Who is kept first where the pool runs out.
KEPT_FIRST = "_get_decode_retraction_order"
PROPOSALS = {"ids": "topk_index", "probs": "topk_p", "hidden": "hidden_states"}


def make_mutants(probe: Probe, scheduler: Any, *, tp_rank: int) -> ArmedMutants:
    """The mutants of a scheduler process, with every site wrapped."""
    mutants = ArmedMutants(probe, page=int(scheduler.token_to_kv_pool_allocator.page_size), tp_rank=tp_rank)
    mutants.missing = Sites(mutants).install(scheduler)
    mutants.missing += VerifySites(mutants).install()
    AnswerSites(mutants).install()
    if getattr(scheduler.token_to_kv_pool_allocator, WINDOW_SLOTS, None) is not None:
        mutants.missing += WindowSites(mutants).install(scheduler)
    if RECURRENT in sys.modules and getattr(scheduler.req_to_token_pool, "mamba_pool", None) is not None:
        last = int(scheduler.server_args.speculative_num_draft_tokens) - 1
        mutants.missing += RecurrentSites(mutants, last=last).install()
    if controller := getattr(scheduler.tree_cache, "cache_controller", None):
        mutants.missing += HostSites(mutants, controller).install()
    if getattr(scheduler, "disagg_metadata_buffers", None) is not None:
        mutants.missing += HandoffSites(mutants).install()
    return mutants


class Sites:
    """The wrappers of one scheduler process: each is given what it wraps first, then the arguments of the call."""

    def __init__(self, mutants: ArmedMutants) -> None:
        self._mutants = mutants
        self._probe, self._recorder, self._release = mutants.probe, mutants.recorder, mutants.probe.release
        self._target_head: Any = None
        #: phase, step and shares of the forward in progress; what its plans became, by the identity of each
        self._place: tuple[str, int, list[Share]] | None = None
        self._plans: dict[int, tuple[Any, Any]] = {}

    def install(self, scheduler: Any) -> list[str]:
        """Wrap every site; returns those this release does not have."""
        release, hooks = self._release, self._probe.hooks
        worker = sys.modules[release.worker_module]
        runner = sys.modules["sglang.srt.model_executor.model_runner"]
        batch = sys.modules["sglang.srt.managers.schedule_batch"]
        pool = type(scheduler.token_to_kv_pool_allocator)
        pools = sys.modules[pool.__module__]
        known = len(hooks.missing)
        hooks.wrap(runner, "ModelRunner.forward", around(self._forward))
        hooks.wrap(worker, "select_top_k_tokens", around(self._choices))
        if BACKEND in sys.modules:
            for name in ("forward_decode", "forward_extend"):
                hooks.wrap(sys.modules[BACKEND], f"TritonAttnBackend.{name}", around(self._attends))
        inside: list[tuple[Any, str, Callable[..., Any]]] = [
            (worker, f"{release.worker}.forward_batch_generation", self._batch_starts),
            (worker, f"{release.draft}.{release.draft_prefill}", self._prompt_proposals),
            (worker, f"{release.draft}.{release.draft_extend}", self._extend_proposals),
            (worker, f"{release.draft}.draft_forward", self._candidates),
            (batch, "ScheduleBatch.filter_batch", self._filter),
            (batch, "Req._check_str_based_finish", self._ending),
            (sys.modules["sglang.srt.speculative.eagle_info"], "EagleDraftInput.filter_batch", self._kept),
            (sys.modules[release.alarm], "raise_error_or_warn", self._alarm),
            (pools, f"{pool.__name__}.alloc", self._alloc),
            (pools, f"{pool.__name__}.free", self._free),
        ]
        if "free_segment" in vars(pool):  # a paged pool from 0.5.17 on gives rows back without `free`
            inside.append((pools, f"{pool.__name__}.free_segment", self._free))
        scheduling = sys.modules["sglang.srt.managers.scheduler"]
        inside.append((scheduling, "Scheduler._abort_on_queued_limit", self._queue))
        if hasattr(batch.ScheduleBatch, KEPT_FIRST):  # 0.5.17 and later
            inside.append((batch, f"ScheduleBatch.{KEPT_FIRST}", self._kept_first))
        parallel = sys.modules["sglang.srt.distributed.parallel_state"]
        inside += [
            (parallel, "GroupCoordinator.all_reduce", self._reduced),
            (parallel, "GroupCoordinator.all_gather", self._gathered),
        ]
        loader = sys.modules.get(WEIGHTS[0])  # until 0.5.16 the model runner loads them itself
        updates = (loader, WEIGHTS[1]) if loader else (runner, "ModelRunner")
        inside += [(updates[0], f"{updates[1]}.{name}", self._weights) for name in UPDATES]
        if adapters := sys.modules.get(ADAPTERS[0]):
            inside.append((adapters, ADAPTERS[1], self._adapters))
        updater = getattr(scheduler, "weight_updater", None)
        if updater is not None:  # it keeps the method that it calls
            updater.flush_cache = partial(self._flush, updater.flush_cache)
        for module, dotted, site in inside:
            hooks.wrap(module, dotted, around(site), innermost=True)
        return hooks.missing[known:]

    # -- batches and requests ----------------------------------------------------------------------------------

    def _batch_starts(self, original: Original, worker: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        if self._recorder.round is not None:
            self._mutants.batch_begins(self._recorder.round.index + 1)
            self._requests(list(batch.reqs or []))
        return original(worker, batch, *args, **kwargs)

    def _requests(self, reqs: list[Any]) -> None:
        limits = torch.tensor([req.sampling_params.max_new_tokens for req in reqs], dtype=torch.int64)
        aborted = torch.tensor([req.to_finish is not None for req in reqs], dtype=torch.bool)
        values = {"limits": limits, "stops": torch.ones(len(reqs), dtype=torch.bool), "aborted": aborted}
        changed = self._mutants.apply("requests", values, shares=one_each(reqs))
        for req, limit, stops in zip(reqs, (values | changed)["limits"], (values | changed)["stops"], strict=True):
            if "limits" in changed:
                req.sampling_params.max_new_tokens = int(limit)
            if not stops:
                req.sampling_params.stop_token_ids = set()
            if "aborted" in changed:
                req.to_finish = None

    def _queue(self, original: Original, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        limit = scheduler.max_queued_requests
        if limit is None:
            return original(scheduler, *args, **kwargs)
        changed = self._mutants.apply("queue", {"limit": torch.tensor([limit])})
        scheduler.max_queued_requests = int(changed["limit"][0]) if "limit" in changed else limit
        try:
            return original(scheduler, *args, **kwargs)
        finally:
            scheduler.max_queued_requests = limit

    def _kept_first(self, original: Original, _batch: Any, reqs: list[Any], *args: Any) -> list[int]:
        values = {"order": torch.tensor(original(reqs, *args), dtype=torch.int64)}
        kept: list[int] = (values | self._mutants.apply("retraction", values, shares=one_each(reqs)))["order"].tolist()
        return kept

    def _filter(
        self, original: Original, batch: Any, exclude: Any = None, keep_indices: Any = None, **kwargs: Any
    ) -> Any:
        exclude = kwargs.pop("chunked_req_to_exclude", kwargs.pop("reqs_to_exclude", exclude))
        if keep_indices is None and self._mutants.at("batch"):
            left_out = exclude if isinstance(exclude, list) else [exclude]
            finished = torch.tensor([req.finished() for req in batch.reqs], dtype=torch.bool)
            keep = [i for i, req in enumerate(batch.reqs) if not finished[i] and req not in left_out]
            values = {"keep": torch.tensor(keep, dtype=torch.int64), "finished": finished}
            changed = self._mutants.apply("batch", values, shares=one_each(batch.reqs))
            keep_indices = changed["keep"].tolist() if "keep" in changed else None
        return original(batch, exclude, keep_indices, **kwargs)

    def _ending(self, original: Original, req: Any, *args: Any, **kwargs: Any) -> Any:
        ended = original(req, *args, **kwargs)
        length = len(req.output_ids) if req.finished_len is None else req.finished_len
        changed = self._mutants.apply("ending", {"length": torch.tensor(length)}) if ended else {}
        if "length" in changed:
            req.finished_len = int(changed["length"])
            if req.finished_len > len(req.output_ids):  # there is no such token yet, and nobody looks again
                req.finished_reason, req.finished_len = None, None
                return False
        return ended

    def _kept(self, original: Original, draft_input: Any, new_indices: Any, *args: Any, **kwargs: Any) -> Any:
        rows = self._mutants.apply("kept", {"rows": new_indices}).get("rows", new_indices)
        return original(draft_input, rows, *args, **kwargs)

    # -- forwards ----------------------------------------------------------------------------------------------

    def _forward(self, original: Original, runner: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        mutants, current = self._mutants, self._recorder.round
        if not mutants.armed or current is None:
            return original(runner, forward_batch, *args, **kwargs)
        phase = self._probe.phase_of(runner, forward_batch)
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

    # -- weights -----------------------------------------------------------------------------------------------

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

    # -- what ranks exchange -----------------------------------------------------------------------------------

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

    # -- drafting ----------------------------------------------------------------------------------------------

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
            each = [Share(one.rid, i, 1, one.start, one.final, one.attempt) for i, one in enumerate(shares)]
            self._mutants.change("proposals", draft_input, PROPOSALS, phase=phase, shares=each)

    # -- the pool ----------------------------------------------------------------------------------------------

    def _alloc(self, original: Original, pool: Any, *args: Any, **kwargs: Any) -> Any:
        slots = original(pool, *args, **kwargs)
        if slots is None or not len(slots):
            return slots
        return self._mutants.apply("alloc", {"slots": slots}).get("slots", slots)

    def _free(self, original: Original, pool: Any, slots: Any, *args: Any, **kwargs: Any) -> Any:
        if len(slots):
            slots = self._mutants.apply("free", {"slots": slots}).get("slots", slots)
        return original(pool, slots, *args, **kwargs)

    def _alarm(self, original: Original, obj: Any, strict: bool, *args: Any, **kwargs: Any) -> Any:
        """SGLang's own check of an idle pool only warns where a mutant asks for it: ours has to find the defect."""
        warned = any(armed.mutant.args.get("alarm") == "off" for armed in self._mutants.armed)
        return original(obj, strict and not warned, *args, **kwargs)
