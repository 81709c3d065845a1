"""What a bundle carries, what it leaves out and why (`bundle_contents.toml`), held against what a release asks for.

This module must not download or write anything: it is data, and questions about it.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.version import Version

from harness.engines.dependencies import EnvError
from harness.machines.bundle import BundleError, Difference


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Files of a wheel that are left out; part: the piece of its own in which these files can be had; kept: they are
    not, whatever a later rule says."""

    pattern: str
    reason: str
    part: str = ""
    kept: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """How a wheel's libraries are stripped; weak: functions that the machine's own libraries may lack."""

    reason: str
    weak: str = ""


TABLE = "harness/machines/bundle_contents.toml"
TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())

CUDA_ARCH: str = TABLES["cuda_arch"]
PINNED: tuple[str, ...] = tuple(TABLES["pinned"])
ON_RUNNER: tuple[str, ...] = tuple(TABLES["on_runner"])
CONTROL_ON_RUNNER: tuple[str, ...] = tuple(TABLES["control_on_runner"])
#: name -> version
CARRIED: dict[str, str] = TABLES["carried"]
CARRIED_FOR_OTHERS: dict[str, str] = TABLES["carried_for_others"]
CONTROL: dict[str, str] = TABLES["control"]
CONTROL_TESTS: dict[str, str] = TABLES["control_tests"]
#: name -> (first release, reason)
FROM: dict[str, tuple[str, str]] = {name: (one["release"], one["reason"]) for name, one in TABLES["from"].items()}
#: name -> reason
LEFT_OUT: dict[str, str] = TABLES["left_out"]
DIFFERENT_BECAUSE: dict[str, str] = TABLES["different_because"]
#: The text of a stub for a package of which nobody knows which names are imported.
ANY: str = TABLES["any_stub"]
#: wheel -> rules
RULES = {wheel: tuple(Rule(**one) for one in rules) for wheel, rules in TABLES["rules"].items()}
#: wheel -> how its libraries are stripped
LIBRARIES = {wheel: Library(**one) for wheel, one in TABLES["libraries"].items()}
#: torch -> the versions of what belongs to it, by name
TORCHES: dict[str, dict[str, str]] = TABLES["torch"]
#: folder beside the machine's torch -> what a carried torch takes from there
MACHINE: dict[str, str] = TABLES["with_torch"]["machine"]
FLASHINFER = "flashinfer-python"
_BESIDE: dict[str, Any] = TABLES["with_torch"]["flashinfer"]
#: The rules of flashinfer's wheel for a release with its own torch, and files in place of its own.
FLASHINFER_RULES = (
    *(Rule(pattern=pattern, reason="", kept=True) for pattern in _BESIDE["kept"]),
    Rule(pattern="flashinfer/*", reason=_BESIDE["rest"]),
)
FLASHINFER_FILES = {path: text.encode() for path, text in _BESIDE["files"].items()}
#: part -> (wheel, what it is for)
PARTS: dict[str, tuple[str, str]] = {name: (one["wheel"], one["what"]) for name, one in TABLES["parts"].items()}
#: module -> (sources, flags)
PREBUILT: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    name: (tuple(one["sources"]), tuple(one["flags"])) for name, one in TABLES["prebuilt"].items()
}


def stubs(version: str) -> dict[str, dict[str, str]]:
    """Stub -> its files (path -> text), for the packages that this release imports and never uses."""
    found = {name: one for name, one in TABLES["stubs"].items() if is_from(version, one["from"])}
    return {name: one.get("files") or dict.fromkeys(one["any"], ANY) for name, one in found.items()}


def environ(version: str, *, own_torch: bool, flashinfer: bool = False) -> dict[str, str]:
    """The settings that this release needs; flashinfer: beside its own torch."""
    found = [settings for first, settings in TABLES["environ_from"].items() if is_from(version, first)]
    found += [TABLES["with_torch"]["environ"]] if own_torch else []
    found += [_BESIDE["environ"]] if flashinfer else []
    return {name: value for settings in found for name, value in settings.items()}


def programs(*, own_torch: bool) -> dict[str, str]:
    """Settings that name a program of the machine."""
    return dict(TABLES["with_torch"]["programs"]) if own_torch else {}


