"""What a release asks for, held against what a bundle carries. It must not download anything: requirements are data."""

from __future__ import annotations

from packaging.requirements import Requirement
from packaging.version import Version

from harness.engines.closure import EnvError
from harness.machines import slimming
from harness.machines.bundle import BundleError, Difference
from harness.machines.slimming import CARRIED, CARRIED_FOR_OTHERS, CONTROL, FROM, PINNED


def check_requirements(version: str, wanted: dict[str, Requirement], *, torch: str) -> None:
    """BundleError if the release pins another torch; EnvError if it asks for what `slimming` does not know."""
    pin = wanted.get("torch")
    if pin is not None and not pin.specifier.contains(Version(torch).public, prereleases=True):
        raise BundleError(
            f"SGLang {version} wants torch{pin.specifier}; it cannot be packed for torch {torch}",
            next_step=f"name the torch of the machine it is for, if that is what it has:  "
            f"eaglecheck engines pack {version} --torch {pinned(pin)}+{Version(torch).local}",
        )
    there = {name.partition("<")[0] for name in slimming.ON_RUNNER}
    known = {*PINNED, *CARRIED, *CARRIED_FOR_OTHERS, *CONTROL, *FROM, *there, *slimming.LEFT_OUT}
    unknown = sorted(set(wanted) - known)
    if unknown:
        raise EnvError(
            f"SGLang {version} requires {', '.join(unknown)}, of which harness/machines/slimming.py says nothing",
            allowed="each requirement stands in one of PINNED, CARRIED, FROM, ON_RUNNER or LEFT_OUT",
            next_step="find out whether the engine imports it, then add it with its reason",
        )
    missing = [name for name in PINNED if name not in wanted]
    if missing:
        raise EnvError(f"SGLang {version} does not say which {', '.join(missing)} it wants")


def pinned(requirement: Requirement) -> str:
    """The version of an `==` pin; '?' where there is none."""
    return next((one.version for one in requirement.specifier if one.operator == "=="), "?")


def is_from(version: str, first: str) -> bool:
    return Version(version) >= Version(first)


def differences(version: str, wanted: dict[str, Requirement]) -> tuple[Difference, ...]:
    """Where the one version that all releases share is not what this one asks for, and what it gets nothing of."""
    found = []
    for name, carried in {**CARRIED, **CARRIED_FOR_OTHERS, **CONTROL}.items():
        asked = wanted.get(name)
        if asked is not None and not asked.specifier.contains(carried, prereleases=True):
            reason = slimming.DIFFERENT_BECAUSE.get(name, slimming.DIFFERENT_ANYWAY)
            found.append(Difference(name=name, wanted=str(asked.specifier), carried=carried, reason=reason))
    for name, (first, reason) in FROM.items():
        if name in wanted and not is_from(version, first):
            found.append(Difference(name=name, wanted=str(wanted[name].specifier), carried="", reason=reason))
    for name in sorted(set(wanted) & set(slimming.LEFT_OUT)):
        if name != "torch":
            reason = slimming.LEFT_OUT[name]
            found.append(Difference(name=name, wanted=str(wanted[name].specifier), carried="", reason=reason))
    return tuple(found)
