"""SHA-256 of large files, remembered by path, size and time of change, since reading them takes as long as a boot."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from harness.contract import plain_files
from harness.contract.json_files import NotJSON, parsed
from harness.engines import envs

KEPT = "digests.json"


def sha256_of(file: Path) -> str:
    """Of the file as it is now; a folder for what is kept that cannot be written costs the time again, nothing else."""
    state = file.stat()
    key = f"{file.resolve()} {state.st_size} {state.st_mtime_ns}"
    store = envs.home() / KEPT
    known = _known(store)
    if key not in known:
        found = plain_files.sha256(file)
        with contextlib.suppress(OSError):
            store.parent.mkdir(parents=True, exist_ok=True)
            plain_files.replace(store, json.dumps({**_known(store), key: found}).encode())
        return found
    return str(known[key])


def _known(store: Path) -> dict[str, str]:
    try:
        found = parsed(plain_files.content(store))
    except (OSError, NotJSON):
        return {}
    return found if isinstance(found, dict) else {}
