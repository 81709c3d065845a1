"""Checkouts to bisect, a home with two releases for them, and verdicts in the cache instead of engines."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cases import catalogue
from cases.meta import pretended_engine
from cases.meta.command_line import call
from cases.meta.histories import History
from harness.bisect.trials import Subject
from harness.bisect.verdicts import Cache, Failure, Run
from harness.cli.bisect_runs import Setting
from harness.contract.types import Outcome
from harness.engines import envs

CASE = catalogue.load("pr25015")
RELEASES = ("0.5.12.post1", "0.5.13")
PINS = {"0.5.12.post1": ["torch==2.11.0", "numpy"], "0.5.13": ["numpy", "torch==2.11.0", "kernels<0.15,>=0.14"]}
NOTES = "python/sglang/notes.py"
PASSES = Run(outcome=Outcome.PASS, run="runs/pass", seconds=1.0)
FAILS = Run(outcome=Outcome.FAIL, kinds=("POSITION",), signatures=("s",), run="runs/fail", seconds=1.0)


def furnish(home: Path) -> None:
    """A home with two releases whose engines end at once, and their pins beside them."""
    pretended_engine.furnish(home, versions=RELEASES, published=RELEASES)
    for version in RELEASES:
        site = home / "engines" / version / "site"
        info = site / f"sglang-{version}.dist-info"
        info.mkdir()
        lines = "".join(f"Requires-Dist: {pin}\n" for pin in [*PINS[version], 'x; extra == "all"'])
        (info / "METADATA").write_text(f"Metadata-Version: 2.4\nName: sglang\nVersion: {version}\n{lines}")
        (site / "sglang" / "srt" / "grpc").mkdir(parents=True)
        (site / "sglang" / "srt" / "grpc" / "_core.cpython-311-x86_64-linux-gnu.so").write_text(version)


def start(folder: Path) -> History:
    """A repository with one commit: the older release, tagged."""
    made = History(folder=folder).start()
    made.write("python/sglang/__init__.py", "")
    made.write("python/sglang/srt/grpc/__init__.py", "")
    made.write("rust/grpc/lib.rs", "1")
    project(made, PINS["0.5.12.post1"])
    made.commit("0.5.12.post1", tag="v0.5.12.post1")
    return made


def project(made: History, pins: Sequence[str]) -> None:
    """What the commit needs, as SGLang says it."""
    module = 'target = "sglang.srt.grpc._core"\npath = "../rust/grpc/Cargo.toml"\n'
    text = f'[project]\nname = "sglang"\ndependencies = {json.dumps(pins)}\n'
    made.write("python/pyproject.toml", f"{text}[[tool.setuptools-rust.ext-modules]]\n{module}")


def notes(made: History, count: int) -> None:
    """Commits that change a comment."""
    texts = {f"note {at}": f"# {at}\n" for at in range(len(made.commits), len(made.commits) + count)}
    first, *others = texts
    made.write(NOTES, texts[first])
    made.commit(first)  # with what else was written
    if others:
        made.commit_texts(NOTES, {title: texts[title] for title in others})


SETTING = Setting(
    subject=Subject(name="pr25015", scenario=CASE.scenario, failure=Failure(kinds=CASE.kinds)), device="cpu"
)


def know(made: History, *, verdicts: Mapping[str, Run], release: str = "0.5.12.post1") -> None:
    """Put verdicts (commit -> run) in the cache, as runs in the environment of `release`."""
    for commit, run in verdicts.items():
        content = made.git("rev-parse", f"{commit}:python")
        Cache.at_home().add(SETTING.identity(envs.state(release), tree=content), run)


def bisect(
    made: History, tmp_path: Path, *, bad: str, good: str, code: int = 0, more: Sequence[str] = ()
) -> tuple[Any, str]:
    """(the JSON, what was printed) of the command."""
    report = tmp_path / "bisect.json"
    options = ["--case", "pr25015", "--repo", str(made.folder), "--bad", bad, "--good", good]
    done = call("bisect", *options, "--json", report, *more, code=code)
    return (json.loads(report.read_text()) if report.is_file() else None), done.output
