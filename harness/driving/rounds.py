"""Decodes a round's bytes into messages about forwards, choices, trees and accepts.

Control side: NumPy only. The engine side copies tensors and says what they are; everything that takes Python a row is
done here, while the engine takes its next step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from harness.both_sides.wire import Arrays, Field, read
from harness.driving.read_slots import Plan
from harness.driving.row_arrays import (
    kept_rows,
    of_rows,
    output_rows,
    parents_of,
    summary_of,
    summary_reported,
    without_front,
    without_padding,
)

Message = dict[str, Any]
#: What is reported of a forward's logits: all, or what the device worked out of them.
LOGITS = ("logits", "top_logits", "top_ids", "best", "lse", "log_prob")
#: What goes into a forward, one entry a row.
INPUTS = ("input_ids", "positions", "cache_slots", "hidden_in")


@dataclass(slots=True)
class _Round:
    """One shipped round while it is read; accept_lens and extends are known once its verify was."""

    message: Message
    buffer: np.ndarray
    layouts: list[Sequence[Field]]
    rids: list[str]
    starts: list[int]
    lens: list[int]
    accept_lens: list[int] = field(default_factory=list)
    extends: list[int] = field(default_factory=list)
    width: int = 0  # nodes of a verified tree

    def read(self, event: Message) -> Arrays:
        """The arrays of an event, padding included."""
        return read(self.buffer, [(base, self.layouts[number]) for base, number in event["pieces"]])

    def about(self, requests: Sequence[int]) -> Message:
        """Which requests a message speaks of, and from where."""
        if len(requests) == len(self.rids):  # everyone, in the order of the batch: nobody writes to these lists
            attempts = self.message["attempts"]
            return {"round": self.message["index"], "rids": self.rids, "attempts": attempts, "committed": self.starts}
        return {
            "round": self.message["index"],
            "rids": [self.rids[i] for i in requests],
            "attempts": [self.message["attempts"][i] for i in requests],
            "committed": [self.starts[i] for i in requests],
        }


@dataclass(slots=True)
class Unpacker:
    """Reads the rounds of one rank in order. It must see every one of them: a table of ids is sent once."""

    _target_ids: np.ndarray | None = None
    _layouts: list[Sequence[Field]] = field(default_factory=list)
    #: of each graph that was reported: (what, whether the draft does it, batch, number of its layout) a call
    _tables: list[list[tuple[str, bool, int, int]]] = field(default_factory=list)

    def unpack(self, message: Message, arrays: Arrays) -> Iterator[tuple[Message, Arrays]]:
        """One message of a rank as those that `Assembler.feed` takes; others than 'packed' pass as they are."""
        if message["ev"] != "packed":
            yield message, arrays
            return
        self._layouts += message["layouts"]
        self._tables += message["tables"]
        starts = message["starts"]
        current = _Round(message, arrays["bytes"], self._layouts, message["rids"], starts or [], message["lens"])
        if starts is None:
            current.starts = current.read(message)["starts"].tolist()
        for event in message["events"]:
            yield from getattr(self, f"_{event['what']}")(current, event)
        yield _whole(current), {}

    def _message(self, current: _Round, event: Message) -> Iterator[tuple[Message, Arrays]]:
        yield event["message"], {}

    def _replay(self, current: _Round, event: Message) -> Iterator[tuple[Message, Arrays]]:
        """What a graph did, reported as if each of its forwards and choices had just happened."""
        base, step, packs = event["base"], event["step"], event["packs"]
        for what, is_draft, batch, layout in self._tables[event["table"]]:
            phase = event["phases"][is_draft]
            common = {"phase": phase, "batch": batch, "pieces": [(base, layout)], "packs": packs}
            if what == "forward":
                mapped = event["mapped"] and is_draft
                yield from self._forward(current, {**common, "step": step if is_draft else 0, "mapped": mapped})
                step += is_draft
            elif phase == "DRAFT":  # what else a graph chooses from, nobody drafts on
                yield from self._chosen(current, {**common, "step": step - 1, "requests": range(len(current.rids))})

    def _ids(self, current: _Round, event: Message) -> Iterator[tuple[Message, Arrays]]:
        self._target_ids = np.asarray(event["ids"], dtype=np.int64)
        return iter(())

    def _as_target(self, draft_ids: np.ndarray, *, mapped: bool) -> np.ndarray:
        """Ids of the draft's own vocabulary as the target's; one that is in neither is -1."""
        table = self._target_ids
        if not mapped or table is None:
            return draft_ids
        known = (draft_ids >= 0) & (draft_ids < len(table))
        return np.where(known, table[np.where(known, draft_ids, 0)], -1)

    def _forward(self, current: _Round, event: Message) -> Iterator[tuple[Message, Arrays]]:
        phase = event["phase"]
        found = _read_padded(current, event)
        plan = Plan.taken_from(found, event)
        requests, lens = _shares(current, phase, len(found["input_ids"]))
        numbers = np.arange(len(found["input_ids"]))
        again = _run_again(current, event, len(found["input_ids"]), len(requests))
        if again:
            found = {name: without_front(array, len(requests), again) for name, array in found.items()}
            numbers = without_front(numbers, len(requests), again)
            yield {"ev": "again", "round": current.message["index"], "step": event["step"], "rows": again}, {}
        rows, own_rows = len(found["input_ids"]), np.asarray(lens, dtype=np.int64)
        keep = kept_rows(own_rows, rows, len(requests))
        source = "logits" if "logits" in found else "best"
        logit_rows, logit_index = output_rows(phase, own_rows, keep, len(found.get(source, ())))
        hidden_rows, hidden_index = output_rows(phase, own_rows, keep, len(found.get("hidden_out", ())))
        whole = sum(lens) == rows  # as in most forwards: nothing to leave out, and nothing to copy
        arrays = {name: found[name] if whole else found[name][keep] for name in INPUTS if name in found}
        arrays |= {"logit_rows": logit_rows, "hidden_rows": hidden_rows}
        if plan is not None:
            mine, owners = numbers[keep], np.repeat(np.arange(len(lens)), lens)
            arrays |= plan.read_by(mine, owners)
            if any(slots := plan.changed_for(mine, owners, len(lens))):
                place = {"phase": phase, "step": event["step"], **current.about(requests)}
                yield {"ev": "changed", **place, "slots": slots}, {}
        if len(logit_rows):
            own = of_rows(found, LOGITS, logit_index)
            top = summary_of(own["logits"]) if source == "logits" else summary_reported(own)
            arrays["top_logits"], arrays["lse"] = top["top_logits"], top["lse"]
            arrays["top_ids"] = self._as_target(top["top_ids"], mapped=event["mapped"])
        if len(hidden_rows):
            arrays |= of_rows(found, ("hidden_out",), hidden_index)
        message = {"ev": "forward", "phase": phase, "step": event["step"], "lens": lens, **current.about(requests)}
        yield message, arrays

    def _chosen(self, current: _Round, event: Message) -> Iterator[tuple[Message, Arrays]]:
        found, requests = _read_padded(current, event), event["requests"]
        ids = found["ids"].reshape(len(requests), -1) if event["phase"] == "PREFILL" else found["ids"]
        probs = found["probs"].reshape(ids.shape) if "probs" in found else np.ones(ids.shape, np.float32)
        message = {"ev": "chosen", "phase": event["phase"], "step": event["step"], **current.about(requests)}
        yield message, {"ids": ids, "probs": probs}

    def _proposals(self, current: _Round, event: Message) -> Iterator[tuple[Message, Arrays]]:
        found = current.read(event)
        ids = self._as_target(found["ids"], mapped=event["mapped"])  # SGLang itself maps when the next round begins
        probs = found["probs"].reshape(ids.shape)
        for step, columns in enumerate(_columns(ids, probs, layered=event["layered"])):
            message = {"ev": "chosen", "phase": event["phase"], "step": step, **current.about(event["requests"])}
            yield message, columns

    def _tree(self, current: _Round, event: Message) -> Iterator[tuple[Message, Arrays]]:
        found = current.read(event)
        parents = parents_of(found["next"].reshape(-1), found["sibling"].reshape(-1), event["width"])
        yield {"ev": "tree", "round": current.message["index"]}, {"parents": parents}

    def _sampled(self, current: _Round, event: Message) -> Iterator[tuple[Message, Arrays]]:
        """What the v2 worker's verify gives: lens [b], predict [b·n], index [b, n] of rows in predict."""
        found = current.read(event)
        lens = found["lens"].reshape(-1).tolist()
        rows = found["index"].reshape(len(lens), -1)
        current.width = event["width"]
        flat = np.concatenate([rows[i, :length] for i, length in enumerate(lens)])
        current.extends = list(range(len(lens)))
        yield _accept(current, lens, flat, found["predict"].reshape(-1)[flat], event["width"])

    def _uniforms(self, current: _Round, event: Message) -> Iterator[tuple[Message, Arrays]]:
        """What a sampled verify is decided by: one uniform a node [b, n], one for the last token [b]."""
        found = current.read(event)
        rule = {name: event[name] for name in ("rule", "thresholds")}
        message = {"ev": "uniforms", "round": current.message["index"], "rids": current.rids, **rule}
        yield message, {"nodes": found["nodes"], "final": found["final"].reshape(-1)}

    def _masks(self, current: _Round, event: Message) -> Iterator[tuple[Message, Arrays]]:
        """Which tokens grammars allow at each row that chooses, one bit a token: those of constrained requests."""
        bits = current.read(event)["bits"]
        own = bits.reshape(len(current.rids), -1, bits.shape[-1])[event["requests"]]
        message = {"ev": "masks", "phase": event["phase"], **current.about(event["requests"])}
        yield message, {"bits": own}

    def _handed(self, current: _Round, event: Message) -> Iterator[tuple[Message, Arrays]]:
        """One row a position whose KV was handed over (and a layer), the last with what drafting goes on from."""
        found, lens = current.read(event), current.starts
        bonus = found["bonus"].reshape(-1, 1)
        rotated = np.concatenate([part for pair in zip(event["texts"], bonus, strict=True) for part in pair])
        about = current.about(range(len(lens)))
        ids = found["ids"].reshape(len(lens), -1)
        ids, probs = self._as_target(ids, mapped=event["mapped"]), found["probs"].reshape(ids.shape)
        held = found.get("hidden")
        for step, columns in enumerate(_columns(ids, probs, layered=event.get("layered", False))):
            where = {"phase": "PREBUILT", "step": step, **about}
            yield (
                {"ev": "forward", **where, "lens": lens},
                {
                    "input_ids": rotated.astype(np.int64),
                    "positions": np.full(len(rotated), -1, dtype=np.int64),
                    "cache_slots": found["slots"].reshape(-1),
                    **({} if held is None else {"hidden_out": held, "hidden_rows": np.cumsum(lens) - 1}),
                },
            )
            yield {"ev": "chosen", **where}, columns
        yield {"ev": "handed", "round": about["round"], "rids": current.rids, "prefixes": event["prefixes"]}, {}

    def _unbuilt(self, current: _Round, event: Message) -> Iterator[tuple[Message, Arrays]]:
        """Requests were handed over, and nobody made a draft input of them."""
        yield {"ev": "unbuilt", "round": current.message["index"], "rids": current.rids}, {}

    def _verified(self, current: _Round, event: Message) -> Iterator[tuple[Message, Arrays]]:
        found = current.read(event)
        current.extends = event["extends"]
        nodes, tokens = found["nodes"].reshape(-1), found["tokens"].reshape(-1)
        yield _accept(current, event["lens"], nodes, tokens, event["width"])


