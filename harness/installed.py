"""The package `eaglecheck` of an installation: where its command starts.

A wheel keeps harness/, reference/, cases/ and reports/ in this folder, which is on no import path, so that no other
program finds a package called `cases`. Only the command puts it there, for itself. A checkout has them on its path.

This file alone is copied where a checkout is installed (`pip install -e .`): what it does not say, no copy keeps.
"""

from __future__ import annotations

import sys
from pathlib import Path


def main() -> None:
    """The `eaglecheck` command."""
    here = Path(__file__).resolve().parent
    if (here / "harness").is_dir():
        sys.path.insert(0, str(here))
    from harness.launcher import main as start

    start()
