"""Asks `nvidia-smi`, the one tool that every GPU machine has, and takes its lines apart.

Both sides: standard library only. It must not know what the values are for.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

#: The values that may hold commas themselves.
NAMES = ("name", "process_name")


class SmiError(Exception):
    """It could not be asked, or answered something else; the text says what was found."""


class NoSmi(SmiError):
    """There is no nvidia-smi here."""


class SmiFailed(SmiError):
    """It ended with an exit code; `said` is what it printed."""

    def __init__(self, code: int, said: str) -> None:
        super().__init__(f"nvidia-smi failed (exit {code}): {said or 'it printed nothing'}")
        self.code, self.said = code, said


class OtherAnswer(SmiError):
    """A line without the values asked for."""

    def __init__(self, line: str, count: int) -> None:
        super().__init__(f"nvidia-smi answered {line!r}, and {count} values were asked for")
        self.line = line


def query(subject: str, fields: Sequence[str], *, seconds: float) -> list[dict[str, str]]:
    """The values of each thing, as text by field; subject: 'gpu' or 'compute-apps'. Raises SmiError."""
    command = ["nvidia-smi", f"--query-{subject}={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=seconds, check=False)
    except FileNotFoundError as error:
        raise NoSmi("there is no nvidia-smi here") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SmiError(f"nvidia-smi cannot be asked: {error}") from error
    if done.returncode:
        raise SmiFailed(done.returncode, (done.stdout + done.stderr).strip())
    return [values(line, fields) for line in done.stdout.splitlines() if line.strip()]


def values(line: str, fields: Sequence[str]) -> dict[str, str]:
    """The values of one line; OtherAnswer where there are too few, or too many without a name among them."""
    parts = [part.strip() for part in line.split(",")]
    over = len(parts) - len(fields)
    name = next((place for place, field in enumerate(fields) if field in NAMES), None)
    if over < 0 or (over and name is None):
        raise OtherAnswer(line, len(fields))
    if name is not None:
        parts[name : name + over + 1] = [", ".join(parts[name : name + over + 1])]
    return dict(zip(fields, parts, strict=True))
