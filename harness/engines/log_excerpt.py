"""What is shown of an engine's log: its last lines that say something, and the last exception in it.

It must not judge what they mean.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

#: A progress bar of tqdm's, and what stands before it in its line: `… 0/1 [00:00<?, ?it/s]`, `3it [00:00, 9it/s]`.
BAR = re.compile(r".*?\[(?:\d+:)+\d+[<,][^\]]*\]")
#: What processes write as they end each other, or notice that others have ended.
FAREWELL = re.compile(r"Received sigquit|SIGQUIT received|kill_process_tree called|\bresource_tracker: There appear")
#: How a traceback begins, and the first line of the exception behind it.
TRACEBACK, EXCEPTION = "Traceback (most recent call last)", re.compile(r"[A-Za-z_][\w.]*(?:: |:?$)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Excerpt:
    """lines: the last ones, with `error` before them if it is not among them. error: `NAME: …`, empty without one."""

    lines: tuple[str, ...] = ()
    error: str = ""


def excerpt(log: Path, *, most: int) -> Excerpt:
    """Of a log at least its last `most` lines, without progress bars, farewells and empty lines.

    Nothing of one that cannot be read.
    """
    try:
        text = log.read_text(errors="replace")
    except OSError:
        return Excerpt()
    without_bars = (BAR.sub("", line).rstrip() for line in text.splitlines())
    lines = [line for line in without_bars if line and not FAREWELL.search(line)]
    error, last = _last_exception(lines), lines[-most:]
    return Excerpt(lines=tuple(last if not error or error in last else [error, *last]), error=error)


def _last_exception(lines: list[str]) -> str:
    for start in (place for place in reversed(range(len(lines))) if TRACEBACK in lines[place]):
        for line in lines[start + 1 :]:
            if EXCEPTION.match(line):
                return line
    return ""
