"""Crash attribution: whether SGLang or one of our hooks made a batch fail.

Engine side: standard library only. It must not know what was being looked at.
"""

from __future__ import annotations

import traceback
from pathlib import Path

HARNESS = Path(__file__).resolve().parents[2]
#: Our folders and files that do SGLang's work or change it: what fails in a replacement kernel, a mutant or a transfer
#: may be its doing. All others only look on.
AT_WORK = ("replacement_kernels", "transfer_backend", "mutants", "plugin_algorithm")


def watcher(error: BaseException) -> str | None:
    """The file that only looks on from which the error comes; None if it comes from SGLang or what stands in for it.

    Its own, if it is the innermost frame outside the libraries: what it calls of SGLang has frames of its own. SGLang
    may have made another error of ours. A device reports an error late, to the next caller.
    """
    found: str | None = None
    current: BaseException | None = error
    while found is None and current is not None:
        found, current = _watcher(current), current.__cause__ or current.__context__
    return found


def _watcher(error: BaseException) -> str | None:
    if getattr(error, "of_ours", False):
        return "transfer backend"
    if "CUDA" in str(error):
        return None
    files = [Path(frame.filename) for frame in reversed(traceback.extract_tb(error.__traceback__))]
    inner = next((file for file in files if "/sglang/" in str(file) or HARNESS in file.parents), None)
    if inner is None or HARNESS not in inner.parents or inner.stem in AT_WORK or inner.parent.name in AT_WORK:
        return None
    return inner.stem
