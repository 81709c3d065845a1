"""Waits for the grammars of requests that arrived: SGLang compiles them by threads, beside its loop.

SGLang looks whether they are ready once a step and goes on without those that are not. A request's first batch would
depend on the machine's speed. SGLANG_GRAMMAR_POLL_INTERVAL is no way to wait: up to 0.5.15 a step lasts all of it,
even if every grammar is ready. Engine side: standard library and SGLang's objects only.
"""

from __future__ import annotations

from concurrent.futures import Future, wait
from typing import Any

from ..hooks import HookRegistry, Original, around

#: How long a step waits at most; SGLang then counts its own polls, as ever.
COMPILE_SECONDS = 60.0


def install(hooks: HookRegistry, module: Any) -> None:
    """module: SGLang's, of the queue in which requests wait for their grammars."""
    hooks.wrap(module, "GrammarManager.get_ready_grammar_requests", around(_once_compiled))


def _once_compiled(original: Original, manager: Any, *args: Any, **kwargs: Any) -> Any:
    wait([req.grammar for req in manager.grammar_queue if isinstance(req.grammar, Future)], COMPILE_SECONDS)
    return original(manager, *args, **kwargs)
