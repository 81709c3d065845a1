"""`--json` of a command that is interrupted: what there is by then is written, and says that it is not all.

It must not swallow the interrupt: the command still ends with exit code 3.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from harness.cli.documents import write_json
from harness.engines.interrupts import interrupts_held

#: The key that only such a document has.
KEY = "interrupted"


@contextlib.contextmanager
def kept(target: str | None, document: Callable[[KeyboardInterrupt], dict[str, Any]]) -> Iterator[None]:
    """While this block runs, an interrupt writes `document` (of what there is) to the target before it goes on."""
    try:
        yield
    except KeyboardInterrupt as stop:
        if target is not None:
            with interrupts_held():  # a second Ctrl-C must not cut the file off
                write_json({**document(stop), KEY: True}, target)
            stop.add_note(f"what there is by now was written to {'standard output' if target == '-' else target}")
        raise
