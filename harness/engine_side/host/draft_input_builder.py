"""What the release's builder of draft inputs does with hand-overs that its scheduler never lets through to it.

Component level: a direct call, in the decode side's scheduler with its own settings, on requests of ours that hold what
the builder reads. So nothing here says that an engine gets that far, and it is no part of a verdict.

Engine side: standard library, torch and SGLang only. It must not change anything of the engine.
"""

from __future__ import annotations

import inspect
import traceback
import types
from collections.abc import Sequence
from typing import Any

WIDTH, TOP, PROMPT = 8, 16, 3


def answers(scheduler: Any) -> dict[str, dict[str, Any]]:
    """Case -> `outcome`: built, no draft input, or raises, with the error and SGLang's innermost frame."""
    cases = {
        "two requests": (True, True),
        "no request": (),
        "no hidden state": (False,),
        "one of two without": (True, False),
    }
    return {case: _answer(scheduler, hidden) for case, hidden in cases.items()}


def _answer(scheduler: Any, hidden: Sequence[bool]) -> dict[str, Any]:
    try:
        made = _build(scheduler, hidden)
    except Exception as error:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/sglang/" in frame.filename]
        where = f"{frames[-1].filename.split('/sglang/')[-1]}:{frames[-1].name}" if frames else "not in SGLang"
        return {"outcome": "raises", "error": f"{type(error).__name__}: {error}".splitlines()[0], "site": where}
    return {"outcome": "no draft input"} if made is None else {"outcome": "built", "what": type(made).__name__}


def _build(scheduler: Any, hidden: Sequence[bool]) -> Any:
    """What the builder makes of one request for each item; hidden: whether its state came with it."""
    import torch

    count, device = len(hidden), scheduler.device
    batch = types.SimpleNamespace(
        reqs=[_request(torch, number, hidden=came) for number, came in enumerate(hidden)],
        device=device,
        enable_overlap=False,  # nothing may reach the relay of the running engine
        model_config=scheduler.model_config,
        req_pool_indices=torch.arange(count, device=device),
        seq_lens=torch.full((count,), PROMPT, dtype=torch.int64, device=device),
    )
    build = scheduler.spec_algorithm.build_disagg_draft_input
    given = {
        "batch": batch,
        "server_args": scheduler.server_args,
        "last_tokens_tensor": torch.arange(count, device=device),
        "future_map": None,
    }
    return build(**{name: given[name] for name in inspect.signature(build).parameters})


def _request(torch: Any, number: int, *, hidden: bool) -> Any:
    return types.SimpleNamespace(
        output_topk_p=torch.ones(TOP),
        output_topk_index=torch.full((TOP,), number, dtype=torch.int64),
        hidden_states_tensor=torch.full((WIDTH,), float(number)) if hidden else None,
        output_dsa_topk_indices=None,
    )
