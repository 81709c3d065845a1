"""Whether the files of an installed SGLang are those of the release that it calls itself.

It must not import sglang, and must not change anything.
"""

from __future__ import annotations

import base64
import csv
import hashlib
from collections.abc import Sequence
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

from harness.engines.envs import EngineEnv


def changed(env: EngineEnv) -> tuple[str, ...]:
    """Files of a ready environment's SGLang that are not as published; of a commit, which nobody published, none."""
    package = env.package
    return () if env.tree is not None or package is None else _changed(package.parent, env.left_out)


@cache
def _changed(site: Path, left_out: tuple[str, ...]) -> tuple[str, ...]:
    return changed_files(site, left_out=left_out)


def changed_files(site: Path, *, left_out: Sequence[str] = ()) -> tuple[str, ...]:
    """Files of SGLang's wheel that are gone or differ from the hashes it was published with.

    left_out: patterns of files that a bundle does without.
    """
    record = next(iter(site.glob("sglang-*.dist-info/RECORD")), None)
    if record is None:
        return ("RECORD",)
    with record.open(newline="") as rows:
        published = [(row[0], row[1]) for row in csv.reader(rows) if len(row) > 1 and row[1].startswith("sha256=")]
    own = (
        (name, digest)
        for name, digest in published
        if name.startswith("sglang/") and not any(fnmatch(name, pattern) for pattern in left_out)
    )
    return tuple(name for name, digest in own if _sha256(site / name) != digest)


def _sha256(path: Path) -> str:
    if not path.is_file():
        return ""
    digest = hashlib.sha256(path.read_bytes()).digest()
    return "sha256=" + base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
