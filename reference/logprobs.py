"""Log-probabilities of a text: of each of its tokens, of the most likely ones, and of ids that somebody asks for.

A token's is the log-softmax of the target's logits after everything before it; of output tokens as the request's rules
adjust them and at its temperature, before anything is cut off, of prompt tokens as they are. This module must not see a
trace.

Shapes: m positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from reference.logit_rules import Rules

#: Positions whose logits are held at a time.
BLOCK = 64
#: More of the most likely tokens than asked for are said: those nearer to each other than rounding may change places,
#: and in half precision a large vocabulary has many.
BEYOND = 64


def logprobs(rules: Rules, output: Sequence[int], states: Tensor, logits: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """What an event 'logprobs' says, of the positions whose log-probabilities the request asks for.

    states [T,h]: the target's last ones over prompt and output. first: the first position in the text; then a value a
    position: own, of its token; scales, the greatest |logit| there; top_ids and top_values, best first; ids.
    """
    request = rules.request
    tokens, prompt = (*request.input_ids, *output), len(request.input_ids)
    first = prompt if request.logprob_start_len < 0 else min(request.logprob_start_len + 1, prompt)
    said: dict[str, Any] = {"rid": request.rid, "first": first}
    said |= {name: [] for name in ("own", "scales", "top_ids", "top_values", "ids")}
    for places in _blocks(first, prompt, len(tokens)):
        temperature = (request.temperature or 1.0) if places.start >= prompt else 1.0
        rows = logits(states[places.start - 1 : places.stop - 1])
        if places.start >= prompt and rules.adjusts:
            rows = torch.stack([rules.adjusted(row, tokens[prompt:at]) for at, row in zip(places, rows, strict=True)])
        scaled = rows.double() / temperature
        values = scaled.log_softmax(-1)
        wanted = torch.tensor(tokens[places.start : places.stop], device=values.device)
        wide = request.top_logprobs_num + (BEYOND if request.top_logprobs_num else 1)
        top = values.topk(min(wide, values.shape[-1]), dim=-1)
        said["own"] += values.gather(-1, wanted[:, None])[:, 0].tolist()
        said["scales"] += scaled.nan_to_num(neginf=0.0).abs().amax(-1).tolist()
        said["top_ids"] += top.indices.tolist()
        said["top_values"] += top.values.tolist()
        said["ids"] += values[:, list(request.token_ids_logprob)].tolist()
    return said


def _blocks(first: int, prompt: int, end: int) -> Iterator[range]:
    """Positions of the prompt, then of the output, a block at a time."""
    for start, stop in ((first, prompt), (prompt, end)):
        for at in range(start, stop, BLOCK):
            yield range(at, min(at + BLOCK, stop))
