"""`eaglecheck` as it is typed, run in this process."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner, Result

from harness.cli.main import app


def call(*typed: str | Path, code: int | None = None) -> Result:
    """What the command answers. code: the exit code it must have; AssertionError with all it said if it has another."""
    __tracebackhide__ = True
    done = CliRunner().invoke(app, [str(word) for word in typed])
    if code is not None and done.exit_code != code:
        said = f"exit code {done.exit_code} instead of {code}: {' '.join(map(str, typed))}\n{done.output}"
        raise AssertionError(said) from done.exception
    return done
