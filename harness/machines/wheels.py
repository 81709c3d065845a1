"""Wheels for another machine: fetched with the ordinary pip client, read without installing them, made into trees.

This module must not know what SGLang is, and must not name an index: pip's own configuration does.
"""

from __future__ import annotations

import fnmatch
import sys
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from email.parser import Parser
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename
from packaging.version import Version

from harness.contract import plain_files
from harness.engines import dependencies
from harness.engines.dependencies import EnvError, Progress
from harness.machines import bundle, bundle_contents, libraries
from harness.machines.bundle import LeftOut, Tree, Wheel
from harness.machines.bundle_contents import Rule

#: glibc versions that a manylinux tag may name; pip matches a platform exactly, so each is offered.
GLIBC_MINOR = (39, 35, 34, 31, 28, 27, 26, 24, 18, 17, 12, 5)
OLD_TAGS = {"manylinux2014": 17, "manylinux2010": 12, "manylinux1": 5}


@dataclass(slots=True, kw_only=True)
class Files:
    """What is to be packed into one tree, by path, and what its bundle says of that; see `bundle.Tree`."""

    archive: str
    content: dict[str, bytes] = field(default_factory=dict)
    wheels: list[Wheel] = field(default_factory=list)
    slimmed: list[LeftOut] = field(default_factory=list)
    machine: tuple[str, ...] = ()
    stands_for: tuple[str, ...] = ()

    def tree(self, name: str) -> Tree:
        """These files as a tree of that full name."""
        return Tree(
            name=name,
            archive=self.archive,
            files=len(self.content),
            size=sum(map(len, self.content.values())),
            wheels=tuple(self.wheels),
            slimmed=tuple(self.slimmed),
            machine=self.machine,
            stands_for=self.stands_for,
        )


@dataclass(slots=True, kw_only=True)
class Job:
    """One packing: what was asked for, and the trees gathered so far, by full name.

    include: parts that are packed with the releases. bases: what is carried -> its tree. glibc: the 2.x that what was
    fetched needs.
    """

    torch: str
    python: str
    folder: Path
    lock: int
    progress: Progress
    with_torch: bool
    cards: int
    include: frozenset[str]
    bases: dict[str, str] = field(default_factory=dict)
    trees: dict[str, Files] = field(default_factory=dict)
    glibc: int = 0

    def fetch(self, wanted: dict[str, str]) -> dict[str, Path]:
        """Wheels of exactly these versions, by name; what is there already is not fetched again. EnvError else."""
        folder = self.folder / "wheels" / f"cp{self.python.replace('.', '')}"
        folder.mkdir(parents=True, exist_ok=True)
        absent = [f"{name}=={version}" for name, version in wanted.items() if not _find(folder, name, version)]
        if absent:
            self.progress(f"fetching {', '.join(absent)}")
            self._download(absent, folder)
        found = {name: _find(folder, name, version) for name, version in wanted.items()}
        gone = [f"{name}=={wanted[name]}" for name, path in found.items() if path is None]
        if gone:
            raise EnvError(
                f"pip reported success but left no wheel of {', '.join(gone)} in {folder}",
                next_step="look at pip's own settings:  python -m pip config debug",
            )
        there = {name: path for name, path in found.items() if path is not None}
        self.glibc = max([self.glibc, *map(glibc, there.values())])
        return there

    def _download(self, absent: Sequence[str], folder: Path) -> None:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
        command += ["--disable-pip-version-check", "--progress-bar", "off"]
        command += ["--python-version", self.python, "--implementation", "cp", *_platforms()]
        done = dependencies.run([*command, "-d", str(folder), *absent], lock=self.lock, progress=self.progress)
        if done.code:
            tail = "\n    ".join(done.tail)
            raise EnvError(
                f"pip could not fetch {', '.join(absent)} for Python {self.python} (exit {done.code}); its last lines:"
                f"\n    {tail}",
                next_step="packing needs a package index; look at pip's own settings:  python -m pip config debug",
            )

    def rules(self, wheel: str) -> list[Rule]:
        return [rule for rule in bundle_contents.RULES.get(wheel, ()) if rule.part not in self.include]

    def add(self, stem: str, files: Files) -> str:
        """The full name of the tree that these become."""
        name = bundle.tree_name(stem, list(files.content.items()))
        self.trees[name] = files
        return name

    def add_wheels(self, stem: str, paths: Iterable[Path], *, archive: str, machine: Iterable[str] = ()) -> str:
        """`add`, with all that the rules leave of these wheels."""
        files = Files(archive=archive, machine=tuple(machine))
        for path in paths:
            add_wheel(files, path, self.rules(parse_wheel_filename(path.name)[0]))
        return self.add(stem, files)


