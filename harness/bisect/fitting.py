"""Whether a release's environment is also a commit's: the same pins and the same compiled parts, else not.

A commit brings its Python files only. It must not install anything and must not run git by itself.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from harness.bisect.repository import PROJECT, PYTHON, Repository
from harness.contract.words import some

#: This many pins are named in a reason.
NAMED = 3


class FitError(Exception):
    """A commit whose needs cannot be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What Python files need around them. pins: package -> requirement, as written; compiled: module -> its sources.

    sources: the folder in the repository, empty where only the built module is known.
    """

    pins: dict[str, str]
    compiled: dict[str, str]


def of_commit(repository: Repository, commit: str) -> Needs:
    """From the commit's pyproject.toml; FitError where it has none that can be read."""
    text = repository.content(commit, PROJECT)
    if text is None:
        raise FitError(f"it has no {PROJECT}")
    try:
        project = tomllib.loads(text)
        pins = _pins(project["project"]["dependencies"])
    except (tomllib.TOMLDecodeError, KeyError, TypeError, InvalidRequirement) as error:
        raise FitError(f"its {PROJECT} cannot be read: {error}") from error
    return Needs(pins=pins, compiled=_compiled(project))


def of_release(package: Path) -> Needs:
    """From an installed `sglang` package folder and its metadata beside it; FitError without metadata."""
    found = next(iter(metadata.distributions(name="sglang", path=[str(package.parent)])), None)
    if found is None:
        raise FitError(f"its list of requirements is missing beside {package}")
    main = [line for line in found.requires or () if "extra ==" not in line]
    built = (path.relative_to(package.parent) for path in package.rglob("*.so"))
    return Needs(pins=_pins(main), compiled={_module(path): "" for path in built})


def _pins(lines: Iterable[str]) -> dict[str, str]:
    """package -> everything asked of it, in one spelling; one package may be asked for under several markers."""
    found: dict[str, list[str]] = {}
    for line in lines:
        one = Requirement(line)
        extras = f"[{','.join(sorted(one.extras))}]" if one.extras else ""
        version = one.url or ",".join(sorted(map(str, one.specifier)))
        marker = f"; {one.marker}" if one.marker else ""
        found.setdefault(canonicalize_name(one.name), []).append(f"{extras}{version}{marker}")
    return {name: " and ".join(sorted(asked)) for name, asked in found.items()}


def _compiled(project: dict[str, Any]) -> dict[str, str]:
    """Rust modules that the build makes: dotted name -> top folder of their sources in the repository."""
    modules = project.get("tool", {}).get("setuptools-rust", {}).get("ext-modules", [])
    return {str(one["target"]): _top_folder(str(one.get("path", ""))) for one in modules}


def _top_folder(path: str) -> str:
    """`../rust/sglang-grpc/Cargo.toml`, as seen from python/, lies in `rust`: crates of one workspace share files."""
    parts = [part for part in Path(PYTHON, path).parts if part != "."]
    while ".." in parts:
        at = parts.index("..")
        del parts[max(at - 1, 0) : at + 1]
    return parts[0] if len(parts) > 1 else ""


def _module(path: Path) -> str:
    return ".".join([*path.parent.parts, re.split(r"\.(?:cpython|abi3|so)", path.name)[0]])


def misfit(commit: Needs, release: Needs, *, version: str) -> str:
    """Why the release's environment is not the commit's, as far as both are known; empty if it is."""
    if commit.pins != release.pins:
        names = sorted(
            name for name in {*commit.pins, *release.pins} if commit.pins.get(name) != release.pins.get(name)
        )
        differences = [_difference(name, commit, release) for name in names]
        return f"its pins are not those of {version}: {some(differences, NAMED)}"
    if commit.compiled.keys() != release.compiled.keys():
        names = sorted(commit.compiled.keys() ^ release.compiled.keys())
        return f"its compiled parts are not those of {version}: {', '.join(names)}"
    return ""


def _difference(name: str, commit: Needs, release: Needs) -> str:
    def shown(needs: Needs) -> str:
        return f"{name}{needs.pins[name]}" if name in needs.pins else f"no {name}"

    return f"{shown(commit)} (there {shown(release)})"


def rebuilt(repository: Repository, commit: str, needs: Needs, *, version: str) -> str:
    """Why the compiled parts of `version` are not the commit's: other sources, or none known; empty if they are."""
    folders = sorted({folder for folder in needs.compiled.values() if folder})
    tag = f"v{version}"
    if folders and repository.asks("rev-parse", "--verify", "--quiet", f"refs/tags/{tag}") is None:
        return f"there is no tag {tag} to compare the sources of compiled parts with; get it:  git fetch --tags"
    for folder in folders:
        if repository.object_id(commit, folder) != repository.object_id(tag, folder):
            return f"the sources of its compiled parts ({folder}/) are not those of {tag}"
    return ""
