"""Sees inside CUDA graphs: copies captured with each graph, and shipped with the round after each of its replays.

A replay runs no Python, so what a wrapper records while a graph is captured is a place, not a value. While
`torch.cuda.CUDAGraph` captures, every model call and every choice puts copies of its tensors aside; just before the
capture ends they are packed into one buffer, which the graph fills again whenever it is replayed. No class of SGLang's
graph runners is touched: releases differ in those, and all of them go through torch's own.

Graphs of prompts hold a part of a model, whose forward runs around them as ever: what they do shows in its outputs,
and what they read are the inputs that it is given then.

Engine side: standard library and torch only. Nothing here may synchronise during a capture, and a warm-up
(the same Python run outside a capture) must leave no trace.
"""

from __future__ import annotations

import functools
import sys
import types
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ..hooks import HookRegistry, Original, around
from .captured_graph import Arena, CapturedGraph
from .snapshot import Tensors, copied, inputs_of, outputs_of

#: Gets the graph that has just been replayed, if it has calls.
OnReplay = Callable[[CapturedGraph], None]


class GraphProbe:
    """Hooks on torch's graphs and on SGLang's models, in place before the first capture.

    mutants: the `GraphMutants` that the graphs shall hold, where an engine is booted for them. device: where buffers
    are to last until the end of a round; None: they hold until the next replay.
    """

    def __init__(self, mutants: Any = None, device: str | None = None) -> None:
        self.mutants = mutants
        self._device = device
        self.hooks = HookRegistry()
        self.on_replay: OnReplay | None = None
        #: whether a replay is to be reported
        self.wanted: Callable[[], bool] = lambda: False
        #: called when a graph is about to write to its buffer again
        self.before_replay: Callable[[CapturedGraph], None] = lambda _captured: None
        #: called when a model is about to run outside any capture, with the inputs that it is given: where a part of
        #: it is replayed, those are what the graph reads
        self.on_eager: Callable[[Tensors], None] = lambda _inputs: None
        #: whether a model was captured as torch.compile made it; None where nobody asked for that
        self.compiled: bool | None = None
        #: whether a part of the last model that ran outside any capture was replayed
        self.partly = False
        #: graphs without calls of their own that were replayed so far
        self._parts = 0
        self._open: CapturedGraph | None = None
        self._arena: Arena | None = None
        self._captured: weakref.WeakKeyDictionary[Any, CapturedGraph] = weakref.WeakKeyDictionary()

    def install(self, *, chooser_module: types.ModuleType, choosers: Sequence[str], drafter: str = "") -> None:
        """Call before any graph is captured and after SGLang edited its own sources (its revert switch).

        choosers: functions of the worker's module that are shown, or return, what was chosen from a draft forward.
        drafter: the worker there that has `draft_forward`.
        """
        cuda = sys.modules["torch.cuda"]
        self.hooks.wrap(cuda, "CUDAGraph.capture_begin", around(self._capture_begin))
        self.hooks.wrap(cuda, "CUDAGraph.capture_end", around(self._capture_end))
        self.hooks.wrap(cuda, "CUDAGraph.replay", self._replay)
        runner = sys.modules["sglang.srt.model_executor.model_runner"]
        self.hooks.wrap(runner, "ModelRunner.load_model", around(self._load_model))
        for name in choosers:
            if hasattr(chooser_module, name):
                make = self._shown if name == "select_top_k_tokens" else self._returned
                self.hooks.wrap(chooser_module, name, make)
        if self.mutants is not None and hasattr(getattr(chooser_module, drafter, None), "draft_forward"):
            self.hooks.wrap(chooser_module, f"{drafter}.draft_forward", self._drafts)

    @property
    def captured(self) -> list[CapturedGraph]:
        """Every captured graph that something of a model runs in."""
        return [one for one in self._captured.values() if one.calls]

    def sizes(self) -> dict[str, list[int]]:
        """Captured batch sizes by whose model and how many of its forwards are inside: 'draft x2' -> [1, 2, 4]."""
        found: dict[str, set[int]] = {}
        for one in self.captured:
            forwards = [call for call in one.calls if call.what == "forward"]
            owner = "draft" if forwards[0].is_draft else "target"
            found.setdefault(f"{owner} x{len(forwards)}", set()).add(forwards[0].batch)
        return {name: sorted(sizes) for name, sizes in sorted(found.items())}

    # -- torch's graphs --

    def _capture_begin(self, original: Original, graph: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(graph, *args, **kwargs)
        self._open = CapturedGraph()
        return result

    def _capture_end(self, original: Original, graph: Any, *args: Any, **kwargs: Any) -> Any:
        captured, self._open = self._open, None
        if captured is not None and captured.calls:
            captured.close(self._arena)
            self._captured[graph] = captured
        return original(graph, *args, **kwargs)

    def _replay(self, original: Original) -> Original:
        def replay(graph: Any, *args: Any, **kwargs: Any) -> Any:
            captured = self._captured.get(graph)
            if captured is not None and captured.kept is not None:
                self.before_replay(captured)
            result = original(graph, *args, **kwargs)
            self._parts += captured is None
            if captured is not None and self.on_replay is not None and self.wanted():
                self.on_replay(captured)
            return result

        return replay

    # -- SGLang's models and choices --

    def _load_model(self, original: Original, runner: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(runner, *args, **kwargs)
        watched = self._watched if self.compiled is None else self._beside_compiler
        runner.model.forward = watched(runner.model.forward, runner)
        if self._device is not None and self._arena is None:
            self._arena = Arena(self._device)
        if self.mutants is not None:
            self.mutants.prepare(next(runner.model.parameters()).device)
        return result

    def _watched(self, original: Original, runner: Any) -> Original:
        """The bound `forward` of one model, putting copies aside while a graph is captured."""

        @functools.wraps(original)
        def forward(input_ids: Any, positions: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
            captured = self._open
            is_draft = bool(runner.is_draft_worker)
            if captured is None:
                self.on_eager(inputs_of(input_ids, positions, forward_batch, is_draft=is_draft))
                if self.mutants is not None:
                    self.mutants.warm(forward_batch)
                parts = self._parts
                output = original(input_ids, positions, forward_batch, *args, **kwargs)
                self.partly = self._parts > parts
                return output
            with self._mutated(captured, input_ids, positions, forward_batch, is_draft=is_draft) as (ids, places):
                before = copied(inputs_of(ids, places, forward_batch, is_draft=is_draft))
                output = original(ids, places, forward_batch, *args, **kwargs)
            batch = int(forward_batch.batch_size)
            captured.put("forward", is_draft=is_draft, batch=batch, copies=(before, copied(outputs_of(output))))
            if self.mutants is not None:
                self.mutants.logits = output.next_token_logits
            return output

        return forward

    def _beside_compiler(self, original: Original, runner: Any) -> Original:
        """As `_watched`, where torch.compile is asked for: it is given the model, and nothing of what is around that.

        Nothing may be compiled during a capture, and the warm-up before runs other lines of ours.
        """
        set_compiler, compiler = torch._C._dynamo.eval_frame.set_eval_frame, None

        @functools.wraps(original)
        def model(*args: Any, **kwargs: Any) -> Any:
            set_compiler(compiler)
            try:
                return original(*args, **kwargs)
            finally:
                set_compiler(None)

        watched = self._watched(model, runner)

        @functools.wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Any:
            nonlocal compiler
            compiler = set_compiler(None)
            if self._open is not None:
                self.compiled = self.compiled or callable(compiler)
            try:
                return watched(*args, **kwargs)
            finally:
                set_compiler(compiler)

        return forward

    def _mutated(
        self, captured: CapturedGraph, input_ids: Any, positions: Any, forward_batch: Any, *, is_draft: bool
    ) -> AbstractContextManager[tuple[Any, Any]]:
        """What a captured forward runs with."""
        if self.mutants is None:
            return nullcontext((input_ids, positions))
        return self.mutants.inputs(input_ids, positions, forward_batch, is_draft=is_draft, step=captured.forwards)

    def _drafts(self, original: Original) -> Original:
        """All steps of a round, which look their choices up in the worker's map of draft ids."""

        def draft_forward(worker: Any, *args: Any, **kwargs: Any) -> Any:
            with nullcontext() if self._open is None else self.mutants.vocabulary(worker):
                return original(worker, *args, **kwargs)

        return draft_forward

    def _shown(self, original: Original) -> Original:
        """A function that is given what the forward before it led to: (step, probabilities, ids, ...)."""

        def select_top_k_tokens(i: int, topk_p: Any, topk_index: Any, *args: Any, **kwargs: Any) -> Any:
            if self._open is not None and i > 0:
                if self.mutants is not None:
                    batch = self._open.calls[-1].batch
                    topk_p, topk_index = self.mutants.choices(topk_p, topk_index, batch=batch, step=i)
                self._chosen(topk_p, topk_index)
            return original(i, topk_p, topk_index, *args, **kwargs)

        return select_top_k_tokens

    def _returned(self, original: Original) -> Original:
        """A function that returns what the forward before it led to: (probabilities, ids)."""

        def choose(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if self._open is not None:
                self._chosen(result[0], result[1])
            return result

        return choose

    def _chosen(self, probs: torch.Tensor, ids: torch.Tensor) -> None:
        captured = self._open
        assert captured is not None
        batch = captured.calls[-1].batch if captured.calls else 0
        width = ids.shape[-1]
        found = copied({"ids": ids.reshape(-1, width), "probs": probs.reshape(-1, width)})
        captured.put("chosen", is_draft=True, batch=batch, copies=(found,))
