"""Files that a test changes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def edit_json(path: Path, **changes: Any) -> None:
    """Write other values into a file that holds a JSON object."""
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