def carried(wanted: dict[str, Requirement], *, own_torch: bool) -> dict[str, str]:
    """Name -> version of what is carried beside the release's own pins: one for all, unless it has a torch of its own.

    Such a release shares little with others, and gets what it pins.
    """
    shared = {**CARRIED, **CARRIED_FOR_OTHERS}
    if not own_torch:
        return shared
    own = {name: pinned(wanted[name]) for name in shared if name in wanted and pinned(wanted[name]) != "?"}
    return {name: version for name, version in {**shared, **own}.items() if name != FLASHINFER}


def flashinfer(version: str, wanted: dict[str, Requirement], *, asked: bool) -> dict[str, str]:
    """Name -> version of flashinfer and what it is compiled with, beside a torch that travels; empty without it."""
    if FLASHINFER not in wanted or (
        not asked and is_from(version, TABLES["with_torch"]["flashinfer"]["optional_from"])
    ):
        return {}
    return {FLASHINFER: _BESIDE["version"], "apache-tvm-ffi": pinned(wanted["apache-tvm-ffi"])}


def own_torch(version: str, wanted: dict[str, Requirement], *, torch: str) -> str:
    """The version of torch that must travel with the release; empty where the machine's will do.

    EnvError where it is not known.
    """
    pin = wanted.get("torch")
    if pin is None or pin.specifier.contains(Version(torch).public, prereleases=True):
        return ""
    if pinned(pin) not in TORCHES:
        raise EnvError(
            f"SGLang {version} wants torch{pin.specifier}, of which {TABLE} says nothing",
            allowed=f"known there: {', '.join(TORCHES)}",
            next_step="find out what belongs to it, then add it to the table torch",
        )
    return pinned(pin)


def check_requirements(version: str, wanted: dict[str, Requirement], *, torch: str, with_torch: bool) -> None:
    """BundleError if the release pins another torch and none is to be carried; EnvError for a requirement that the
    tables do not know."""
    pin = wanted.get("torch")
    if pin is not None and not with_torch and not pin.specifier.contains(Version(torch).public, prereleases=True):
        raise BundleError(
            f"SGLang {version} wants torch{pin.specifier}; it cannot be packed for torch {torch}",
            allowed="its torch can travel with it, in about 200 MiB:  --with-torch",
            next_step=f"or name the torch of the machine it is for, if that is what it has:  "
            f"eaglecheck engines pack {version} --output FILE --torch {pinned(pin)}+{Version(torch).local}",
        )
    there = {name.partition("<")[0] for name in ON_RUNNER}
    known = {*PINNED, *CARRIED, *CARRIED_FOR_OTHERS, *CONTROL, *FROM, *there, *LEFT_OUT}
    unknown = sorted(set(wanted) - known)
    if unknown:
        raise EnvError(
            f"SGLang {version} requires {', '.join(unknown)}, of which {TABLE} says nothing",
            allowed="each requirement stands in one of pinned, carried, from, on_runner or left_out",
            next_step="find out whether the engine imports it, then add it with its reason",
        )
    missing = [name for name in PINNED if name not in wanted]
    if missing:
        raise EnvError(
            f"SGLang {version} does not say which {', '.join(missing)} it wants",
            next_step="choose a release that pins them:  eaglecheck engines list",
        )


def pinned(requirement: Requirement) -> str:
    """The version of an `==` pin; '?' where there is none."""
    return next((one.version for one in requirement.specifier if one.operator == "=="), "?")


def is_from(version: str, first: str) -> bool:
    return Version(version) >= Version(first)


def differences(
    version: str, wanted: dict[str, Requirement], *, own_torch: bool, flashinfer: bool = False
) -> tuple[Difference, ...]:
    """Where what is carried is not what this release asks for, and what it gets nothing of."""
    there = carried(wanted, own_torch=own_torch) | CONTROL | ({FLASHINFER: _BESIDE["version"]} if flashinfer else {})
    others = [name for name in there if name in wanted and not wanted[name].specifier.contains(there[name], True)]
    reasons = {name: DIFFERENT_BECAUSE.get(name, TABLES["different_anyway"]) for name in others}
    reasons |= {FLASHINFER: _BESIDE["reason"]} if own_torch and not flashinfer else {}
    reasons |= {name: reason for name, (first, reason) in FROM.items() if not is_from(version, first)}
    reasons |= {name: reason for name, reason in sorted(LEFT_OUT.items()) if name != "torch"}
    return tuple(
        Difference(name=name, wanted=str(wanted[name].specifier), carried=there.get(name, ""), reason=reason)
        for name, reason in reasons.items()
        if name in wanted
    )
