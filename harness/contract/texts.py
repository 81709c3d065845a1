"""Compares what the user gets: final texts against plain greedy decoding. It must not import torch."""

from __future__ import annotations

from collections.abc import Sequence

from harness.contract.scenario import Scenario
from harness.contract.trace import Trace
from harness.contract.types import Phase


def alike(one: Sequence[int], other: Sequence[int]) -> int:
    """How many leading tokens two texts have in common."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (left, right) in pairs if left != right), min(len(one), len(other)))


def text_identical(engine: Trace, reference: Trace, scenario: Scenario) -> bool | None:
    """Whether every greedy request's text equals the plain greedy text as far as it got; None if there is no text.

    Of a request that an engine took with it when it died, what had been committed may differ already; that it does
    not yet says nothing.
    """
    greedy = {request.rid for request in scenario.requests if request.greedy}
    reported = [event.data for event in reference.named("greedy")]
    plain = {str(data["rid"]): tuple(data["output_ids"]) for data in reported if data["rid"] in greedy}
    whole = [end for end in engine.ends if end.output_ids or end.reason in ("stop", "length")]
    ended = [(end, plain[end.rid]) for end in whole if end.rid in plain]
    lost = plain.keys() - {end.rid for end, _ in ended}
    if any(_goes_astray(committed(engine, rid, scenario), plain[rid]) for rid in lost):
        return False
    if not ended:
        return None
    return all(
        end.output_ids == text[: len(end.output_ids)] and (end.reason == "abort" or len(end.output_ids) == len(text))
        for end, text in ended
    )


def committed(engine: Trace, rid: str, scenario: Scenario) -> dict[int, int]:
    """Place in the output -> token, for what verifies committed of a request; its first token came with its prompt."""
    rows, prompt = engine.rows, len(scenario.request(rid).input_ids)
    mine = (rows.strings["phase"] == Phase.ACCEPT) & (rows.strings["rid"] == rid)
    places = rows.ints["committed"][mine] + 1 + rows.ints["slot"][mine] - prompt
    return dict(zip(places.tolist(), rows.ints["input_id"][mine].tolist(), strict=True))


def _goes_astray(tokens: dict[int, int], text: tuple[int, ...]) -> bool:
    return any(text[place] != token for place, token in tokens.items() if 0 <= place < len(text))
