"""The package `eaglecheck` of an installed wheel: where its command starts.

A wheel keeps harness/, reference/, cases/ and reports/ in this folder, which is on no import path, so that no other
program finds a package called `cases`. Only the command puts it there, for itself. A checkout has them on its path.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path


def main() -> None:
    """The `eaglecheck` command."""
    here = Path(__file__).resolve().parent
    if (here / "harness").is_dir():
        sys.path.insert(0, str(here))
    try:
        os.getcwd()
        from harness.cli.main import app
    except KeyboardInterrupt:  # what is imported takes a second
        sys.exit(_said("interrupted", code=3))
    except FileNotFoundError as error:
        if error.filename is not None:
            raise
        sys.exit(_said("the folder that this shell is in is gone\n  go to another:  cd FOLDER", code=2))
    app(prog_name="eaglecheck")


def _said(text: str, *, code: int) -> int:
    """As harness.cli.outcome says it, which is not imported yet."""
    print(f"eaglecheck: {text}", file=sys.stderr)
    return code
