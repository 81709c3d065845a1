"""Where mutants of whole requests act: the queue, the batch, what ends a request, the KV pool, and what is sent back.

Engine side: standard library, torch and SGLang only.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch

from ..hooks import Original
from ..probes.recorder import plain_rid
from .armed import Place, Sites, one_each
from .registry import Share

BATCH = "sglang.srt.managers.schedule_batch"
#: Who is kept first where the pool runs out; 0.5.17 and later.
KEPT_FIRST = "_get_decode_retraction_order"
#: From where answers leave; 0.5.13 and later.
SENDER = "sglang.srt.managers.scheduler_components.output_sender"
#: Value of the site -> field of a batch of answers, which has an entry a request.
ANSWERS = {
    "logprobs": "output_token_logprobs_val",
    "states": "output_hidden_states",
    "verifies": "spec_verify_ct",
    "cached": "cached_tokens",
    "completion": "completion_tokens",
}


class RequestSites(Sites):
    """Around the queue, the running batch and the KV pool."""

    def places(self) -> Iterator[Place]:
        release, pool = self._release, type(self._scheduler.token_to_kv_pool_allocator)
        pools = pool.__module__
        yield Place(release.worker_module, f"{release.worker}.forward_batch_generation", self._batch_starts)
        yield Place(BATCH, "ScheduleBatch.filter_batch", self._filter)
        yield Place(BATCH, "Req._check_str_based_finish", self._ending)
        yield Place("sglang.srt.speculative.eagle_info", "EagleDraftInput.filter_batch", self._kept)
        yield Place(release.alarm, "raise_error_or_warn", self._alarm)
        yield Place(pools, f"{pool.__name__}.alloc", self._alloc)
        yield Place(pools, f"{pool.__name__}.free", self._free)
        yield Place("sglang.srt.managers.scheduler", "Scheduler._abort_on_queued_limit", self._queue)
        if "free_segment" in vars(pool):  # a paged pool from 0.5.17 on gives rows back without `free`
            yield Place(pools, f"{pool.__name__}.free_segment", self._free)
        if hasattr(sys.modules[BATCH].ScheduleBatch, KEPT_FIRST):
            yield Place(BATCH, f"ScheduleBatch.{KEPT_FIRST}", self._kept_first)

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


class AnswerSites(Sites):
    """Around what leaves the scheduler, behind all that the probe sees."""

    def places(self) -> Iterator[Place]:
        if SENDER in sys.modules:
            yield Place(SENDER, "SenderWrapper.send_output", self._sent)

    def _sent(self, original: Original, sender: Any, output: Any, *args: Any, **kwargs: Any) -> Any:
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
