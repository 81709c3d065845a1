"""What `eaglecheck doctor` and `eaglecheck engines list` print. Commands stand on lines of their own, to be copied."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from harness.engines.envs import ANY_OTHER, EngineEnv
from harness.machines.bundle import Manifest
from harness.machines.doctor_gpu import Answer
from reports.prose import say

MIB = 2**20
STYLE = {"ok": "green", "warn": "yellow", "missing": "bold red"}


def render_doctor(console: Console, found: Sequence[Answer], *, first_run_installs: bool = False) -> None:
    """One line an answer, with what to type under each that can be fixed, and what it all comes to.

    first_run_installs: whatever is missing is installed by the first run, so nothing needs to be typed before it.
    """
    wide = max(len(finding.name) for finding in found)
    for place, finding in enumerate(found, 1):
        line = Text()
        line.append(f"{finding.status:<7}", style=STYLE[finding.status])
        line.append(f"  {finding.name:<{wide}}  {finding.detail}")
        say(console, line)
        if finding.fix and finding.fix not in {later.fix for later in found[place:]}:  # one command fixes several
            say(console, f"{'':<9}to fix it:  {finding.fix}")
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


def render_engines(console: Console, engines: Sequence[tuple[EngineEnv, str]]) -> None:
    """Releases, each with what there is to say of it beside its state: whether it is installed, and its torch."""
    wide = max(len(engine.version) for engine, _ in engines)
    for engine, said in engines:
        line = Text(f"{engine.version:<{wide}}  ")
        line.append("ready" if engine.ready else engine.why, style="green" if engine.ready else "yellow")
        line.append(f", torch {engine.torch}" if engine.ready else "")
        line.append(f"; {said}" if said else "")
        say(console, line)
    say(console, f"\ninstall one, or {ANY_OTHER}:  eaglecheck engines install VERSION")


def render_bundle(console: Console, manifest: Manifest, path: Path) -> None:
    """What a bundle came to: a size a part, a size an archive, and what to type on the machine it is for."""
    rows = [(tree.name.rpartition("-")[0], tree) for tree in manifest.trees]
    wide = max(len(name) for name, _ in rows)
    say(console, f"{'part':<{wide}}  {'files':>6} {'MiB':>7} {'left out':>9}")
    for name, tree in rows:
        left_out = sum(rule.size for rule in tree.slimmed) / MIB
        say(console, f"{name:<{wide}}  {tree.files:>6} {tree.size / MIB:>7.1f} {left_out:>9.1f}")
    say(console)
    for archive in manifest.archives:
        say(console, f"{archive.member:<{wide}}  {archive.size / MIB:>14.1f}")
    releases = ", ".join(release.version for release in manifest.releases)
    what = f"SGLang {releases}" if releases else "a part to be unpacked after the releases it was packed for"
    files = [path.with_name(name) for name in manifest.files] or [path]
    sizes = [file.stat().st_size / MIB for file in files]
    say(console)
    for file, size in zip(files, sizes, strict=True):
        say(console, f"{file}: {size:.1f} MiB{f', {what}' if not manifest.files else ''}")
    if manifest.files:
        say(console, f"{sum(sizes):.1f} MiB together, {what}")
    say(console, f"for Python {manifest.python}, torch {manifest.torch}, glibc {manifest.glibc}, {manifest.cuda_arch}")
    for release in manifest.releases:
        if release.torch:
            say(console, f"SGLang {release.version} runs there on torch {release.torch} out of the bundle")
    names = " ".join(file.name for file in files)
    say(console, f"there, in a copy of this folder:  python3 -m harness.machines.unpack {names}")
