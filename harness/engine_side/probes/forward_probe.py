"""Hooks on the model runners: what goes into a forward and comes out of it, and what the graphs that ran did.

Engine side: standard library, torch and SGLang only. It must not change any value SGLang computes.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from ..hooks import HookRegistry, Original
from .attention_probe import AttentionProbe
from .captured_graph import CapturedGraph
from .graph_probe import GraphProbe
from .names import STATES_COPIED
from .pool_probe import PoolProbe
from .recorder import Recorder
from .snapshot import Copy, Tensors, inputs_of, outputs_of

#: Vocabularies up to this travel as they are from a GPU: a row of float16 is at most as long as its hidden states.
WHOLE_BELOW = 2049
#: Phases whose logits are over the draft's vocabulary.
DRAFTING = ("DRAFT_PREFILL", "DRAFT", "EXTEND")


class ForwardProbe:
    """Of one scheduler process: every forward of a round.

    packs: a draft extend leaves requests out and packs the rows of the others. rows: whether to see too if cached rows
    change (see `AttentionProbe`).
    """

    def __init__(
        self, recorder: Recorder, hooks: HookRegistry, graphs: GraphProbe | None, *, packs: bool, rows: bool
    ) -> None:
        self._recorder, self._hooks, self._graphs, self._packs = recorder, hooks, graphs, packs
        self.attention = AttentionProbe(recorder, hooks, rows=rows)
        self._pools = PoolProbe(recorder)
        #: whether the drafting call in progress speaks of ids of the draft's own vocabulary
        self.mapped = False
        #: whether some rank of the group runs a prefill in the current round; an idle one then enters that too
        self.prefills = False
        self._replays = 0
        #: what goes into the forward in progress, until it was copied, and the copy
        self._inputs: Tensors | None = None
        self._before: Copy | None = None
        #: tokens that the model in progress was given, padding included
        self._given = 0

    def install(self) -> None:
        """Call after the worker modules were imported."""
        runner = sys.modules["sglang.srt.model_executor.model_runner"]
        self._hooks.wrap(runner, "ModelRunner.forward", self._forward)
        if hasattr(runner.ModelRunner, STATES_COPIED):
            self._hooks.wrap(runner, f"ModelRunner.{STATES_COPIED}", self._pools.states_copied)
        self.attention.install()
        if self._graphs is not None:
            self._graphs.wanted = lambda: self._recorder.round is not None
            self._graphs.on_replay = self._replayed
            self._graphs.on_eager = self._take_given
            self._graphs.before_replay = self._recorder.before_replay

    def phase_of(self, *, is_draft: bool) -> str:
        """The Phase of a forward of the draft, or of the target, in the current round."""
        if is_draft:
            return self._recorder.phase or "DRAFT"
        current = self._recorder.round
        mode = "" if current is None else current.mode
        return "PREFILL" if mode == "PREFILL" or (mode == "IDLE" and self.prefills) else "VERIFY"

    def _forward(self, original: Original) -> Original:
        recorder = self._recorder

        def forward(runner: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
            if recorder.round is None:
                return original(runner, forward_batch, *args, **kwargs)
            is_draft = bool(runner.is_draft_worker)
            phase = self.phase_of(is_draft=is_draft)
            step = recorder.step if is_draft else 0  # also the layer, where layers draft
            at = {"step": step, "round": recorder.round.index}
            recorder.last = {"phase": phase, **at, "rids": recorder.round.rids}
            live = bool(recorder.round.rids)
            replays = self._replays
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
                partly = self._graphs is not None and self._graphs.partly
                self._entered(phase, graph=self._given if partly else 0)
                if live:
                    facts = {"phase": phase, "step": step, "mapped": self.mapped and is_draft, **how}
                    recorder.note("forward", self._went_in(), self._comes_out(output.logits_output), read, **facts)
            self._inputs = None
            return output

        return forward

    def _goes_in(self, inputs: Tensors) -> None:
        """Copied at once; where there are graphs, only once a model really runs, since a graph keeps its own."""
        self._inputs, self._before = inputs, None
        if self._graphs is None:
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
            self._before, self._inputs = self._recorder.copied(self._inputs), None

    def _went_in(self) -> Copy | None:
        self._take_inputs()
        return self._before

    def _comes_out(self, output: Any) -> Copy | None:
        """All logits of a small vocabulary: that is one copy where working out what is kept of them is many."""
        whole_below = WHOLE_BELOW if self._recorder.staging is not None else 0
        return self._recorder.copied(outputs_of(output, whole_below=whole_below))

    def _entered(self, phase: str, *, graph: int = 0, count: int = 1) -> None:
        """More forwards of the round; graph: the batch size they were captured for, 0 for an eager one."""
        current = self._recorder.round
        assert current is not None
        current.forwards[phase] = current.forwards.get(phase, 0) + count
        if graph:
            current.graphs[phase] = graph
        if phase in DRAFTING:
            self._recorder.step += count

    def _replayed(self, captured: CapturedGraph) -> None:
        """What one graph did, recorded as if each of its forwards and choices had just happened."""
        recorder = self._recorder
        current = recorder.round
        assert current is not None
        self._replays += 1
        draft, target = recorder.phase or "DRAFT", self.phase_of(is_draft=False)
        if current.rids:  # an idle rank has no rows
            facts = {"step": recorder.step, "mapped": self.mapped, "packs": self._packs}
            recorder.replayed(captured, (target, draft), facts)
        for is_draft, batch, count in captured.runs:
            phase = draft if is_draft else target
            self._entered(phase, graph=batch, count=count)
        if captured.runs:
            at = {"step": recorder.step - 1 if is_draft else 0, "round": current.index}
            recorder.last = {"phase": phase, **at, "rids": current.rids}


def _leading(given: torch.Tensor | None, asked: torch.Tensor | None) -> torch.Tensor | None:
    """As many rows of what a model is given as it was asked for; what was asked for, where it is given fewer."""
    if given is None or asked is None or given.shape[0] < asked.shape[0]:
        return asked
    return given[: asked.shape[0]]
