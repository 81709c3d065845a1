"""What a request asks for, as SGLang's own request has it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from harness.contract.requests import SAMPLING, RequestSpec


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
