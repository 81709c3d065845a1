"""Starts SGLang's processes as copies of the host, which has imported everything, instead of as new interpreters.

A boot on a CPU is mostly imports, three times over: host, scheduler, and a detokenizer that nothing is sent to while
token ids go in and out (`skip_tokenizer_init`). For test sessions only, which boot engines by the dozen; commands start
engines as SGLang does, and a test compares the two.

Engine side: standard library only. It must not know what a process does, beside the one that has nothing to do.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from multiprocessing import context, popen_fork
from multiprocessing.process import BaseProcess
from typing import Any

#: SGLang's process that turns tokens into text.
WITHOUT_WORK = "run_detokenizer_process"


def install(first: Callable[[], None]) -> None:
    """From here on `multiprocessing.Process(…).start()` copies this process, threads left behind; `first` runs first.

    A CUDA context does not survive a copy: not for GPUs. Not for ranks either: with 0.5.11 the first of two never got a
    request that SGLang's controller had sent.
    """

    def copied(process: BaseProcess) -> Any:
        target = process._target  # type: ignore[attr-defined]
        if target.__name__ == WITHOUT_WORK:
            process._target, process._args, process._kwargs = _wait, (), {}  # type: ignore[attr-defined]
            target = _wait

        def run(*args: Any, **kwargs: Any) -> None:
            first()
            target(*args, **kwargs)

        process._target = run  # type: ignore[attr-defined]
        return popen_fork.Popen(process)

    context.Process._Popen = staticmethod(copied)  # type: ignore[assignment]


def _wait() -> None:
    while True:
        signal.pause()
