"""How the command starts: what has to be so before anything slow is imported."""

from __future__ import annotations

import locale
import os
import signal
import sys
from typing import NoReturn

STDOUT, STDERR = 1, 2


def main() -> None:
    """The `eaglecheck` command."""
    _open_closed()
    heeded = signal.getsignal(signal.SIGINT)
    if heeded is signal.default_int_handler:  # what is imported takes a second, and an extension module may hide it
        signal.signal(signal.SIGINT, lambda *_: _end("interrupted", code=3))
    try:
        os.getcwd()
    except FileNotFoundError:
        _end("the folder that this shell is in is gone\n  go to another:  cd FOLDER", code=2)
    if (read_as := locale.getpreferredencoding(False)).lower() not in ("utf-8", "utf8"):
        _end(f"files are read as {read_as} here, and ours are UTF-8\n  type:  export PYTHONUTF8=1", code=2)
    from harness.cli.main import app

    signal.signal(signal.SIGINT, heeded)
    app(prog_name="eaglecheck")


def _open_closed() -> None:
    """Standard streams that whoever started us has closed (`2>&-`) lead nowhere: no file of ours may get their number,
    and an error that nobody reads keeps its exit code."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= STDERR:
        pass
    os.close(number)
    sys.stdout = sys.stdout or os.fdopen(STDOUT, "w")
    sys.stderr = sys.stderr or os.fdopen(STDERR, "w")


def _end(text: str, *, code: int) -> NoReturn:
    """As harness.cli.outcome says it, which is not imported yet; there is nothing to tidy up."""
    print(f"eaglecheck: {text}", file=sys.stderr, flush=True)
    os._exit(code)
