"""One request alone, speculating freely: its prompt in chunks, then decode rounds until it ends.

What drafts is a `Drafter`: the turns of a request are the same for every kind of draft. This module must not compute a
row.
"""

from __future__ import annotations

from typing import Protocol

from harness.contract.trace import Event, RequestEnd, RoundRecord
from harness.contract.types import Phase, RequestSpec
from reference.stories import where_of
from reference.turns import Where
from reference.verify import Coins


class Drafter(Protocol):
    """What speculates for one request. tokens: its prompt and what it committed; it writes the rows of its turns.

    drafts, layers: draft forwards before a verify, and those of a catch-up, in every round.
    """

    tokens: list[int]
    drafts: int
    layers: int

    def chunk(self, where: Where, length: int, *, final: bool) -> None:
        """Rows where.committed to + length of the prompt; final: the prompt's last ones."""

    def decode(self, where: Where) -> int:
        """One round: draft, verify, and append to tokens what is committed; returns how many those are."""

    def close(self, records: list[RoundRecord]) -> None:
        """All turns are over."""


def speculate(request: RequestSpec, drafter: Drafter, *, chunk: int | None) -> tuple[list[RoundRecord], RequestEnd]:
    """Its rounds and its end. chunk: how many tokens of the prompt a round takes at most; None takes it whole."""
    records, prompt = list[RoundRecord](), len(request.prompt)

    def record(mode: str, start: int, length: int, *, final: bool = False) -> RoundRecord:
        return record_of(
            request, len(records), mode, start, length, final=final, drafts=drafter.drafts, layers=drafter.layers
        )

    def place(record: RoundRecord, committed: int) -> Where:
        return where_of(record, rid=request.rid, epoch=0, committed=committed)

    for start in range(0, prompt, chunk or prompt):
        length = min(chunk or prompt, prompt - start)
        taken = record("PREFILL", start, length, final=start + length == prompt)
        drafter.chunk(place(taken, start), length, final=taken.final[0])
        records.append(taken)
    while (output := ended(request, drafter.tokens[prompt:])) is None:
        committed = len(drafter.tokens) - 1
        length = drafter.decode(place(record("DECODE", committed, 0), committed))
        records.append(record("DECODE", committed, length))
    drafter.close(records)
    end = RequestEnd(rid=request.rid, tick=len(records) - 1, reason=output[0], output_ids=output[1])
    return records, end


def ended(request: RequestSpec, output: list[int]) -> tuple[str, tuple[int, ...]] | None:
    """Finish reason and output if `output` ends the request, cut where it ends; None if it goes on."""
    stops = [index for index, token in enumerate(output) if token in request.stop_ids]
    if stops and stops[0] < request.max_new_tokens:
        return "stop", tuple(output[: stops[0] + 1])
    if len(output) >= request.max_new_tokens:
        return "length", tuple(output[: request.max_new_tokens])
    return None


def coins_event(where: Where, coins: Coins) -> Event:
    """What a probe tells of a sampled verify, for one request alone."""
    own = {where.rid: {"nodes": list(coins.nodes), "final": coins.final}}
    data = {"round": where.round, "rule": "reference", "thresholds": [coins.single, coins.together], "coins": own}
    return Event(name="coins", tick=where.tick, dp_rank=where.dp_rank, data=data)


def record_of(
    request: RequestSpec,
    index: int,
    mode: str,
    start: int,
    length: int,
    *,
    final: bool = False,
    drafts: int,
    layers: int,
) -> RoundRecord:
    """A round with one request; one tick a round. drafts, layers: see Drafter."""
    prefill = {Phase.PREFILL: 1, Phase.DRAFT_PREFILL: layers}
    decode = {Phase.DRAFT: drafts, Phase.VERIFY: 1, Phase.EXTEND: layers}
    return RoundRecord(
        index=index,
        tick=index,
        dp_rank=request.dp_rank,
        tp_rank=0,
        mode=mode,
        rids=(request.rid,),
        epochs=(0,),
        starts=(start,),
        lens=(length,),
        final=(final,),
        forwards={str(phase): count for phase, count in (prefill if mode == "PREFILL" else decode).items()},
    )
