"""Sees inside CUDA graphs: copies captured with each graph, read back after each of its replays.

A replay runs no Python, so what a wrapper records while a graph is captured is a place, not a value. While
`torch.cuda.CUDAGraph` captures, every model call and every choice puts copies of its tensors aside; just before the
capture ends they are packed into one buffer, which the graph fills again whenever it is replayed. No class of SGLang's
graph runners is touched: releases differ in those, and all of them go through torch's own.

Engine side: standard library, NumPy and torch only. Nothing here may synchronise during a capture, and a warm-up
(the same Python run outside a capture) must leave no trace.
"""

from __future__ import annotations

import functools
import sys
import types
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from .hooks import Ledger
from .recorder import TOP_LOGITS, Arrays

Original = Callable[..., Any]

#: How a captured dtype is packed, and what it is when it comes back.
_PACKED: dict[bool, tuple[torch.dtype, Any]] = {True: (torch.float32, np.float32), False: (torch.int64, np.int64)}


@dataclass(frozen=True)
class Field:
    """Where one copied tensor lies in a buffer."""

    name: str
    start: int
    shape: tuple[int, ...]
    kind: Any


@dataclass(frozen=True)
class Copy:
    """A tensor's values at one moment, as bytes on its own device."""

    part: torch.Tensor
    shape: tuple[int, ...]
    kind: Any

    @staticmethod
    def of(tensor: torch.Tensor) -> Copy:
        dtype, kind = _PACKED[tensor.dtype.is_floating_point]
        flat = torch.empty(tensor.numel(), dtype=dtype, device=tensor.device)  # `to` would keep foreign strides
        flat.copy_(tensor.detach().reshape(-1))
        return Copy(flat.view(torch.uint8), tuple(tensor.shape), kind)


def copies(tensors: dict[str, torch.Tensor | None]) -> dict[str, Copy]:
    """Copies of those that are there."""
    return {name: Copy.of(tensor) for name, tensor in tensors.items() if tensor is not None}


def inputs_of(input_ids: Any, positions: Any, forward_batch: Any, *, is_draft: bool) -> dict[str, Copy]:
    """What goes into a forward, as it is now: positions are advanced in place afterwards."""
    hidden = getattr(forward_batch.spec_info, "hidden_states", None) if is_draft else None
    kept = hidden if isinstance(hidden, torch.Tensor) and hidden.numel() else None
    found = {"input_ids": input_ids, "positions": positions, "cache_slots": forward_batch.out_cache_loc}
    return copies({**found, "hidden_in": kept})


def outputs_of(output: Any) -> dict[str, Copy]:
    """What a forward says, of a LogitsProcessorOutput: hidden rows, top logits with their ids, log-sum-exp."""
    logits, hidden = output.next_token_logits, output.hidden_states
    found: dict[str, torch.Tensor | None] = {"hidden_out": hidden}
    if logits is not None:
        wide = logits.detach().float()
        values, ids = torch.topk(wide, min(TOP_LOGITS, wide.shape[-1]), dim=-1)
        # Of equal logits, topk lists any first; SGLang chooses by argmax.
        found |= {"best": torch.argmax(wide, dim=-1), "top_ids": ids, "top_logits": values}
        found["lse"] = torch.logsumexp(wide, dim=-1)
    return copies(found)


@dataclass(frozen=True)
class Call:
    """One thing that happens inside a graph: a 'forward' of a model, or what was 'chosen' from the one before.

    is_draft: whose model; batch: requests the graph was captured for, padding included.
    """

    what: str
    is_draft: bool
    batch: int
    fields: tuple[Field, ...]


@dataclass(frozen=True)
class Replayed:
    """A call with the values of one replay, padding included."""

    what: str
    is_draft: bool
    batch: int
    arrays: Arrays


@dataclass
class Book:
    """What one graph does, in order, and the buffer its copies are in."""

    calls: list[Call] = field(default_factory=list)
    buffer: torch.Tensor | None = None
    _parts: list[torch.Tensor] = field(default_factory=list)
    _size: int = 0

    def put(self, what: str, *, is_draft: bool, batch: int, copies: dict[str, Copy]) -> None:
        """Keep copies that were made at this place of the graph, in the order of the calls."""
        fields = []
        for name, copied in copies.items():
            fields.append(Field(name, self._size, copied.shape, copied.kind))
            self._parts.append(copied.part)
            self._size += copied.part.numel()
        self.calls.append(Call(what, is_draft, batch, tuple(fields)))

    def close(self) -> None:
        """Pack everything into one buffer; still inside the capture, so the packing is replayed too."""
        if self._parts:
            self.buffer = torch.cat(self._parts)
        self._parts = []

    def read(self) -> list[Replayed]:
        """Every call with the values of the last replay; waits for the graph."""
        if self.buffer is None:
            return []
        packed = self.buffer.cpu().numpy()
        return [Replayed(call.what, call.is_draft, call.batch, unpack(packed, call.fields)) for call in self.calls]


def whole_forward(before: dict[str, Copy], output: Any) -> Arrays:
    """All rows that went into an eager forward and came out of it, with one transfer from the device."""
    book = Book()
    book.put("forward", is_draft=False, batch=0, copies={**before, **outputs_of(output)})
    book.close()
    return book.read()[0].arrays


def best_first(top_ids: np.ndarray, best: np.ndarray) -> np.ndarray:
    """top_ids [r, 16] with the argmax best [r] in front, where equal logits let another id stand there."""
    rows = np.flatnonzero(top_ids[:, 0] != best)
    ordered = top_ids.copy()
    for row in rows.tolist():
        others = [token for token in top_ids[row].tolist() if token != best[row]]
        ordered[row] = [int(best[row]), *others][: top_ids.shape[1]]
    return ordered