def _accept(
    current: _Round, lens: list[int], nodes: np.ndarray, tokens: np.ndarray, width: int
) -> tuple[Message, Arrays]:
    """nodes: rows of all trees [Σ lens]; reported as nodes within their own tree."""
    current.accept_lens = lens
    owner = np.repeat(np.arange(len(lens)), lens)
    message = {"ev": "accept", "round": current.message["index"], "lens": lens}
    return message, {"nodes": nodes - owner * width, "tokens": tokens}


def _columns(ids: np.ndarray, probs: np.ndarray, *, layered: bool) -> Iterator[Arrays]:
    """Proposals [b, t] by the forward that they are from: a column a layer, or all of one."""
    width = 1 if layered else ids.shape[1]
    for at in range(0, ids.shape[1], width):
        yield {"ids": ids[:, at : at + width], "probs": probs[:, at : at + width]}


def _whole(current: _Round) -> Message:
    """The round's own message, last."""
    given = current.message
    lens = given["lens"]
    if given["mode"] == "DECODE":
        lens = current.accept_lens or [0] * len(current.rids)
    names = ("index", "mode", "rids", "final", "attempts", "forwards", "graphs", "num_steps")
    return {"ev": "round", "starts": current.starts, "lens": lens, **{name: given[name] for name in names}}


