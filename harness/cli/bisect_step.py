"""One step of `git bisect run`: judges the commit that git's bisect is at. Started by the script beside its state.

Its exit codes are its own, so that a Python that cannot start, an exception or a signal is never taken for a verdict:
the script turns them into git's 0, 1 and 125, and everything else into 255, which stops the search.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import traceback
from pathlib import Path
from typing import Any

from rich.console import Console

from harness.bisect.repeats import Rate
from harness.bisect.repository import Repository, run_git
from harness.bisect.search import Tried
from harness.bisect.subjects import Failure
from harness.bisect.trees import Workshop
from harness.bisect.trials import Trials
from harness.bisect.verdicts import Cache
from harness.cli import bisect_commit, outcome
from harness.cli.bisect_commits import BAD, CONFIG, FAULT, GOOD, STATE, TRIED, UNKNOWN
from harness.cli.bisect_runs import setting_of

CODES = {"good": GOOD, "bad": BAD, "unknown": UNKNOWN}
STOP = 43


def main(folder: Path) -> int:
    try:
        with outcome.termination_as_interrupt():
            tried = _judge(folder)
    except BaseException as error:
        if not isinstance(error, KeyboardInterrupt):
            traceback.print_exc()
        (folder / FAULT).write_text(f"a step of the search stopped: {type(error).__name__}: {error}")
        return STOP
    with (folder / TRIED).open("a") as file:
        file.write(json.dumps(dataclasses.asdict(tried)) + "\n")
    return CODES[tried.call]


def _judge(folder: Path) -> Tried:
    config = json.loads((folder / CONFIG).read_text())
    shop = Workshop(folder=folder, repository=Repository(folder=Path(config["repository"])))
    commit = run_git(folder / STATE, "rev-parse", "--verify", "BISECT_HEAD")
    judge = bisect_commit.judge(setting_of(config["setting"]), _trials(config), shop=shop, console=Console(stderr=True))
    return judge(commit)


def _trials(config: dict[str, Any]) -> Trials:
    """As they were learned at the bad end."""
    failure = Failure(signature=config["failure"]["signature"], kinds=tuple(config["failure"]["kinds"]))
    return Trials(
        failure=failure,
        cache=Cache.at_home(),
        repeat=config["repeat"],
        fresh=config["fresh"],
        rate=None if config["rate"] is None else Rate(**config["rate"]),
        measured=True,
    )


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