def unpack(packed: np.ndarray, fields: Sequence[Field]) -> Arrays:
    """uint8 buffer -> arrays by name, each its own copy."""
    arrays = {}
    for one in fields:
        count = int(np.prod(one.shape, dtype=np.int64))
        size = count * np.dtype(one.kind).itemsize
        arrays[one.name] = packed[one.start : one.start + size].copy().view(one.kind).reshape(one.shape)
    return arrays


#: Told what happened inside, after each replay of a graph that has calls.
OnReplay = Callable[[list[Replayed]], None]


class GraphProbe:
    """Hooks on torch's graphs and on SGLang's models, in place before the first capture."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        self.on_replay: OnReplay | None = None
        #: whether a replay is worth reading: asked before the copy from the device
        self.wanted: Callable[[], bool] = lambda: False
        self._open: Book | None = None
        self._books: weakref.WeakKeyDictionary[Any, Book] = weakref.WeakKeyDictionary()

    def install(self, *, chooser_module: types.ModuleType, choosers: Sequence[str]) -> None:
        """Call before any graph is captured and after SGLang edited its own sources (its revert switch).

        choosers: functions of the worker's module that are shown, or return, what was chosen from a draft forward.
        """
        cuda = sys.modules["torch.cuda"]
        self.ledger.wrap(cuda, "CUDAGraph.capture_begin", self._capture_begin)
        self.ledger.wrap(cuda, "CUDAGraph.capture_end", self._capture_end)
        self.ledger.wrap(cuda, "CUDAGraph.replay", self._replay)
        runner = sys.modules["sglang.srt.model_executor.model_runner"]
        self.ledger.wrap(runner, "ModelRunner.load_model", self._load_model)
        for name in choosers:
            if hasattr(chooser_module, name):
                make = self._shown if name == "select_top_k_tokens" else self._returned
                self.ledger.wrap(chooser_module, name, make)

    @property
    def books(self) -> list[Book]:
        """Every captured graph that something of a model runs in."""
        return [book for book in self._books.values() if book.calls]

    def sizes(self) -> dict[str, list[int]]:
        """Captured batch sizes by whose model and how many of its forwards are inside: 'draft x2' -> [1, 2, 4]."""
        found: dict[str, set[int]] = {}
        for book in self.books:
            forwards = [call for call in book.calls if call.what == "forward"]
            owner = "draft" if forwards[0].is_draft else "target"
            found.setdefault(f"{owner} x{len(forwards)}", set()).add(forwards[0].batch)
        return {name: sorted(sizes) for name, sizes in sorted(found.items())}

    # -- torch's graphs ----------------------------------------------------------------------------------------

    def _capture_begin(self, original: Original) -> Original:
        def capture_begin(graph: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(graph, *args, **kwargs)
            self._open = Book()
            return result

        return capture_begin

    def _capture_end(self, original: Original) -> Original:
        def capture_end(graph: Any, *args: Any, **kwargs: Any) -> Any:
            book, self._open = self._open, None
            if book is not None and book.calls:
                book.close()
                self._books[graph] = book
            return original(graph, *args, **kwargs)

        return capture_end

    def _replay(self, original: Original) -> Original:
        def replay(graph: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(graph, *args, **kwargs)
            book = self._books.get(graph)
            if book is not None and self.on_replay is not None and self.wanted():
                self.on_replay(book.read())
            return result

        return replay

    # -- SGLang's models and choices ---------------------------------------------------------------------------

    def _load_model(self, original: Original) -> Original:
        def load_model(runner: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(runner, *args, **kwargs)
            runner.model.forward = self._watched(runner.model.forward, runner)
            return result

        return load_model

    def _watched(self, original: Original, runner: Any) -> Original:
        """The bound `forward` of one model, putting copies aside while a graph is captured."""

        @functools.wraps(original)
        def forward(input_ids: Any, positions: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
            book = self._open
            if book is None:
                return original(input_ids, positions, forward_batch, *args, **kwargs)
            is_draft = bool(runner.is_draft_worker)
            before = inputs_of(input_ids, positions, forward_batch, is_draft=is_draft)
            output = original(input_ids, positions, forward_batch, *args, **kwargs)
            batch = int(forward_batch.batch_size)
            book.put("forward", is_draft=is_draft, batch=batch, copies={**before, **outputs_of(output)})
            return output

        return forward

    def _shown(self, original: Original) -> Original:
        """A function that is given what the forward before it led to: (step, probabilities, ids, ...)."""

        def select_top_k_tokens(i: int, topk_p: Any, topk_index: Any, *args: Any, **kwargs: Any) -> Any:
            if self._open is not None and i > 0:
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
        book = self._open
        assert book is not None
        batch = book.calls[-1].batch if book.calls else 0
        width = ids.shape[-1]
        found = copies({"ids": ids.reshape(-1, width), "probs": probs.reshape(-1, width)})
        book.put("chosen", is_draft=True, batch=batch, copies=found)


def without_padding(array: np.ndarray, *, batch: int, requests: int, packed: int) -> np.ndarray:
    """The rows of `array` that belong to the `requests` real ones of a graph captured for `batch`.

    packed: how many rows they have where rows of different requests follow each other without gaps (the draft extend of
    the v1 worker); 0 where each request has a block of its own.
    """
    if packed and len(array) > batch:
        return array[:packed]
    return array[: requests * (len(array) // batch)]