def _platforms() -> list[str]:
    tags = [f"manylinux_2_{minor}_x86_64" for minor in GLIBC_MINOR] + [f"{tag}_x86_64" for tag in OLD_TAGS]
    return [part for tag in tags for part in ("--platform", tag)]


def _find(folder: Path, name: str, version: str) -> Path | None:
    for path in folder.glob("*.whl"):
        found, at, _, _ = parse_wheel_filename(path.name)
        if found == canonicalize_name(name) and at == Version(version):
            return path
    return None


def glibc(path: Path) -> int:
    """The glibc 2.x that a wheel needs, by the lowest of its tags; 0 for one without compiled code."""
    _, _, _, tags = parse_wheel_filename(path.name)
    needs = []
    for tag in tags:
        head = tag.platform.removesuffix("_x86_64")
        if head.startswith("manylinux_2_"):
            needs.append(int(head.removeprefix("manylinux_2_")))
        elif head in OLD_TAGS:
            needs.append(OLD_TAGS[head])
    return min(needs, default=0)


def requirements(path: Path, *, python: str) -> dict[str, Requirement]:
    """What a wheel asks for, without extras, on an x86-64 Linux with that Python (3.12); by canonical name."""
    with zipfile.ZipFile(path) as wheel:
        name = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
        lines = Parser().parsestr(wheel.read(name).decode()).get_all("Requires-Dist") or []
    here = {"extra": "", "sys_platform": "linux", "platform_machine": "x86_64", "platform_system": "Linux"}
    here |= {"python_version": python, "python_full_version": f"{python}.0"}
    wanted = [requirement for line in lines if (requirement := Requirement(line))]
    return {canonicalize_name(one.name): one for one in wanted if one.marker is None or one.marker.evaluate(dict(here))}


def add_wheel(files: Files, path: Path, rules: Sequence[Rule], *, part: str = "") -> None:
    """Put a wheel's importable files in, less what the rules leave out; each rule's share is counted.

    Libraries are stripped where the table says so. part: put in only what the rules left out for that part.
    """
    name, version, _, _ = parse_wheel_filename(path.name)
    library = bundle_contents.LIBRARIES.get(name)
    less: dict[tuple[str, str], list[int]] = {(rule.pattern, rule.reason): [] for rule in rules}
    with zipfile.ZipFile(path) as wheel:
        for member in wheel.infolist():
            place = _place(member.filename)
            if member.is_dir() or place is None:
                continue
            rule = next((rule for rule in rules if fnmatch.fnmatch(place, rule.pattern)), None)
            rule = None if rule is not None and rule.kept else rule
            if (rule is None) if not part else (rule is not None and rule.part == part):
                content = stripped = wheel.read(member)
                if library is not None and libraries.is_library(content):
                    stripped = libraries.strip(content, architecture=bundle_contents.CUDA_ARCH, weak=library.weak)
                    blank = stripped.count(0) - content.count(0) + len(content) - len(stripped)
                    less.setdefault(("*.so*", library.reason), []).append(blank)
                files.content[place] = stripped
            elif rule is not None and not part:
                less[rule.pattern, rule.reason].append(member.file_size)
    files.slimmed += [
        LeftOut(pattern=pattern, reason=reason, files=len(sizes), size=sum(sizes))
        for (pattern, reason), sizes in less.items()
        if sizes
    ]
    files.wheels.append(Wheel(name=name, version=str(version), sha256=plain_files.sha256(path)))


def text_of(path: Path, member: str) -> str:
    """One text file of a wheel."""
    with zipfile.ZipFile(path) as wheel:
        return wheel.read(member).decode()


def _place(name: str) -> str | None:
    """Where pip would put a wheel's member below site-packages; None for scripts, headers and data."""
    head, _, rest = name.partition("/")
    if not head.endswith(".data"):
        return name
    kind, _, path = rest.partition("/")
    return path if kind in ("purelib", "platlib") and path else None
