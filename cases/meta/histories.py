"""Git histories with a defect in a known commit, made of installed releases' own Python files.

A checkout looks like SGLang's: python/sglang, python/pyproject.toml with the release's pins, the sources of compiled
parts, and a tag a release. Every commit of `two_releases` but the one with foreign pins can boot.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

#: What moves the draft positions one ahead, as SGLang #25015 was: text that is there once, and what replaces it.
EARLY = "forward_batch.out_cache_loc = out_cache_loc[i]\n"
ADD = "            forward_batch.positions.add_(1)\n"
WORKER = "python/sglang/srt/speculative/eagle_worker_v2.py"
RUST = '\n[[tool.setuptools-rust.ext-modules]]\ntarget = "{module}"\npath = "../rust/{crate}/Cargo.toml"\n'


@dataclass(slots=True, kw_only=True)
class History:
    """A repository under construction; `commits` are the full ids, oldest first."""

    folder: Path
    commits: list[str] = field(default_factory=list)

    def git(self, *arguments: str, stdin: str | None = None) -> str:
        """Git as nobody in particular: no settings of this machine, no signature, one clock."""
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("GIT_")},
            **{f"GIT_{who}_{what}": "history" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")},
            "GIT_CONFIG_GLOBAL": os.devnull,
            "GIT_CONFIG_SYSTEM": os.devnull,
        }
        command = ["git", "-C", str(self.folder), *arguments]
        options = {"check": True, "capture_output": True, "text": True, "env": environment}
        return subprocess.run(command, input=stdin, **options).stdout.strip()

    def start(self) -> History:
        self.folder.mkdir(parents=True)
        self.git("init", "--quiet", "--initial-branch=main")
        return self

    def write(self, path: str, text: str) -> None:
        target = self.folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)

    def commit(self, title: str, *, tag: str = "") -> str:
        self.git("add", "--all", "--force")
        self.git("commit", "--quiet", "--message", title)
        self.commits.append(self.git("rev-parse", "HEAD"))
        if tag:
            self.git("tag", tag)
        return self.commits[-1]

    def commit_texts(self, path: str, texts: Mapping[str, str]) -> None:
        """A commit for each text of one file, by title. One git process makes them all."""
        branch, parts = self.git("symbolic-ref", "HEAD"), list[str]()
        for title, text in texts.items():
            parts += [f"commit {branch}", "committer history <history> now", _data(title)]
            parts += [] if len(parts) > 3 else [f"from {branch}^0"]
            parts += [f"M 100644 inline {path}", _data(text)]
        self.git("fast-import", "--quiet", "--date-format=now", stdin="\n".join([*parts, ""]))
        self.git("reset", "--quiet", "--hard")
        self.commits += self.git("rev-list", "--reverse", f"--max-count={len(texts)}", "HEAD").splitlines()

    def release(self, site: Path) -> str:
        """The Python files of an installed release in place of what is there, and its pins; returns its version."""
        shutil.rmtree(self.folder / "python", ignore_errors=True)
        unwanted = shutil.ignore_patterns("__pycache__", "*.so", "_version.py", "multimodal_gen")
        shutil.copytree(site / "sglang", self.folder / "python" / "sglang", ignore=unwanted)
        found = next(iter(metadata.distributions(name="sglang", path=[str(site)])))
        self.project([line for line in found.requires or () if "extra ==" not in line], site=site)
        return found.version

    def project(self, pins: list[str], *, site: Path | None = None) -> None:
        """pyproject.toml with these pins and the compiled modules of an installed release."""
        text = '[project]\nname = "sglang"\ndynamic = ["version"]\ndependencies = [\n'
        text += "".join(f"  {json.dumps(pin)},\n" for pin in pins) + "]\n"
        for built in sorted(site.rglob("sglang/**/*.so")) if site is not None else ():
            place = built.relative_to(site or Path()).parent.parts
            module = ".".join([*place, built.name.split(".")[0]])
            text += RUST.format(module=module, crate=module.replace(".", "-"))
            self.write(f"rust/{module.replace('.', '-')}/Cargo.toml", f'[package]\nname = "{module}"\n')
        self.write("python/pyproject.toml", text)

    def pin(self, package: str, version: str) -> None:
        """Another version of one package that is pinned exactly."""
        path = self.folder / "python" / "pyproject.toml"
        text, count = re.subn(rf'"{package}==[^"]*"', f'"{package}=={version}"', path.read_text())
        assert count == 1, f"{package} is pinned {count} times"
        path.write_text(text)


def steps(older: Path, newer: Path) -> Iterator[tuple[str, bytes]]:
    """Real single-file steps from one release to the next that no engine imports: SGLang's own test kit."""
    for path in sorted((newer / "sglang" / "test").rglob("*.py")):
        name = path.relative_to(newer)
        before = older / name
        if not before.is_file() or before.read_bytes() != path.read_bytes():
            yield f"python/{name.as_posix()}", path.read_bytes()


def two_releases(
    folder: Path, *, older: Path, newer: Path, before: int, after: int, beside: int
) -> tuple[History, str, str]:
    """(history, the commit with the defect, the commit with foreign pins) over two installed releases' site folders.

    The older release, `before` real steps towards the newer one, a commit whose pins are nobody's, that undone, the
    newer release, `after` steps of which the middle one moves the draft positions one ahead; and, as in SGLang's own
    history, `beside` commits among them that touch kernels, docs and tests and nothing that runs.
    """
    history = History(folder=folder).start()
    history.release(older)
    history.commit("the older release", tag=f"v{_version(older)}")
    upstream = steps(older, newer)
    _step(history, upstream, before)
    _beside(history, beside // 2)
    history.pin("torch", "2.12.0")
    foreign = history.commit("try another torch")
    history.git("revert", "--no-edit", "HEAD")
    history.commits.append(history.git("rev-parse", "HEAD"))
    history.release(newer)
    history.commit("the newer release", tag=f"v{_version(newer)}")
    _beside(history, beside - beside // 2)
    _note(history, after // 2)
    worker = history.folder / WORKER
    worker.write_text(one_ahead(worker.read_text()))
    defect = history.commit("advance the positions before the draft forward")
    _note(history, after - after // 2 - 1)
    return history, defect, foreign


def _data(text: str) -> str:
    return f"data {len(text.encode())}\n{text}"


def _version(site: Path) -> str:
    return next(iter(metadata.distributions(name="sglang", path=[str(site)]))).version


def _step(history: History, upstream: Iterator[tuple[str, bytes]], count: int) -> None:
    for _ in range(count):
        path, content = next(upstream)
        history.write(path, "")
        (history.folder / path).write_bytes(content)
        history.commit(f"upstream: {Path(path).name}")


def _beside(history: History, count: int) -> None:
    for number in range(count):
        place = ("sgl-kernel/csrc/note.cu", "docs/note.md", "test/srt/note.py")[number % 3]
        history.write(place, f"{len(history.commits)}\n")
        history.commit(f"beside: {place}")


def _note(history: History, count: int) -> None:
    """Commits that change a file the engine runs, but not what it does."""
    worker = history.folder / WORKER
    for _ in range(count):
        worker.write_text(f"{worker.read_text()}\n# note {len(history.commits)}\n")
        history.commit(f"note {len(history.commits)} in the worker")


def one_ahead(source: str) -> str:
    """The worker's source with the positions advanced before the draft forward instead of after it."""
    assert source.count(EARLY) == 1, "the draft loop no longer reads as it did"
    assert source.count(ADD) == 1, "the draft loop no longer reads as it did"
    return source.replace(ADD, "").replace(EARLY, EARLY + ADD)
