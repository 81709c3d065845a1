"""One packing of SGLang releases: what was asked for, and the trees that have been gathered so far."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from packaging.utils import parse_wheel_filename

from harness.engines.dependencies import Progress
from harness.machines import bundle, bundle_contents, wheels
from harness.machines.bundle_contents import Rule
from harness.machines.wheels import Files


@dataclass(slots=True, kw_only=True)
class Job:
    """bases: what is carried -> its tree. trees: by full name. glibc: the 2.x that what was fetched needs."""

    torch: str
    python: str
    folder: Path
    lock: int
    progress: Progress
    with_torch: bool
    cards: int
    include: frozenset[str]  # parts that are packed with the releases
    bases: dict[str, str] = field(default_factory=dict)
    trees: dict[str, Files] = field(default_factory=dict)
    glibc: int = 0

    @property
    def wheelhouse(self) -> Path:
        return self.folder / "wheels" / f"cp{self.python.replace('.', '')}"

    def fetch(self, wanted: dict[str, str]) -> dict[str, Path]:
        found = wheels.fetch(wanted, python=self.python, folder=self.wheelhouse, lock=self.lock, progress=self.progress)
        self.glibc = max([self.glibc, *(wheels.glibc(path) for path in found.values())])
        return found

    def rules(self, wheel: str) -> list[Rule]:
        return [rule for rule in bundle_contents.RULES.get(wheel, ()) if rule.part not in self.include]

    def add(self, stem: str, files: Files) -> str:
        name = bundle.tree_name(stem, list(files.content.items()))
        self.trees[name] = files
        return name

    def add_wheels(self, stem: str, paths: Iterable[Path], *, archive: str, machine: Iterable[str] = ()) -> str:
        files = Files(archive=archive, machine=tuple(machine))
        for path in paths:
            name = parse_wheel_filename(path.name)[0]
            wheels.add_wheel(files, path, self.rules(name))
        return self.add(stem, files)
