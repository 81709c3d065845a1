"""What a release of SGLang is called, and which can be driven: those of our tests, and every other published one.

A release of our tests is known by name. Any other is looked up when it is asked for: it installs over the same pinned
dependencies, and is driven with the hooks of the newest release before it that `harness.both_sides.compat` has a row
for. This module must not install anything and must not import sglang or torch.
"""

from __future__ import annotations

from packaging.version import InvalidVersion, Version

from harness.both_sides import compat
from harness.contract.usage import nearest
from harness.engines import published
from harness.engines.closure import EnvError
from harness.engines.published import Published

#: Our tests run on these (0.5.17 in fewer); what the project claims, it claims of them.
SUPPORTED = ("0.5.11", "0.5.12.post1", "0.5.13", "0.5.17", "0.5.23")
NEWEST = SUPPORTED[-1]
OLDEST = compat.RELEASES[-1].first


class UnknownReleaseError(EnvError):
    """The caller named a release that this project cannot run here: a usage error, nothing was tried."""

    exit_code = 2

    def __init__(
        self, what: str, *, allowed: str, next_step: str = "see what there is:  eaglecheck engines list"
    ) -> None:
        super().__init__(what, allowed=allowed, next_step=next_step)


def named(version: str) -> str:
    """The release meant, spelled as published: one of our tests, one installed here, or any published since OLDEST.

    The index is asked only for a release that is neither of our tests nor installed.
    UnknownReleaseError for what is no version, is too old to be driven, or is not published.
    """
    wanted = _parsed(version)
    if wanted is None:
        raise UnknownReleaseError(f"unknown SGLang release {version!r}", allowed=_allowed(nearest(version, SUPPORTED)))
    if wanted < Version(OLDEST):
        raise UnknownReleaseError(
            f"SGLang {version} cannot be driven: there are no hooks for releases before {OLDEST}",
            allowed=_allowed(OLDEST),
        )
    near = next((name for name in (*SUPPORTED, *published.installed()) if same(name, version)), "")
    return near or _published(wanted, published.published())


def supported(version: str) -> str:
    """A release of our tests by our spelling of it; UnknownReleaseError names the nearest."""
    for known in SUPPORTED:
        if same(known, version):
            return known
    wanted = _parsed(version)
    after = [one for one in SUPPORTED if wanted is not None and Version(one) > wanted]
    near = nearest(version, SUPPORTED) if wanted is None else next(iter(after), NEWEST)
    raise UnknownReleaseError(
        f"SGLang {version!r} is none of the releases of our tests",
        allowed=f"allowed here: {', '.join(SUPPORTED)}" + _nearest(near),
    )


def standing(version: str) -> str:
    """What there is to say of a release that our tests do not run; empty for one that they do."""
    if version in SUPPORTED or not drivable(version):
        return ""
    row = next((one.first for one in compat.RELEASES if Version(one.first) <= Version(version)), OLDEST)
    hooks = "with hooks of its own" if Version(row) == Version(version) else f"with the hooks of {row}"
    return f"not in our tests; driven {hooks}"


def drivable(version: str) -> bool:
    """Whether there are hooks for a release of this name; what is no version has none."""
    wanted = _parsed(version)
    return wanted is not None and wanted >= Version(OLDEST)


def same(left: str, right: str) -> bool:
    """Whether two spellings mean one release: 'v0.5.13' is 0.5.13."""
    try:
        return Version(left) == Version(right)
    except InvalidVersion:
        return left == right


def _published(wanted: Version, there: Published) -> str:
    """The published spelling of `wanted`; UnknownReleaseError names the nearest that can be driven."""
    found = next((name for name in there.versions if Version(name) == wanted), "")
    if found:
        return found
    usable = [name for name in there.versions if Version(name) >= Version(OLDEST)]
    near = next((name for name in usable if Version(name) > wanted), next(reversed(usable), NEWEST))
    if there.complete:
        raise UnknownReleaseError(f"no SGLang {wanted} is published", allowed=_allowed(near))
    raise UnknownReleaseError(
        f"no SGLang {wanted} is installed here, and the published releases are not known",
        allowed=there.note or _allowed(near),
    )


def _allowed(near: str) -> str:
    return f"in our tests: {', '.join(SUPPORTED)}; also any other published since {OLDEST}" + _nearest(near)


def _nearest(near: str) -> str:
    return f"; nearest: {near}" if near else ""


def _parsed(version: str) -> Version | None:
    try:
        return Version(version)
    except InvalidVersion:
        return None
