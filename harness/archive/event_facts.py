"""Events of a stored trace: the keys that each must have, and their types.

Keys that nobody reads are kept and not looked at. It must not touch the disk.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from harness.contract.json_files import BadDocument, validated

#: What is read of an event without asking whether it is there, by the event's name.
NEEDS: dict[str, tuple[str, ...]] = {
    "greedy": ("rid", "output_ids"),
    "expected_accept": ("rid", "attempt", "committed", "tokens"),
    "sampled": ("rid", "attempt", "committed", "margin"),
    "reference_stopped": ("rid", "round"),
    "request_error": ("rid", "error"),
    "misfit": ("round", "why"),
    "pool": ("free", "when"),
    "turn": ("running", "waiting"),
    "uniforms": ("round", "uniforms", "thresholds", "rule"),
    "changed": ("round", "phase", "step", "rids", "attempts", "committed", "slots"),
    "again": ("round", "step", "rows"),
    "handed": ("round", "rids", "prefixes"),
    "unbuilt": ("round", "rids"),
    "idle_state": ("round", "phase"),
    "busy_state": ("round", "phase"),
    "tails": ("round", "rids", "attempts", "committed", "holes", "wrong"),
    "window": ("round", "phase", "window", "rids", "attempts", "committed", "lens", "held_from", "gone", "shared"),
    "recurrent": ("round", "phase", "rids", "attempts", "committed", "state", "conv"),
    "recurrent_rows": ("rid", "attempt", "first", "length", "refused"),
    "host": ("round", "what", "rid", "host", "device"),
    "abort": ("rid",),
    "answer": ("rid", "meta", "pieces"),
    "written": ("rid", "length", "matched", "text"),
    "logprobs": ("rid", "first", "own", "scales", "top_ids", "top_values", "ids"),
    "transfer": ("rid",),
    "update": ("what", "success", "message"),
    "memory": ("what", "success", "message"),
    "routing": ("rows", "usual"),
    "tp_rank": ("tp_rank", "rows"),
    "tp_differs": ("tp_rank", "round", "phase", "step", "column", "first_rank", "this_rank"),
}


class _Uniforms(BaseModel):
    """Of one request: a uniform a node, and the last draw."""

    nodes: tuple[float, ...]
    final: float


class _Piece(BaseModel):
    """Of a streamed answer."""

    output_ids: tuple[int, ...]
    meta: dict[str, Any]


class _Rank(BaseModel):
    """Where a rank stood when an engine hung."""

    dp_rank: int = 0
    forwards: dict[str, int] = {}
    at_round: int = -1


class _Said(BaseModel):
    """Every key that is read of any event; an event says a few of them."""

    rid: str = ""
    rids: tuple[str, ...] = ()
    attempt: int = 0
    attempts: tuple[int, ...] = ()
    slots: tuple[tuple[int, ...], ...] = ()
    committed: int | tuple[int, ...] = 0
    round: int = -1
    window: int = 0
    step: int = 0
    phase: str = ""
    side: str = ""
    when: str = ""
    what: str = ""
    why: str = ""
    error: str = ""
    site: str = ""
    trace: str = ""
    reason: str = ""
    dp_rank_reported: int = 0
    ranks: tuple[_Rank, ...] = ()
    free: int = 0
    evictable: int = 0
    twice: int = 0
    window_free: int = 0
    window_evictable: int = 0
    metadata: int = 0
    running: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()
    moving: tuple[str, ...] = ()
    sent: dict[str, tuple[int, int]] = {}
    tokens: int = 0
    output_ids: tuple[int, ...] = ()
    margins: tuple[float | str, ...] = ()
    margin: float | str = 0.0
    usual: float = 0.0
    distance: float = 0.0
    own_distance: float = 0.0
    spread: float = 0.0
    uniforms: dict[str, _Uniforms] = {}
    thresholds: tuple[float, float] = (1.0, 1.0)
    rule: str = ""
    rows: int | tuple[int, ...] | None = 0
    announced: tuple[int, ...] | None = ()
    prefixes: tuple[int, ...] = ()
    holes: tuple[int, ...] = ()
    wrong: tuple[int, ...] = ()
    lens: tuple[int, ...] = ()
    held_from: tuple[int, ...] = ()
    gone: tuple[int, ...] = ()
    shared: tuple[int, ...] = ()
    state: tuple[tuple[float | None, ...], ...] = ()
    conv: tuple[tuple[float | None, ...], ...] = ()
    length: int | None = 0
    refused: dict[str, int] = {}
    tp_rank: int = 0
    column: str = ""
    meta: dict[str, Any] = {}
    pieces: tuple[_Piece, ...] = ()
    first: int = 0
    own: tuple[float | str, ...] = ()
    scales: tuple[float | str, ...] = ()
    top_ids: tuple[tuple[int, ...], ...] = ()
    top_values: tuple[tuple[float | str, ...], ...] = ()
    ids: tuple[tuple[float | str, ...], ...] = ()
    kept: tuple[int, ...] = ()
    host: tuple[int, ...] = ()
    device: tuple[int, ...] = ()
    storage: tuple[int, ...] = ()


#: Events whose lists have an entry a request.
A_SHARE, OF_ALL = ("tails", "window", "recurrent"), ("round", "phase", "window")
#: Keys that have one type in every event that says them.
KEYS_READ = frozenset(_Said.model_fields)


def unfit(name: str, data: dict[str, Any]) -> str:
    """What is wrong with what an event of that name says; empty if nothing is."""
    missing = [key for key in NEEDS.get(name, ()) if key not in data]
    if missing:
        return f"event {name!r}: {missing[0]} is missing\n  allowed keys: {', '.join(NEEDS[name])}, and others"
    try:
        said = validated(data, _Said)
    except BadDocument as error:
        return f"event {name!r}: {error}"
    if said.length is None and name != "written":  # of a text that nothing stops
        return f"event {name!r}: length: found null\n  allowed: a whole number"
    shares = [data[key] for key in NEEDS[name] if key not in OF_ALL] if name in A_SHARE else []
    if any(not isinstance(one, list | tuple) or len(one) != len(said.rids) for one in shares):
        return f"event {name!r}: its lists are of different lengths\n  allowed: one entry a request in each"
    return ""
