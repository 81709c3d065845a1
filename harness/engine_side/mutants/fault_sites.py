"""Where mutants act: wraps the places in SGLang, reads what is there, and puts back what the mutants make of it.

Engine side: standard library, torch and SGLang only. Changes of what goes in sit outside the probe, changes of what
comes out inside it. It must leave everything as it is where no mutant acts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch

from ..probes.names import TAIL_COPIER, sampled_walks
from .fault_acts import Share
from .fault_acts_idle import SKIPS, Memory, changed
from .fault_values import COINS, inputs_of, people, replaced

if TYPE_CHECKING:
    from .fault_wraps import Faults

Original = Callable[..., Any]

#: Acts of the site "forward": they change no value but whether a forward runs.
FORWARD_ACTS = ("skip", "twice")


class Sites:
    """The wrappers of one scheduler process."""

    def __init__(self, faults: Faults) -> None:
        self._faults = faults
        self._probe, self._recorder, self._release = faults.probe, faults.recorder, faults.release
        self._memory = Memory()

    def install(self, scheduler: Any) -> list[str]:
        """Wrap every place; returns those this release does not have."""
        release, ledger = self._release, self._probe.ledger
        worker = sys.modules[release.worker_module]
        runner = sys.modules["sglang.srt.model_executor.model_runner"]
        batch = sys.modules["sglang.srt.managers.schedule_batch"]
        pool = type(scheduler.token_to_kv_pool_allocator)
        known = len(ledger.missing)
        ledger.wrap(runner, "ModelRunner.forward", self._forward)
        ledger.wrap(worker, "select_top_k_tokens", self._choices)
        inside: list[tuple[Any, str, Callable[[Original], Original]]] = [
            (worker, f"{release.worker}.forward_batch_generation", self._batch_starts),
            (worker, f"{release.draft}.{release.draft_prefill}", self._proposals("DRAFT_PREFILL")),
            (worker, f"{release.draft}.{release.draft_extend}", self._proposals("EXTEND")),
            (worker, f"{release.draft}.draft_forward", self._candidates),
            (worker, f"{release.draft}.draft", self._tree),
            (sys.modules[release.greedy], "verify_tree_greedy_func", self._accept),
            (batch, "ScheduleBatch.filter_batch", self._filter),
            (sys.modules[release.alarm], "raise_error_or_warn", self._alarm),
            (sys.modules[pool.__module__], f"{pool.__name__}.alloc", self._alloc),
            (sys.modules[pool.__module__], f"{pool.__name__}.free", self._free),
        ]
        pages = sys.modules.get(release.sample[0]) if release.sample else None
        if hasattr(pages, TAIL_COPIER):  # 0.5.13 and later
            inside.append((pages, TAIL_COPIER, self._tails))
        inside += [(owner, name, self._coins) for owner, name in sampled_walks(release)]
        for module, dotted, make in inside:
            ledger.wrap(module, dotted, make, innermost=True)
        return ledger.missing[known:]

    def _batch_starts(self, original: Original) -> Original:
        def forward_batch_generation(worker: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
            if self._recorder.round is not None:
                self._faults.batch_begins(self._recorder.round.index + 1)
                self._requests(list(batch.reqs or []))
            return original(worker, batch, *args, **kwargs)

        return forward_batch_generation

    def _requests(self, reqs: list[Any]) -> None:
        limits = torch.tensor([req.sampling_params.max_new_tokens for req in reqs], dtype=torch.int64)
        values = {"limits": limits, "stops": torch.ones(len(reqs), dtype=torch.bool)}
        changed = self._faults.apply("requests", values, shares=people(reqs))
        for req, limit, stops in zip(reqs, (values | changed)["limits"], (values | changed)["stops"], strict=True):
            if "limits" in changed:
                req.sampling_params.max_new_tokens = int(limit)
            if not stops:
                req.sampling_params.stop_token_ids = set()

    def _forward(self, original: Original) -> Original:
        def forward(runner: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._faults.armed or self._recorder.round is None:
                return original(runner, forward_batch, *args, **kwargs)
            phase = self._probe.phase_of(runner, forward_batch)
            step = self._recorder.step if runner.is_draft_worker else 0
            if not self._recorder.round.rids:
                output = self._idle(
                    lambda: original(runner, forward_batch, *args, **kwargs), forward_batch, phase, step
                )
                self._faults.outputs[phase] = output
                return output
            self._memory.keep(phase, forward_batch)
            acts = {armed.fault.act: armed for armed in self._faults.at("forward", phase)}
            if "skip" in acts and step == acts["skip"].fault.args["step"]:
                acts["skip"].fired += 1
                return self._faults.outputs[phase]
            values = inputs_of(forward_batch)
            shares = self._faults.shares(phase, len(values["input_ids"]))
            changed = self._faults.apply("inputs", values, phase=phase, step=step, shares=shares)
            with replaced(forward_batch, changed):
                output = original(runner, forward_batch, *args, **kwargs)
                if "twice" in acts:
                    acts["twice"].fired += 1
                    output = original(runner, forward_batch, *args, **kwargs)
            self._faults.outputs[phase] = output
            return output

        return forward

    def _idle(self, go_on: Callable[[], Any], forward_batch: Any, phase: str, step: int) -> Any:
        """A forward of a rank without requests."""
        with ExitStack() as stack:
            for armed in self._faults.at("idle", phase):
                if armed.fault.args.get("step", step) != step:
                    continue
                if armed.fault.act in SKIPS:
                    if phase in self._faults.outputs:  # else there is nothing to give in its place yet
                        armed.fired += 1
                        return self._faults.outputs[phase]
                    continue
                kept = self._memory.states.get(phase)
                change = changed(armed.fault.act, forward_batch, args=armed.fault.args, kept=kept)
                armed.fired += stack.enter_context(change)
            return go_on()

    def _choices(self, original: Original) -> Original:
        def select_top_k_tokens(
            i: int, probs: Any, ids: Any, hidden: Any, scores: Any, topk: int, *args: Any, **kwargs: Any
        ) -> Any:
            if self._recorder.phase == "DRAFT" and self._recorder.round is not None and ids.numel():
                values = {"probs": probs, "ids": ids} | ({} if scores is None else {"scores": scores})
                shares = self._faults.shares("DRAFT", len(ids))
                # At i = 0 these are the proposals handed over from the round before.
                changed = self._faults.apply("choices", values, phase="DRAFT", step=i, shares=shares) if i else {}
                made = values | changed
                probs, ids, scores = made["probs"], made["ids"], made.get("scores")
            return original(i, probs, ids, hidden, scores, topk, *args, **kwargs)

        return select_top_k_tokens

    def _candidates(self, original: Original) -> Original:
        def draft_forward(worker: Any, *args: Any, **kwargs: Any) -> Any:
            with self._vocabulary(worker):
                result = original(worker, *args, **kwargs)
            if not self._faults.at("candidates", "DRAFT"):
                return result
            names = ("parents", "selected", "tokens")
            values = dict(zip(names, result[:3], strict=True))
            made = values | self._faults.apply("candidates", values, phase="DRAFT")
            return (*(made[name] for name in names), *result[3:])

        return draft_forward

    @contextmanager
    def _vocabulary(self, worker: Any) -> Iterator[None]:
        """The map of draft ids for one round's steps; the probe reads the worker's own beside it."""
        own = getattr(worker, "hot_token_id", None)
        changed = {} if own is None else self._faults.apply("vocabulary", {"map": own}, phase="DRAFT")
        if "map" in changed:
            worker.hot_token_id = changed["map"]
        try:
            yield
        finally:
            if "map" in changed:
                worker.hot_token_id = own

    def _tree(self, original: Original) -> Original:
        def draft(worker: Any, *args: Any, **kwargs: Any) -> Any:
            verify_input = original(worker, *args, **kwargs)
            if self._faults.at("tree", "VERIFY") and verify_input.retrieve_next_token is not None:
                names = {"next_token": "retrieve_next_token", "next_sibling": "retrieve_next_sibling"}
                names["mask"] = "custom_mask"
                values = {name: getattr(verify_input, attribute) for name, attribute in names.items()}
                shares = self._faults.shares("VERIFY", values["next_token"].numel())
                for name, value in self._faults.apply("tree", values, phase="VERIFY", shares=shares).items():
                    setattr(verify_input, names[name], value)
            return verify_input

        return draft

    def _tails(self, original: Original) -> Original:
        def duplicate(pool: Any, rows: Any, base: Any, tail: Any, *args: Any, **kwargs: Any) -> Any:
            changed = self._faults.apply("tails", {"last_page": tail}, phase="DRAFT")
            return original(pool, rows, base, changed.get("last_page", tail), *args, **kwargs)

        return duplicate

    def _accept(self, original: Original) -> Original:
        def verify_tree_greedy_func(*args: Any, **kwargs: Any) -> Any:
            predict, accept_index, drafts = original(*args, **kwargs)
            values = {"predict": predict, "accept_index": accept_index, "drafts": drafts}
            links = {"next_token": kwargs["retrieve_next_token"], "target": kwargs["target_predict"]}
            made = values | self._faults.apply("accept", values | links, phase="VERIFY")
            return made["predict"], made["accept_index"], made["drafts"]

        return verify_tree_greedy_func

    def _coins(self, original: Original) -> Original:
        def walk(*args: Any, **kwargs: Any) -> Any:
            changed = self._faults.apply("coins", {name: kwargs[own] for name, own in COINS.items()}, phase="VERIFY")
            return original(*args, **{**kwargs, **{COINS[name]: value for name, value in changed.items()}})

        return walk

    def _proposals(self, phase: str) -> Callable[[Original], Original]:
        def make(original: Original) -> Original:
            def draft_over_tokens(worker: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
                result = original(worker, batch, *args, **kwargs)
                if self._faults.at("proposals", phase):
                    owner = result if result is not None else batch.spec_info
                    if phase == "EXTEND" and self._release.generation == "v2":
                        owner = args[0].next_draft_input
                    self._hand_over(phase, owner)
                return result

            return draft_over_tokens

        return make

    def _hand_over(self, phase: str, draft_input: Any) -> None:
        names = {"ids": "topk_index", "probs": "topk_p", "hidden": "hidden_states"}
        values = {name: getattr(draft_input, attribute) for name, attribute in names.items()}
        shares = [
            Share(share.rid, number, 1, share.start, share.final, share.epoch)
            for number, share in enumerate(self._faults.shares(phase, 0))
        ]
        for name, value in self._faults.apply("proposals", values, phase=phase, shares=shares).items():
            setattr(draft_input, names[name], value)

    def _filter(self, original: Original) -> Original:
        def filter_batch(batch: Any, exclude: Any = None, keep_indices: Any = None, **kwargs: Any) -> Any:
            exclude = kwargs.pop("chunked_req_to_exclude", kwargs.pop("reqs_to_exclude", exclude))
            if keep_indices is None and self._faults.at("batch", ""):
                left_out = exclude if isinstance(exclude, list) else [exclude]
                finished = torch.tensor([req.finished() for req in batch.reqs], dtype=torch.bool)
                keep = [i for i, req in enumerate(batch.reqs) if not finished[i] and req not in left_out]
                values = {"keep": torch.tensor(keep, dtype=torch.int64), "finished": finished}
                changed = self._faults.apply("batch", values, shares=people(batch.reqs))
                keep_indices = changed["keep"].tolist() if "keep" in changed else None
            return original(batch, exclude, keep_indices, **kwargs)

        return filter_batch

    def _alarm(self, original: Original) -> Original:
        """SGLang's own check of an idle pool only warns where a mutant asks for it: ours has to find the fault."""

        def raise_error_or_warn(obj: Any, strict: bool, *args: Any, **kwargs: Any) -> Any:
            warned = any(armed.fault.args.get("alarm") == "off" for armed in self._faults.armed)
            return original(obj, strict and not warned, *args, **kwargs)

        return raise_error_or_warn

    def _alloc(self, original: Original) -> Original:
        def alloc(pool: Any, *args: Any, **kwargs: Any) -> Any:
            slots = original(pool, *args, **kwargs)
            if slots is None or not len(slots):
                return slots
            return self._faults.apply("alloc", {"slots": slots}).get("slots", slots)

        return alloc

    def _free(self, original: Original) -> Original:
        def free(pool: Any, slots: Any, *args: Any, **kwargs: Any) -> Any:
            if len(slots):
                slots = self._faults.apply("free", {"slots": slots}).get("slots", slots)
            return original(pool, slots, *args, **kwargs)

        return free
