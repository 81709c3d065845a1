"""What requests of generated scenarios ask for beside tokens: log-probabilities, hidden states, a stream.

Drawn after everything else, so that the batches stay those of the program. It must not change when anything happens:
log-probabilities of a prompt keep it from the prefix cache, so they are asked for where no prefix has to be found.
"""

from __future__ import annotations

from random import Random
from typing import Any

from cases.boots import Boot
from harness.checks.logprobs import LOOSE
from harness.contract.requests import RequestSpec

#: Ids that a request may ask the log-probabilities of.
MOST_IDS = 3


def asking(random: Random, boot: Boot, requests: tuple[RequestSpec, ...], *, cached: bool) -> tuple[RequestSpec, ...]:
    """Each with what it asks for, about half of them nothing. cached: the program needs its prompts' prefixes.

    Log-probabilities only where they are judged.
    """
    loose = any({*LOOSE} & {*request.asked} for request in requests)
    handed = boot.engine.disaggregation  # no decode side has those of a first token (F-071)
    ids = _ids(random, boot) if random.random() < 0.25 and not loose and not handed else ()
    return tuple(
        request.model_copy(update=_returned(random, boot, request, ids=ids, cached=cached))
        if request.expect == "answer"  # nothing comes back of the others
        else request
        for request in requests
    )


def _returned(
    random: Random, boot: Boot, request: RequestSpec, *, ids: tuple[int, ...], cached: bool
) -> dict[str, Any]:
    """ids: asked for by all requests of a program or by none (on older releases a mixture ends the engine, F-040)."""
    asked: dict[str, Any] = {"stream": True} if random.random() < 0.25 else {}
    if boot.engine.enable_return_hidden_states and random.random() < 0.5:
        asked["return_hidden_states"] = True
    if {*LOOSE} & {*request.asked} or (not ids and random.random() < 0.5):
        return asked
    asked |= {"return_logprob": True}
    asked |= {"token_ids_logprob": ids} if ids else {}
    if random.random() < 0.5:
        asked["top_logprobs_num"] = random.choice((1, 2, 5, 20))
    if not cached and not boot.engine.disaggregation and random.random() < 0.4:  # the prefill side answers those
        asked["logprob_start_len"] = random.choice((0, random.randint(0, len(request.input_ids) - 1)))
    return asked


def _ids(random: Random, boot: Boot) -> tuple[int, ...]:
    return tuple(random.sample(range(boot.vocab), random.randint(1, MOST_IDS)))
