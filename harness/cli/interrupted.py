"""`--json` of a command that is interrupted: what there is by then is written, and says that it is not all.

It must not swallow the interrupt: the command still ends with exit code 3.
"""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from harness.cli.documents import write_json
from harness.cli.outcome import TYPED
from harness.engines.processes import interrupts_held

#: The key that only such a document has.
KEY = "interrupted"


@contextlib.contextmanager
def kept(
    target: str | None,
    document: Callable[[KeyboardInterrupt], dict[str, Any]],
    *,
    left: Callable[[], str] = lambda: "",
) -> Iterator[None]:
    """While this block runs, an interrupt writes `document` (of what there is) to the target before it goes on.

    left: what to say of what is left behind, and what to type next.
    """
    try:
        yield
    except KeyboardInterrupt as stop:
        if target is not None:
            with interrupts_held():  # a second Ctrl-C must not cut the file off
                write_json({**document(stop), KEY: True}, target)
            stop.add_note(f"what there is by now was written to {'standard output' if target == '-' else target}")
        if said := left():
            stop.add_note(said)
        raise


def typed_again(*, without: Sequence[str] = (), more: Sequence[str] = ()) -> str:
    """The command as it was typed, less these flags and with these options; empty outside a command."""
    typed = TYPED.get()
    return shlex.join(["eaglecheck", *(part for part in typed if part not in without), *more]) if typed else ""
