"""Collects what one scheduler rank did, as wire messages; knows rounds and requests, not SGLang's classes.

Engine side: standard library, NumPy and torch only. It must copy and never modify a tensor it is shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

TOP_LOGITS = 16  # same number as harness.trace.TOP_LOGITS; this side must not import it

Arrays = dict[str, np.ndarray]


def plain_rid(rid: str) -> str:
    """The scenario's name of a request: the host appends `@<scenario number>`, since SGLang wants rids never reused."""
    return rid.rpartition("@")[0] or rid


def ints(tensor: torch.Tensor) -> np.ndarray:
    return np.array(tensor.detach().to("cpu", torch.int64).reshape(-1).numpy(), dtype=np.int64)


def floats(tensor: torch.Tensor) -> np.ndarray:
    return np.array(tensor.detach().to("cpu", torch.float32).numpy(), dtype=np.float32)


def summarize_logits(logits: torch.Tensor) -> Arrays:
    """logits [r, vocab] -> top_ids int64 [r, 16], top_logits float32 [r, 16], lse float32 [r]."""
    logits = logits.detach().float()
    values, ids = torch.topk(logits, min(TOP_LOGITS, logits.shape[-1]), dim=-1)
    return {
        "top_ids": np.array(ids.cpu().numpy(), dtype=np.int64),
        "top_logits": floats(values),
        "lse": floats(torch.logsumexp(logits, dim=-1)),
    }


@dataclass(slots=True)
class Round:
    """The batch being run: one entry a request, in batch order."""

    index: int
    mode: str
    rids: list[str]
    starts: list[int]
    lens: list[int]
    final: list[bool]
    epochs: list[int]
    forwards: dict[str, int] = field(default_factory=dict)
    graphs: dict[str, int] = field(default_factory=dict)  # phase -> batch size of the CUDA graph that ran it
    accept_lens: list[int] = field(default_factory=list)
    extend_rids: list[int] = field(default_factory=list)  # batch rows that take part in the draft-extend


@dataclass(slots=True)
class _Life:
    """How far one request has come, to tell a restart (retraction) from a next chunk."""

    epoch: int = 0
    reached: int = -1
    decoding: bool = False


class Recorder:
    """Messages of the turn in progress; `take` empties it."""

    def __init__(self) -> None:
        self.active = False
        self.phase: str | None = None
        self.step = 0
        self.round: Round | None = None
        self.last: dict[str, Any] = {}
        self._rounds = 0
        self._lives: dict[str, _Life] = {}
        self._messages: list[tuple[dict[str, Any], Arrays]] = []

    def begin(self) -> None:
        """Forget the previous scenario."""
        self._rounds = 0
        self._lives = {}
        self._messages = []
        self.round = None
        self.last = {}

    def take(self) -> list[tuple[dict[str, Any], Arrays]]:
        messages, self._messages = self._messages, []
        return messages

    def put(self, message: dict[str, Any], arrays: Arrays | None = None) -> None:
        self._messages.append((message, arrays or {}))

    def open_round(
        self, *, mode: str, rids: Sequence[str], starts: Sequence[int], lens: Sequence[int], final: Sequence[bool]
    ) -> Round:
        epochs = [self._advance(rid, mode, start) for rid, start in zip(rids, starts, strict=True)]
        self.round = Round(self._rounds, mode, list(rids), list(starts), list(lens), list(final), epochs)
        self._rounds += 1
        return self.round

    def _advance(self, rid: str, mode: str, start: int) -> int:
        life = self._lives.setdefault(rid, _Life())
        begins = mode in ("PREFILL", "PREBUILT")  # from a prompt, or from what another engine hands over
        if begins and life.reached >= 0 and (life.decoding or start != life.reached):
            life.epoch += 1
            life.decoding = False
        if mode == "DECODE":
            life.decoding = True
        return life.epoch

    def close_round(self) -> None:
        current = self.round
        if current is None:
            return
        self.round = None
        if current.mode == "DECODE":
            current.lens = current.accept_lens or [0] * len(current.rids)
        for rid, start, length in zip(current.rids, current.starts, current.lens, strict=True):
            self._lives[rid].reached = start + length
        self.put(
            {
                "ev": "round",
                "index": current.index,
                "mode": current.mode,
                "rids": current.rids,
                "starts": current.starts,
                "lens": current.lens,
                "final": current.final,
                "epochs": current.epochs,
                "forwards": current.forwards,
                "graphs": current.graphs,
            }
        )

    def forward(
        self,
        *,
        phase: str,
        step: int,
        requests: Sequence[int],
        lens: Sequence[int],
        arrays: Arrays,
        hidden_rows: Sequence[int],
        logit_rows: Sequence[int],
    ) -> None:
        """One model forward of the current round.

        requests: batch rows taking part; lens: rows each of them has in `arrays` (input_ids, positions, cache_slots,
        hidden_in?, hidden_out?, top_ids?, ...). hidden_rows / logit_rows: which of those rows the entries of
        hidden_out / top_ids belong to.
        """
        current = self._current()
        self.put(
            {
                "ev": "forward",
                "round": current.index,
                "phase": phase,
                "step": step,
                "rids": [current.rids[i] for i in requests],
                "epochs": [current.epochs[i] for i in requests],
                "committed": [current.starts[i] for i in requests],
                "lens": list(lens),
                "hidden_rows": list(hidden_rows),
                "logit_rows": list(logit_rows),
            },
            arrays,
        )

    def chosen(self, *, phase: str, step: int, requests: Sequence[int], ids: np.ndarray, probs: np.ndarray) -> None:
        """What the engine chose from the last rows of a forward: ids [rows, t], rows a multiple of the requests."""
        current = self._current()
        message = {
            "ev": "chosen",
            "round": current.index,
            "phase": phase,
            "step": step,
            "rids": [current.rids[i] for i in requests],
            "epochs": [current.epochs[i] for i in requests],
            "committed": [current.starts[i] for i in requests],
        }
        self.put(message, {"ids": ids, "probs": probs})

    def tree(self, parents: np.ndarray) -> None:
        """parents [b, n], -1 for the root."""
        self.put({"ev": "tree", "round": self._current().index}, {"parents": parents})

    def accept(self, *, lens: list[int], nodes: np.ndarray, tokens: np.ndarray) -> None:
        """lens [b]; nodes, tokens [Σ lens]: accepted node (within its tree) and the token its target chose."""
        current = self._current()
        current.accept_lens = lens
        self.put({"ev": "accept", "round": current.index, "lens": lens}, {"nodes": nodes, "tokens": tokens})

    def tails(self, *, holes: list[int], wrong: list[int]) -> None:
        """The batch row of each slot copied for branches about to be drafted, and of each that holds something else."""
        current = self._current()
        requests = range(len(current.rids))
        self.put(
            {
                "ev": "tails",
                "round": current.index,
                "rids": current.rids,
                "epochs": current.epochs,
                "committed": current.starts,
                "holes": [holes.count(i) for i in requests],
                "wrong": [wrong.count(i) for i in requests],
            }
        )

    def coins(self, *, rule: str, thresholds: list[float], nodes: np.ndarray, final: np.ndarray) -> None:
        """What a sampled verify is decided by: one coin a node [b, n], one for the last token [b]."""
        current = self._current()
        message = {"ev": "coins", "round": current.index, "rids": current.rids, "rule": rule, "thresholds": thresholds}
        self.put(message, {"nodes": nodes, "final": final})

    def _current(self) -> Round:
        if self.round is None:
            raise RuntimeError("the probe saw a forward outside a round; its hooks do not fit this release")
        return self.round
