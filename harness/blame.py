"""Whose fault it is that a batch died: SGLang's, or that of something of ours that only looks on.

Engine side: standard library only. It must not know what was being looked at.
"""

from __future__ import annotations

import traceback
from pathlib import Path

#: Our files that only look on. What fails in a stand-in, a mutant or a transfer may be SGLang's doing.
WATCHERS = ("gate", "recorder", "probe", "dp_probe", "graph_probe", "handoff_probe", "tail_probe", "snapshot", "packed")


def watcher(error: BaseException) -> str | None:
    """Which of them the error comes from; None if it comes from SGLang or from what stands in for it.

    Theirs, if it is the innermost frame outside the libraries: what they call of SGLang has frames of its own. A device
    tells of an error late, to whoever asks next.
    """
    if getattr(error, "of_ours", False):
        return "transfer backend"
    if "CUDA" in str(error):
        return None
    ours, frames = Path(__file__).parent, traceback.extract_tb(error.__traceback__)
    inner = next(
        (Path(f.filename) for f in reversed(frames) if "/sglang/" in f.filename or ours in Path(f.filename).parents),
        None,
    )
    return inner.stem if inner is not None and inner.parent == ours and inner.stem in WATCHERS else None
