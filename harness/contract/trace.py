"""The trace of a scenario: rows, rounds, events and tensors, of the engine or of the reference.

A trace is the only thing checkers may read. This module must not judge and must not import torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from harness.contract.rows import RowBuilder, Rows

TRACE_SCHEMA = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundRecord:
    """One scheduler batch on one rank.

    mode: PREFILL, DECODE, IDLE or PREBUILT. rids, starts and lens have one entry a request: for PREFILL the
    chunk [start, start+len) and `final[i]` says whether the prompt ends with it; for DECODE start is the committed
    length before the round and len is the accept length (0 if the request took no part in a verify).
    forwards counts the model forwards entered, by phase. graphs names the phases that a CUDA graph ran, with the batch
    size it was captured for; the others ran eagerly. side: 'prefill' or 'decode' where these are two engines, with a
    number for each batch of either; PREBUILT: what was handed over, start its committed length, len 0. num_steps: steps
    of this round, where they change while SGLang serves (0: it does not speculate); else -1.
    """

    index: int
    scheduler_step: int
    dp_rank: int
    tp_rank: int
    mode: str
    rids: tuple[str, ...]
    attempts: tuple[int, ...]
    starts: tuple[int, ...]
    lens: tuple[int, ...]
    final: tuple[bool, ...]
    forwards: dict[str, int]
    graphs: dict[str, int] = field(default_factory=dict)
    side: str = ""
    num_steps: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestEnd:
    """How a request left the engine: finish reason and everything it generated.

    Reasons: 'length', 'stop', 'abort', and 'error' where SGLang answered with one (its text: event 'request_error').
    """

    rid: str
    scheduler_step: int
    reason: str
    output_ids: tuple[int, ...]
    cached_tokens: int = 0


#: Of a reference's header: rows that a row of a target's layers with sliding windows sees, itself among them.
WINDOW = "window"
#: What an engine's events of recurrent states are called, and how the names of a reference's tensors of them begin; and
#: the events that say what their rows are.
RECURRENT, RECURRENT_ROWS = "recurrent", "recurrent_rows"
#: Of a header: the token ids that end a request beside its own stop ids; absent in old traces, where none did.
EOS = "eos_token_ids"


def replaced_kernels(header: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The operations that a replacement kernel of ours computed, by a header; of those for samplers see `accepts`."""
    return [entry for entry in header.get("replaced") or () if entry.get("by") == "stand-in"]


#: Events behind which an engine is not used any more.
ENDS = ("crash", "hang", "lost")


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Anything else worth remembering, in order: submit, abort, retract, pool levels, crash, hang, state.

    pool events: data = {'free': int, 'total': int, 'when': 'start' | 'end', 'evictable': int, 'twice': int}
    crash events: data = {'site': 'module:function:line', 'error': str, 'phase': str, 'round': int}
    lost events (somebody ended or stopped the engine): data = {'what': str, 'phase': str, 'round': int}
    """

    name: str
    scheduler_step: int
    dp_rank: int = 0
    data: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Everything one side says about one scenario.

    side: 'engine' or 'reference'. header: the probe handshake (release, torch, device, backend, hooks found and
    missing, operations replaced). tensors: 'hidden_in.<PHASE>' / 'hidden_out.<PHASE>' -> float32 [rows, h].
    """

    side: str
    scenario_id: str
    header: dict[str, Any]
    rows: Rows
    rounds: tuple[RoundRecord, ...] = ()
    ends: tuple[RequestEnd, ...] = ()
    events: tuple[Event, ...] = ()
    tensors: dict[str, np.ndarray] = field(default_factory=dict)

    def named(self, *names: str) -> Iterator[Event]:
        """Its events of these names, in order."""
        return (event for event in self.events if event.name in names)

    def header_only(self) -> Trace:
        """What is worth keeping of a trace that is stored elsewhere, or never was made: its answers too."""
        rows = RowBuilder().build()
        return Trace(side=self.side, scenario_id=self.scenario_id, header=self.header, rows=rows, ends=self.ends)
