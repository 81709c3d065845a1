"""Compares what the user gets: final texts against plain greedy decoding. It must not import torch."""

from __future__ import annotations

from harness.contract.trace import Trace


def text_identical(engine: Trace, reference: Trace) -> bool | None:
    """Whether every request's text equals the plain greedy text as far as it got; None if there is no text at all."""
    plain = {event.data["rid"]: tuple(event.data["output_ids"]) for event in reference.events if event.name == "greedy"}
    compared = [(end, plain[end.rid]) for end in engine.ends if end.rid in plain and end.output_ids]
    if not compared:
        return None
    return all(
        end.output_ids == text[: len(end.output_ids)] and (end.reason == "abort" or len(end.output_ids) == len(text))
        for end, text in compared
    )
