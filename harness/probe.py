"""Hooks on the EAGLE worker and the model runners: turns what SGLang does into recorder calls.

Engine side: standard library, torch and SGLang only. It must not change any value SGLang computes, and must not
record a name it could not find as if it had been observed: what is missing is listed in the handshake.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from .compat import Release
from .graph_probe import Copy, GraphProbe, Replayed, best_first, inputs_of, whole_forward, without_padding
from .hooks import Ledger
from .recorder import Arrays, Recorder, floats, ints, plain_rid
from .tail_probe import holes, wrong_copies

Original = Callable[..., Any]


class Probe:
    """Installs every hook of one release in one scheduler process."""

    def __init__(self, recorder: Recorder, release: Release, graphs: GraphProbe | None = None) -> None:
        self.recorder = recorder
        self.release = release
        self.graphs = graphs
        self.ledger = Ledger() if graphs is None else graphs.ledger
        self._replays = 0
        #: target id of each draft id, int64 [V'], of the drafting call in progress; None: they are the same
        self._target_ids: np.ndarray | None = None
        #: whether some rank of the group runs a prefill in the current round; an idle one then enters that too
        self._prefills = False

    def install(self) -> None:
        """Wrap the worker, the drafting calls and the model runner; call after the worker modules were imported."""
        release = self.release
        module = sys.modules[release.worker_module]
        runner = sys.modules["sglang.srt.model_executor.model_runner"]
        wrap = self.ledger.wrap
        self.install_rounds()
        wrap(module, f"{release.draft}.draft", self._draft)
        wrap(module, f"{release.draft}.{release.draft_prefill}", self._draft_prefill)
        wrap(module, f"{release.draft}.{release.draft_extend}", self._draft_extend)
        wrap(module, "select_top_k_tokens", self._select)
        if hasattr(module, CHAIN_CHOOSER):  # GPU releases from 0.5.16 on, for chains
            wrap(module, CHAIN_CHOOSER, self._choose_chain)
        sampler = sys.modules[release.greedy]
        for name in SAMPLED_WALKS:
            if getattr(sampler, name, None) is not None:
                wrap(sampler, name, self._coins)
        pages = sys.modules.get(release.sample[0]) if release.sample else None
        if pages is not None and hasattr(pages, TAIL_COPIER):
            wrap(pages, TAIL_COPIER, self._tails)
        wrap(runner, "ModelRunner.forward", self._forward)
        if self.graphs is not None:
            self.graphs.wanted = lambda: self.recorder.round is not None
            self.graphs.on_replay = self._replayed

    def install_rounds(self) -> None:
        """Only what tells which batches ran and what they committed: the token level."""
        release = self.release
        module = sys.modules[release.worker_module]
        self.ledger.wrap(module, f"{release.worker}.forward_batch_generation", self._round)
        if release.sample is None:
            self.ledger.wrap(module, f"{release.worker}.verify", self._verify_v1)
        else:
            self.ledger.wrap(sys.modules[release.sample[0]], release.sample[1], self._sample)

    # -- rounds ------------------------------------------------------------------------------------------------

    def _round(self, original: Original) -> Original:
        recorder = self.recorder

        def forward_batch_generation(worker: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
            if not recorder.active:
                return original(worker, batch, *args, **kwargs)
            recorder.open_round(**read_batch(batch))
            self._prefills = bool(batch.forward_mode.is_extend() or getattr(batch, "is_extend_in_batch", False))
            try:
                return original(worker, batch, *args, **kwargs)
            finally:
                recorder.phase = None
                recorder.close_round()

        return forward_batch_generation

    def _in_phase(self, phase: str, original: Original, after: Callable[..., None]) -> Original:
        recorder = self.recorder

        def call(worker: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
            if recorder.round is None:
                return original(worker, batch, *args, **kwargs)
            recorder.phase, recorder.step = phase, 0
            ids = getattr(worker, "hot_token_id", None)
            self._target_ids = None if ids is None else ints(ids)
            try:
                result = original(worker, batch, *args, **kwargs)
            finally:
                recorder.phase = None
            after(batch, args, result)
            return result

        return call

    # -- drafting ----------------------------------------------------------------------------------------------

    def _draft(self, original: Original) -> Original:
        return self._in_phase("DRAFT", original, self._after_draft)

    def _after_draft(self, batch: Any, args: tuple[Any, ...], verify_input: Any) -> None:
        links = verify_input.retrieve_next_token
        if links is None or links.numel() == 0:
            return
        self.recorder.tree(parents_of(ints(links), ints(verify_input.retrieve_next_sibling), links.shape[-1]))

    def _draft_prefill(self, original: Original) -> Original:
        return self._in_phase("DRAFT_PREFILL", original, self._after_draft_prefill)

    def _after_draft_prefill(self, batch: Any, args: tuple[Any, ...], result: Any) -> None:
        requests = range(len(self._rids()))
        next_token_ids = args[1]
        if next_token_ids is not None and requests:
            ids = ints(next_token_ids).reshape(len(requests), -1)
            self.recorder.chosen(
                phase="PREFILL", step=0, requests=requests, ids=ids, probs=np.ones(ids.shape, np.float32)
            )
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

    def _proposals(self, phase: str, draft_input: Any, requests: Any) -> None:
        if len(requests) == 0:
            return
        ids, probs = ints(draft_input.topk_index).reshape(draft_input.topk_index.shape), floats(draft_input.topk_p)
        ids = self._as_target(ids)  # mapped by SGLang itself only when the next round begins
        width = 1 if self.release.layered else ids.shape[1]  # a column a layer, or all from one forward
        for step, at in enumerate(range(0, ids.shape[1], width)):
            own = (slice(None), slice(at, at + width))
            self.recorder.chosen(phase=phase, step=step, requests=requests, ids=ids[own], probs=probs[own])

    def _as_target(self, draft_ids: np.ndarray) -> np.ndarray:
        """Ids of the draft's own vocabulary as the target's; one that is in neither is -1."""
        if self._target_ids is None:
            return draft_ids
        known = (draft_ids >= 0) & (draft_ids < len(self._target_ids))
        return np.where(known, self._target_ids[np.where(known, draft_ids, 0)], -1)

    def _select(self, original: Original) -> Original:
        recorder = self.recorder

        def select_top_k_tokens(i: int, topk_p: Any, topk_index: Any, *args: Any, **kwargs: Any) -> Any:
            if recorder.phase == "DRAFT" and recorder.round is not None and i > 0 and topk_index.numel():
                requests = range(len(recorder.round.rids))
                ids = ints(topk_index).reshape(-1, topk_index.shape[-1])
                recorder.chosen(
                    phase="DRAFT", step=i - 1, requests=requests, ids=ids, probs=floats(topk_p).reshape(ids.shape)
                )
            return original(i, topk_p, topk_index, *args, **kwargs)

        return select_top_k_tokens

    def _choose_chain(self, original: Original) -> Original:
        """A fused kernel that stands where a chain's `select_top_k_tokens` was: returns (probabilities, ids)."""
        recorder = self.recorder

        def choose(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if recorder.phase == "DRAFT" and recorder.round is not None and result[1].numel():
                requests = range(len(recorder.round.rids))
                ids = ints(result[1]).reshape(-1, result[1].shape[-1])
                probs = floats(result[0]).reshape(ids.shape)
                recorder.chosen(phase="DRAFT", step=recorder.step - 1, requests=requests, ids=ids, probs=probs)
            return result

        return choose

    # -- verify ------------------------------------------------------------------------------------------------

    def _sample(self, original: Original) -> Original:
        def sample(verify_input: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(verify_input, *args, **kwargs)
            if self.recorder.round is not None and self.recorder.round.mode == "DECODE":
                predict, accept_lens, accept_index = (ints(item) for item in result)
                lens = accept_lens.tolist()
                rows = accept_index.reshape(len(lens), -1)
                flat = np.concatenate([rows[i, :length] for i, length in enumerate(lens)])
                self._accepted(lens, flat, predict[flat], verify_input.draft_token_num)
            return result

        return sample

    def _tails(self, original: Original) -> Original:
        """What branches of a paged tree begin with, once it was copied."""
        recorder = self.recorder

        def duplicate(
            pool: Any, rows: Any, base: Any, tail: Any, pages: Any, topk: int, page_size: int, *args: Any, **kwargs: Any
        ) -> Any:
            result = original(pool, rows, base, tail, pages, topk, page_size, *args, **kwargs)
            if recorder.round is not None and recorder.round.rids:
                found = holes(rows, base, tail, pages, topk=topk, page=page_size)
                recorder.tails(holes=[owner for owner, _, _ in found], wrong=wrong_copies(pool, found))
            return result

        return duplicate

    def _coins(self, original: Original) -> Original:
        """The random numbers of a sampled verify, before the kernel gets them."""
        recorder = self.recorder

        def walk(*args: Any, **kwargs: Any) -> Any:
            if recorder.round is not None:
                recorder.coins(
                    rule=getattr(original, "__name__", type(original).__name__),
                    thresholds=[float(kwargs.get(name, 1.0)) for name in ("threshold_single", "threshold_acc")],
                    nodes=floats(kwargs["uniform_samples"]),
                    final=floats(kwargs["uniform_samples_for_final_sampling"]),
                )
            return original(*args, **kwargs)

        return walk

    def _verify_v1(self, original: Original) -> Original:
        def verify(worker: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
            spec_info = args[0] if args else batch.spec_info
            result = original(worker, batch, *args, **kwargs)
            current = self.recorder.round
            if current is not None and current.mode == "DECODE":
                output = result[1]
                lens = [1 + count for count in first_of(output, ACCEPTED_DRAFTS)]
                nodes = ints(first_of(output, ACCEPTED_INDICES))
                self._accepted(lens, nodes, ints(first_of(output, ACCEPTED_TOKENS)), spec_info.draft_token_num)
                current.extend_rids = [i for i, req in enumerate(batch.reqs) if not req.finished()]
            return result

        return verify

    def _accepted(self, lens: list[int], flat_nodes: np.ndarray, tokens: np.ndarray, width: int) -> None:
        owner = np.repeat(np.arange(len(lens)), lens)
        self.recorder.accept(lens=lens, nodes=flat_nodes - owner * width, tokens=tokens)
        current = self.recorder.round
        assert current is not None
        current.extend_rids = list(range(len(lens)))

    # -- model forwards ----------------------------------------------------------------------------------------

    def _forward(self, original: Original) -> Original:
        recorder = self.recorder

        def forward(runner: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
            if recorder.round is None:
                return original(runner, forward_batch, *args, **kwargs)
            phase = self.phase_of(runner, forward_batch)
            step = recorder.step if runner.is_draft_worker else 0  # also the layer, where layers draft
            recorder.last = {"phase": phase, "step": step, "round": recorder.round.index}
            live = bool(recorder.round.rids)
            replays, is_draft = self._replays, bool(runner.is_draft_worker)
            before: dict[str, Copy] = {}  # an idle rank has no rows
            if live:
                before = inputs_of(forward_batch.input_ids, forward_batch.positions, forward_batch, is_draft=is_draft)
            output = original(runner, forward_batch, *args, **kwargs)
            if self._replays == replays:  # else a graph ran, and what happened inside it has been told
                self._entered(phase)
                if live:
                    self._emit(phase, step, whole_forward(before, output.logits_output))
            return output

        return forward

    def _entered(self, phase: str, *, graph: int = 0) -> None:
        """One more forward of the round; graph: the batch size it was captured for, 0 for an eager one."""
        current = self.recorder.round
        assert current is not None
        current.forwards[phase] = current.forwards.get(phase, 0) + 1
        if graph:
            current.graphs[phase] = graph
        if phase in DRAFTING:
            self.recorder.step += 1

    def _replayed(self, calls: list[Replayed]) -> None:
        """What one graph did, told as if each of its forwards and choices had just happened."""
        recorder = self.recorder
        current = recorder.round
        assert current is not None
        self._replays += 1
        for call in calls:
            phase = self._phase(is_draft=call.is_draft)
            if call.what == "chosen":
                if phase == "DRAFT" and current.rids:
                    arrays = self._without_padding(phase, call)
                    requests = range(len(current.rids))
                    step = recorder.step - 1
                    recorder.chosen(phase=phase, step=step, requests=requests, ids=arrays["ids"], probs=arrays["probs"])
                continue
            step = recorder.step if call.is_draft else 0
            recorder.last = {"phase": phase, "step": step, "round": current.index}
            self._entered(phase, graph=call.batch)
            if current.rids:
                self._emit(phase, step, self._without_padding(phase, call))

    def _without_padding(self, phase: str, call: Replayed) -> Arrays:
        current = self.recorder.round
        assert current is not None
        extends = phase == "EXTEND"
        requests = len(current.extend_rids) if extends else len(current.rids)
        packed = 0
        if extends and self.release.generation == "v1":
            packed = sum(current.accept_lens[i] for i in current.extend_rids)
        return {
            name: without_padding(array, batch=call.batch, requests=requests, packed=packed)
            for name, array in call.arrays.items()
        }

    def phase_of(self, runner: Any, forward_batch: Any) -> str:
        """The Phase of a forward that `runner` is about to run in the current round."""
        return self._phase(is_draft=runner.is_draft_worker)

    def _phase(self, *, is_draft: bool) -> str:
        if is_draft:
            return self.recorder.phase or "DRAFT"
        mode = self._round_mode()
        return "PREFILL" if mode == "PREFILL" or (mode == "IDLE" and self._prefills) else "VERIFY"

    def _emit(self, phase: str, step: int, found: Arrays) -> None:
        """One forward: `found` has every row it was fed and every row it gave."""
        current = self.recorder.round
        assert current is not None
        requests = list(range(len(current.rids)))
        rows = len(found["input_ids"])
        if phase in ("PREFILL", "DRAFT_PREFILL"):
            lens = list(current.lens)
        elif phase == "EXTEND":
            requests = list(current.extend_rids)
            lens = [current.accept_lens[i] for i in requests]
        else:
            lens = [rows // max(1, len(requests))] * len(requests)
        keep = kept_rows(lens, rows, len(requests))
        logit_rows, logit_index = output_rows(phase, lens, keep, len(found.get("lse", ())))
        hidden_rows, hidden_index = output_rows(phase, lens, keep, len(found.get("hidden_out", ())))
        arrays = {name: found[name][keep] for name in INPUTS if name in found}
        if logit_rows:
            arrays |= {name: found[name][logit_index] for name in ("top_logits", "lse")}
            arrays["top_ids"] = best_first(found["top_ids"][logit_index], found["best"][logit_index])
            if phase in DRAFTING:
                arrays["top_ids"] = self._as_target(arrays["top_ids"])
        if hidden_rows:
            arrays["hidden_out"] = found["hidden_out"][hidden_index]
        self.recorder.forward(
            phase=phase,
            step=step,
            requests=requests,
            lens=lens,
            arrays=arrays,
            hidden_rows=hidden_rows,
            logit_rows=logit_rows,
        )

    def _rids(self) -> list[str]:
        return [] if self.recorder.round is None else self.recorder.round.rids

    def _round_mode(self) -> str:
        return "" if self.recorder.round is None else self.recorder.round.mode


#: Phases whose logits are over the draft's vocabulary.
DRAFTING = ("DRAFT_PREFILL", "DRAFT", "EXTEND")
#: What goes into a forward, one entry a row.
INPUTS = ("input_ids", "positions", "cache_slots", "hidden_in")
#: What a chain's draft step ends with where `select_top_k_tokens` is not asked.
CHAIN_CHOOSER = "draft_topk1_postprocess"

#: What walks a tree, or a chain, by coins; only a batch with a sampled request asks for one.
SAMPLED_WALKS = ("tree_speculative_sampling_target_only", "chain_speculative_sampling_triton")

#: What copies the unfinished last page of a prefix to where branches begin; only with pages and topk > 1.
TAIL_COPIER = "duplicate_prefix_tail_to_draft_branches"

# Names that changed between releases, newest last; the first one present is read.
PREFIX_LENS = ("prefix_lens", "extend_prefix_lens")
EXTEND_LENS = ("extend_lens", "extend_seq_lens")
ACCEPTED_DRAFTS = ("num_accepted_drafts_per_req_cpu", "num_correct_drafts_per_req_cpu")
ACCEPTED_INDICES = ("accepted_indices", "accept_indices")
ACCEPTED_TOKENS = ("verified_id", "accept_tokens")


def first_of(owner: Any, names: tuple[str, ...]) -> Any:
    """The first of `names` that `owner` has; AttributeError naming them all if there is none."""
    for name in names:
        value = getattr(owner, name, None)
        if value is not None:
            return value
    raise AttributeError(f"{type(owner).__name__} has none of {', '.join(names)}")


def read_batch(batch: Any) -> dict[str, Any]:
    """mode, rids, starts, lens and final of a ScheduleBatch or ModelWorkerBatch (see trace.RoundRecord)."""
    mode = batch.forward_mode
    reqs = list(batch.reqs or [])
    if mode.is_idle() or not reqs:
        return {"mode": "IDLE", "rids": [], "starts": [], "lens": [], "final": []}
    rids = [plain_rid(req.rid) for req in reqs]
    if not mode.is_extend():
        starts = batch.seq_lens.tolist()
        return {"mode": "DECODE", "rids": rids, "starts": starts, "lens": [0] * len(rids), "final": [True] * len(rids)}
    starts = list(first_of(batch, PREFIX_LENS))
    lens = list(first_of(batch, EXTEND_LENS))
    ends = [len(req.origin_input_ids) + len(req.output_ids) for req in reqs]
    final = [start + length >= end for start, length, end in zip(starts, lens, ends, strict=True)]
    return {"mode": "PREFILL", "rids": rids, "starts": starts, "lens": lens, "final": final}


def kept_rows(lens: list[int], rows: int, requests: int) -> np.ndarray:
    """Row numbers of a forward that belong to accepted tokens: a block of equal width a request, or packed rows."""
    if sum(lens) == rows:
        return np.arange(rows)
    width = rows // requests
    return np.concatenate([np.arange(i * width, i * width + length) for i, length in enumerate(lens)])


def output_rows(phase: str, lens: list[int], keep: np.ndarray, produced: int) -> tuple[list[int], list[int]]:
    """Which kept rows an output tensor of `produced` rows speaks of, and which of its rows to read for them.

    Draft-extend outputs matter only at each request's last committed row; one row a request means "last row".
    """
    ends = np.cumsum(lens) - 1
    if produced == 0:
        return [], []
    if produced == len(lens) and produced != len(keep):
        return ends.tolist(), list(range(produced))
    if phase == "EXTEND":
        index = ends if produced == len(keep) else keep[ends]
        return ends.tolist(), np.asarray(index).tolist()
    return list(range(len(keep))), keep.tolist()


def parents_of(next_token: np.ndarray, next_sibling: np.ndarray, width: int) -> np.ndarray:
    """Child and sibling links [b·n] -> parent of every node [b, n], -1 for the root and for unlinked nodes."""
    children = next_token.reshape(-1, width)
    siblings = next_sibling.reshape(-1, width)
    parents = np.full(children.shape, -1, dtype=np.int64)
    for b in range(children.shape[0]):
        for node in range(width):
            child = children[b, node]
            while child != -1:
                parents[b, child] = node
                child = siblings[b, child]
    return parents