def _shares(current: _Round, phase: str, rows: int) -> tuple[list[int], list[int]]:
    """Which requests of the batch a forward of `rows` rows was for, and how many rows each has."""
    everyone = list(range(len(current.rids)))
    if phase in ("PREFILL", "DRAFT_PREFILL"):
        return everyone, list(current.lens)
    if phase == "EXTEND":
        return list(current.extends), [current.accept_lens[i] for i in current.extends]
    return everyone, [rows // max(1, len(everyone))] * len(everyone)


def _run_again(current: _Round, event: Message, rows: int, requests: int) -> int:
    """How many rows before its committed length each request ran once more in a draft extend, as MTP layers may."""
    if event["phase"] != "EXTEND" or event.get("packs") or not current.width or rows % max(1, requests):
        return 0
    return max(0, rows // max(1, requests) - current.width)


def _read_padded(current: _Round, event: Message) -> Arrays:
    """The arrays of an event; of what a graph did, without the rows it was padded with."""
    found = current.read(event)
    batch = event.get("batch", 0)
    if not batch:
        return found
    extends = event["phase"] == "EXTEND"
    requests = len(current.extends) if extends else len(current.rids)
    # Only the v1 worker leaves requests out of an extend, and packs the rows of those that take part.
    packed = sum(current.accept_lens[i] for i in current.extends) if extends and event.get("packs") else 0
    return {
        name: without_padding(array, batch=batch, requests=requests, packed=packed) for name, array in found.items()
    }
