"""Run folders: their names, whether a run is still being written, and suggestions for a mistyped one.

It must not read what a run found.
"""

from __future__ import annotations

import contextlib
import difflib
import fcntl
import os
import re
from pathlib import Path
from typing import BinaryIO

MANIFEST, EVENTS, VERDICT = "manifest.json", "engine.jsonl", "verdict.json"
SCENARIO, FINDINGS = "scenario.json", "findings.jsonl"
LATEST = "latest"
#: Of a night, which is no run.
PLAN = "plan.json"
#: Files of which a folder of ours has at least one.
OWN = (MANIFEST, EVENTS, VERDICT, SCENARIO, PLAN)
#: Where a run keeps its failures, each a folder that `replay` takes; older ones called them specimens.
REPRODUCERS = ("reproducers", "specimens")
#: Folders named in a message.
SHOWN = 5
RUN_NAME = re.compile(r"\d{8}-\d{4}-[0-9a-f]{4}")


def is_ours(folder: Path) -> bool:
    """Whether a folder holds something that we write, by its names only."""
    return any((folder / name).exists() for name in OWN)


def is_case(folder: Path) -> bool:
    """Whether a folder is one scenario's, or a reproducer; by its names only, so a damaged one is found too."""
    return any((folder / name).exists() for name in (SCENARIO, FINDINGS))


def whole(folder: Path) -> Path | None:
    """The run or night that a run's, a scenario's or a reproducer's folder lies in, or is; None if it is none of them.

    It looks at names only, so a damaged one is found too.
    """
    place = folder.resolve()
    if not is_ours(place):
        return None
    outer = place.parent.parent if place.parent.name in REPRODUCERS else place.parent
    inner = place != outer and ((place / SCENARIO).exists() or place.parent.name in REPRODUCERS)
    return outer if inner and any((outer / name).exists() for name in (MANIFEST, EVENTS, PLAN)) else folder


def judgeable(folder: Path) -> list[Path]:
    """What can be judged in a folder that is neither a run nor a scenario, sorted: runs, and scenarios beside them."""
    places = [(Path(place), files) for place, _, files in os.walk(folder)]  # which passes over what goes meanwhile
    runs = {place for place, files in places if MANIFEST in files and not {*REPRODUCERS} & {*place.parts}}
    alone = {place for place, files in places if SCENARIO in files and not runs & {place, *place.parents}}
    return sorted(path for path in runs | alone if not any(part.is_symlink() for part in (path, *path.parents)))


def default_root() -> Path:
    """Where run folders go unless somebody says otherwise: $EAGLECHECK_RUNS, else ./runs."""
    return Path(os.environ.get("EAGLECHECK_RUNS") or "runs")


def lock(folder: Path) -> BinaryIO:
    """The manifest, locked against nobody but `is_locked`; the lock ends with the process, however that ends."""
    file = (folder / MANIFEST).open("rb")
    with contextlib.suppress(OSError):  # a file system without locks: the run then looks like one that was cut off
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return file


def is_locked(folder: Path) -> bool:
    """Whether a process that still lives writes this run."""
    with (folder / MANIFEST).open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False
    return False


def unfinished(folder: Path) -> str:
    """Why a run, or a scenario, that nobody writes any more has no verdict, as the end of "it is …"."""
    if (folder / VERDICT).exists():
        return f"incomplete: its {VERDICT} is damaged, so it is not known how it ended"
    return f"incomplete: it has no {VERDICT}, so it was cut off while running"


def _runs_in(root: Path) -> list[Path]:
    """The run folders in `root`, oldest first."""
    folders = (path.parent for path in root.glob(f"*/{MANIFEST}"))
    return sorted(path for path in folders if RUN_NAME.fullmatch(path.name) and not path.is_symlink())


def known_runs(root: Path) -> str:
    """The newest runs in `root`, or what else lies there, in words."""
    if names := [path.name for path in _runs_in(root)]:
        return f"runs in {root}: {', '.join(names[-5:])}"
    if names := sorted(path.parent.name for path in root.glob(f"*/{SCENARIO}")):
        return f"folders of one scenario in {root}, each of which can be named: {', '.join(names)}"
    if (root / PLAN).is_file():
        return f"it is a night's; judge it:  eaglecheck night --nights {root.parent}"
    return f"there are no runs in {root}; make one:  eaglecheck run"


def near(folder: Path) -> tuple[str, Path | None]:
    """What may have been meant instead of a folder that is not there: scenarios of its run, or runs, nearest first.

    In words, and the nearest of them.
    """
    if (folder.parent / MANIFEST).is_file():
        found = sorted(path.parent for path in folder.parent.glob(f"*/{SCENARIO}"))
        what, where = "scenarios of that run", str(folder.parent)
    else:
        roots = list(dict.fromkeys([folder.parent, default_root()]))
        found = [path for root in roots for path in _runs_in(root)]
        what, where = "runs", " or ".join(map(str, roots))
    if not found:
        return f"there are no {what} in {where}; make one:  eaglecheck run", None
    by_name = {path.name: path for path in found}
    close = difflib.get_close_matches(folder.name, by_name, n=3, cutoff=0.4)
    newest = [path.name for path in reversed(found)]
    shown = [by_name[name] for name in dict.fromkeys([*close, *newest])][:SHOWN]
    order = "nearest" if close else "newest"
    return f"{what} that are there, {order} first: {', '.join(map(str, shown))}", shown[0]
