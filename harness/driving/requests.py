"""What a request asks of SGLang, in its own words, and what is kept of what it and its ranks answer in the end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from harness.contract.answers import RETURNED, flat_states
from harness.contract.requests import SAMPLING, RequestSpec
from harness.contract.scenario import Scenario
from harness.contract.trace import RequestEnd
from harness.driving.received import Received, place_of
from harness.engines.engine import Engine

#: What is kept of SGLang's `meta_info`, beside `spec_…` and log-probabilities.
SAID = (
    *("finish_reason", "prompt_tokens", "completion_tokens", "cached_tokens", "reasoning_tokens", "dp_rank"),
    *("num_retractions", "weight_version"),
)


def sampling_of(request: RequestSpec, eos: Sequence[int] = ()) -> dict[str, Any]:
    """SGLang sampling parameters of a request; without `eos` that of the checkpoint is ignored."""
    return {
        "temperature": request.temperature,
        "max_new_tokens": None if request.unlimited else request.max_new_tokens,
        "ignore_eos": request.ignore_eos or not (request.stop_token_ids or eos),
        **sent(request, SAMPLING),
    }


def sent(request: RequestSpec, keys: Sequence[str]) -> dict[str, Any]:
    """Those of the keys that it asks for, as JSON has them."""
    return request.model_dump(mode="json", include=set(keys) & set(request.asked))


def end_scenario(engine: Engine, scenario: Scenario, received: Received, *, submitted: Iterable[str]) -> None:
    """Ask every rank for what it has left, and for the answers of what was submitted."""
    for rank, ended in zip(engine.handshakes, engine.end(), strict=True):
        received.bring(partial(list, ended["messages"]), place_of(rank))
        note_rank(received, rank, ended, when="end")
        if "spent" in ended:
            received.note("spent", dp_rank=rank["dp_rank"], spent=ended["spent"], **received.of(rank))
        for name, fired in ended["fired"].items():
            received.note("fault", dp_rank=rank["dp_rank"], mutant=name, fired=fired, **received.of(rank))
    for answer in engine.collect(list(submitted)):
        for end in _of_samples(scenario, answer):
            _note_end(received, end)


def note_rank(received: Received, rank: Mapping[str, Any], said: Mapping[str, Any], *, when: str) -> None:
    """The pools of a rank; and what a boot that follows lines of SGLang's source said of them (host.executed)."""
    received.note("pool", dp_rank=rank["dp_rank"], when=when, **said["pool"], **received.of(rank))
    if "source" in said:
        received.note("source", dp_rank=rank["dp_rank"], when=when, **said["source"], **received.of(rank))


def _of_samples(scenario: Scenario, end: dict[str, Any]) -> list[dict[str, Any]]:
    """An end; what SGLang answers a request of several samples as a whole, an error, is the end of each."""
    request = next((one for one in scenario.requests if one.rid == end["rid"]), None)
    return [end] if request is None else [{**end, "rid": one.rid} for one in request.runs]


def _note_end(received: Received, end: Mapping[str, Any]) -> None:
    if end["reason"] == "error":
        received.note("request_error", rid=end["rid"], error=end["error"])
    if end.get("text") is not None:
        received.note("text", rid=end["rid"], text=end["text"], matched=end["matched"])
    received.assembler.ends.append(
        RequestEnd(
            rid=end["rid"],
            scheduler_step=received.scheduler_step,
            reason=end["reason"],
            output_ids=tuple(end["output_ids"]),
            cached_tokens=end["cached_tokens"],
        )
    )
    if "meta" in end:
        _note_answer(received, end["rid"], end["meta"], end["pieces"])


def _note_answer(received: Received, rid: str, meta: dict[str, Any], pieces: list[dict[str, Any]]) -> None:
    """Hidden states are kept as a tensor, once: a piece says again what those before it said. Times and ids of this
    engine are left out: equal runs are equal."""
    received.assembler.keep(f"{RETURNED}{rid}", flat_states(meta.get("hidden_states") or ()))
    pieces = [{**piece, "meta": _repeatable(piece["meta"])} for piece in pieces]
    received.note("answer", rid=rid, meta=_repeatable(meta), pieces=pieces)


def _repeatable(meta: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value for name, value in meta.items() if name in SAID or name.startswith("spec_") or "logprobs" in name
    }
