"""Hooks on the EAGLE worker and the model runners: turns what SGLang does into recorder calls.

Engine side: standard library, torch and SGLang only. It must not change any value SGLang computes, and must not
record a name it could not find as if it had been observed: what is missing is listed in the handshake.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ...both_sides.compat import Release
from ..hooks import HookRegistry, Original
from .attention_probe import AttentionProbe
from .captured_graph import CapturedGraph
from .graph_probe import GraphProbe
from .names import CHAIN_CHOOSER, STATES_COPIED, TRIVIAL_VERIFY, read_batch
from .pool_probe import PoolProbe
from .recorder import Recorder, ints
from .snapshot import Copy, Tensors, inputs_of, outputs_of
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
        self.attention = AttentionProbe(recorder, self.hooks, rows=rows)
        self._pools = PoolProbe(recorder)
        self._replays = 0
        #: whether a draft extend leaves requests out and packs the rows of the others
        self._packs = release.generation == "v1"
        #: small tensors of a round's own, which only the older workers write to before it is over
        self._kept = recorder.copied if release.generation == "v1" else recorder.held
        #: what goes into the forward in progress, until it was copied, and the copy
        self._inputs: Tensors | None = None
        self._before: Copy | None = None
        #: tokens that the model in progress was given, padding included
        self._given = 0
        #: the worker's table of target ids, as it was found and as int64 [V']
        self._hot_ids: tuple[Any, np.ndarray] | None = None
        #: whether the drafting call in progress speaks of ids of the draft's own vocabulary
        self._mapped = False
        #: whether some rank of the group runs a prefill in the current round; an idle one then enters that too
        self._prefills = False
        #: whether the number of steps changes while SGLang serves
        self._adaptive = adaptive

    def install(self) -> None:
        """Wrap the worker, the drafting calls and the model runner; call after the worker modules were imported."""
        release = self.release
        module = sys.modules[release.worker_module]
        runner = sys.modules["sglang.srt.model_executor.model_runner"]
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
        wrap(runner, "ModelRunner.forward", self._forward)
        if hasattr(runner.ModelRunner, STATES_COPIED):
            wrap(runner, f"ModelRunner.{STATES_COPIED}", self._pools.states_copied)
        self.attention.install()
        if self.graphs is not None:
            self.graphs.wanted = lambda: self.recorder.round is not None
            self.graphs.on_replay = self._replayed
            self.graphs.on_eager = self._take_given
            self.graphs.before_replay = self.recorder.before_replay

    # -- rounds ------------------------------------------------------------------------------------------------

    def _round(self, original: Original) -> Original:
        recorder = self.recorder

        def forward_batch_generation(worker: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
            if not recorder.active:
                return original(worker, batch, *args, **kwargs)
            recorder.open_round(**read_batch(batch, self._kept))
            self._prefills = bool(batch.forward_mode.is_extend() or getattr(batch, "is_extend_in_batch", False))
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
        self._mapped = hot_ids is not None
        if not self._mapped:
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
        layered = self.release.layered
        self.recorder.note("proposals", copy, phase=phase, requests=requests, mapped=self._mapped, layered=layered)

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

    # -- model forwards ----------------------------------------------------------------------------------------

    def _forward(self, original: Original) -> Original:
        recorder = self.recorder

        def forward(runner: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
            if recorder.round is None:
                return original(runner, forward_batch, *args, **kwargs)
            phase = self.phase_of(runner, forward_batch)
            step = recorder.step if runner.is_draft_worker else 0  # also the layer, where layers draft
            at = {"step": step, "round": recorder.round.index}
            recorder.last = {"phase": phase, **at, "rids": recorder.round.rids}
            live = bool(recorder.round.rids)
            replays, is_draft = self._replays, bool(runner.is_draft_worker)
            if live:  # an idle rank has no rows
                if not is_draft:
                    self._pools.begins(runner, forward_batch, phase)
                self._goes_in(
                    inputs_of(forward_batch.input_ids, forward_batch.positions, forward_batch, is_draft=is_draft)
                )
                self.attention.begins()
            output = original(runner, forward_batch, *args, **kwargs)
            read, how = self.attention.ends()
            if self._replays == replays:  # else a graph ran, and what happened inside it is recorded
                partly = self.graphs is not None and self.graphs.partly
                self._entered(phase, graph=self._given if partly else 0)
                if live:
                    facts = {"phase": phase, "step": step, "mapped": self._mapped and is_draft, **how}
                    recorder.note("forward", self._went_in(), self._comes_out(output.logits_output), read, **facts)
            self._inputs = None
            return output

        return forward

    def _goes_in(self, inputs: Tensors) -> None:
        """Copied at once; where there are graphs, only once a model really runs, since a graph keeps its own."""
        self._inputs, self._before = inputs, None
        if self.graphs is None:
            self._take_inputs()

    def _take_given(self, given: Tensors) -> None:
        """The inputs as the model itself is given them, without the padding behind them."""
        tokens = given["input_ids"]
        self._given = 0 if tokens is None else int(tokens.shape[0])
        if self._inputs is not None:
            self._inputs = {name: _leading(given[name], asked) for name, asked in self._inputs.items()}
        self._take_inputs()

    def _take_inputs(self) -> None:
        if self._inputs is not None:
            self._before, self._inputs = self.recorder.copied(self._inputs), None

    def _went_in(self) -> Copy | None:
        self._take_inputs()
        return self._before

    def _comes_out(self, output: Any) -> Copy | None:
        """All logits of a small vocabulary: that is one copy where working out what is kept of them is many."""
        whole_below = WHOLE_BELOW if self.recorder.staging is not None else 0
        return self.recorder.copied(outputs_of(output, whole_below=whole_below))

    def _entered(self, phase: str, *, graph: int = 0, count: int = 1) -> None:
        """More forwards of the round; graph: the batch size they were captured for, 0 for an eager one."""
        current = self.recorder.round
        assert current is not None
        current.forwards[phase] = current.forwards.get(phase, 0) + count
        if graph:
            current.graphs[phase] = graph
        if phase in DRAFTING:
            self.recorder.step += count

    def _replayed(self, captured: CapturedGraph) -> None:
        """What one graph did, recorded as if each of its forwards and choices had just happened."""
        recorder = self.recorder
        current = recorder.round
        assert current is not None
        self._replays += 1
        draft, target = recorder.phase or "DRAFT", self._phase(is_draft=False)
        if current.rids:  # an idle rank has no rows
            facts = {"step": recorder.step, "mapped": self._mapped, "packs": self._packs}
            recorder.replayed(captured, (target, draft), facts)
        for is_draft, batch, count in captured.runs:
            phase = draft if is_draft else target
            self._entered(phase, graph=batch, count=count)
        if captured.runs:
            at = {"step": recorder.step - 1 if is_draft else 0, "round": current.index}
            recorder.last = {"phase": phase, **at, "rids": current.rids}

    def phase_of(self, runner: Any, forward_batch: Any) -> str:
        """The Phase of a forward that `runner` is about to run in the current round."""
        return self._phase(is_draft=runner.is_draft_worker)

    def _phase(self, *, is_draft: bool) -> str:
        if is_draft:
            return self.recorder.phase or "DRAFT"
        current = self.recorder.round
        mode = "" if current is None else current.mode
        return "PREFILL" if mode == "PREFILL" or (mode == "IDLE" and self._prefills) else "VERIFY"

    def _rids(self) -> list[str]:
        return [] if self.recorder.round is None else self.recorder.round.rids


def _leading(given: torch.Tensor | None, asked: torch.Tensor | None) -> torch.Tensor | None:
    """As many rows of what a model is given as it was asked for; what was asked for, where it is given fewer."""
    if given is None or asked is None or given.shape[0] < asked.shape[0]:
        return asked
    return given[: asked.shape[0]]


#: Vocabularies up to this travel as they are from a GPU: a row of float16 is at most as long as its hidden states.
WHOLE_BELOW = 2049
#: Phases whose logits are over the draft's vocabulary.
DRAFTING = ("DRAFT_PREFILL", "DRAFT", "EXTEND")
