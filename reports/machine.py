"""What `eaglecheck doctor` and `eaglecheck engines list` print. Commands stand on lines of their own, to be copied."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from harness.doctor import Finding
from harness.envs import EngineEnv
from reports.prose import say

STYLE = {"ok": "green", "warn": "yellow", "missing": "bold red"}


def render_doctor(console: Console, found: Sequence[Finding], *, first_run_installs: bool = False) -> None:
    """One line an answer, with what to type under each that can be mended, and what it all comes to.

    first_run_installs: whatever is missing is installed by the first run, so nothing needs to be typed before it.
    """
    wide = max(len(finding.name) for finding in found)
    for place, finding in enumerate(found, 1):
        line = Text()
        line.append(f"{finding.status:<7}", style=STYLE[finding.status])
        line.append(f"  {finding.name:<{wide}}  {finding.detail}")
        say(console, line)
        if finding.mend and finding.mend not in {later.mend for later in found[place:]}:  # one command mends several
            say(console, f"{'':<9}to mend it:  {finding.mend}")
    missing = [finding.name for finding in found if finding.status == "missing"]
    warned = [finding.name for finding in found if finding.status == "warn"]
    say(console)
    if missing and first_run_installs:
        what = ", ".join(missing)
        say(
            console,
            f"ready to run; the first run installs {what} (about 4 GB, once):  eaglecheck run",
            style=STYLE["ok"],
        )
    elif missing:
        say(console, f"a run is not possible yet: {', '.join(missing)}", style=STYLE["missing"])
    elif warned:
        say(console, f"ready to run; worth a look: {', '.join(warned)}", style=STYLE["warn"])
    else:
        say(console, "ready to run:  eaglecheck run", style=STYLE["ok"])


def render_engines(console: Console, engines: Sequence[EngineEnv], *, here: EngineEnv | None) -> None:
    """Every release that can be used here, and whether it is installed."""
    rows = [(f"{engine.version}", "ready" if engine.ready else engine.why, engine) for engine in engines]
    if here is not None:
        rows.insert(0, (here.version, "ready (this environment)", here))
    wide = max(len(version) for version, _, _ in rows)
    for version, state, engine in rows:
        line = Text(f"{version:<{wide}}  ")
        line.append(state, style="green" if engine.ready else "yellow")
        line.append(f", torch {engine.torch}" if engine.ready else "")
        say(console, line)
    say(console, "\ninstall one:  eaglecheck engines install VERSION")
