"""Ways in which SGLang is known to differ from the algorithm, that a run may take for granted when told to.

Nothing is taken for granted unless it is named. The reference then predicts the deviation exactly, number by number, so
anything else still diverges, and an engine that no longer deviates diverges too. What was assumed stands in the
reference's header and in the verdict. This module must not judge.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from packaging.version import Version

from harness.contract.types import EngineConfig, SpecConfig
from harness.contract.usage import meant

#: Key of the reference trace's header that holds the ids.
HEADER = "assumed"
#: How a line about one begins.
ASSUMED = "assumed: "
#: Newer than every release: one that has every fix there is.
NEWEST = "99"


@dataclass(frozen=True, slots=True, kw_only=True)
class Deviation:
    """One finding of docs/findings.md that the reference can predict, or that a stand-in in the engine lets pass.

    least_k, least_t: the smallest draft in which it can show; least_dp: with how many ranks. layered: only where
    layers draft (MTP). in_graphs: only inside CUDA graphs; eager: never inside. cached: only with a prefix cache.
    stood_in: the reference predicts nothing, a stand-in lets the engine past it; there are stand-ins on a CPU only.
    releases: the first and the last that have it; None: none is without it so far.
    """

    id: str
    what: str
    least_k: int = 1
    least_t: int = 1
    least_dp: int = 1
    layered: bool = False
    in_graphs: bool = False
    cached: bool = False
    eager: bool = False
    stood_in: bool = False
    releases: tuple[str, str] | None = None

    def shows_in(
        self,
        spec: SpecConfig,
        *,
        dp: int = 1,
        graphs: bool = False,
        cache: bool = True,
        release: str = NEWEST,
        device: str = "cpu",
    ) -> bool:
        """Whether assuming it can matter to such a draft on `release`; left out, on one that has every fix there is."""
        if (self.eager and graphs) or (self.stood_in and device != "cpu") or not self.on(release):
            return False
        if (self.layered and spec.algorithm != "MTP") or (self.in_graphs and not graphs) or (self.cached and not cache):
            return False
        return spec.k >= self.least_k and spec.t >= self.least_t and dp >= self.least_dp

    def on(self, release: str) -> bool:
        if self.releases is None:
            return True
        first, last = map(Version, self.releases)
        return first <= Version(release) <= last

    @property
    def needs(self) -> str:
        """Where it can show, in words."""
        parts = [f"{name} {least} or more" for name, least in (("k", self.least_k), ("t", self.least_t)) if least > 1]
        parts += [f"{self.least_dp} DP ranks"] if self.least_dp > 1 else []
        parts += ["MTP layers"] if self.layered else []
        parts += ["CUDA graphs"] if self.in_graphs else ["no CUDA graphs"] if self.eager else []
        parts += ["a prefix cache"] if self.cached else []
        parts += ["a CPU, where its stand-in is"] if self.stood_in else []
        return "it needs " + ", ".join(parts + (["SGLang {} to {}".format(*self.releases)] if self.releases else []))


SLOT_CACHE = Deviation(
    id="F-003",
    what="a draft beam attends the cache of its own slot, not that of the beams it grew from",
    least_k=3,
    least_t=2,
)
IDLE_CRASH = Deviation(
    id="F-007",
    what="an idle DP rank dies in eager mode where attention metadata is built; a stand-in builds it from the lengths",
    least_dp=2,
    stood_in=True,
)
PADDED_DRAFT = Deviation(
    id="F-008",
    what="draft steps of a rank with fewer requests than another are padded after their metadata is made",
    least_k=2,
    least_dp=2,
    stood_in=True,
)
GUESSED_TAIL = Deviation(
    id="F-010",
    what="MTP layers read the target's guess and each other's proposals at the end of a non-final chunk",
    layered=True,
)
STALE_PLAN = Deviation(
    id="F-011",
    what="eager MTP layers and their verify run with the attention metadata of an earlier forward; "
    "a stand-in lets SGLang plan it before each",
    layered=True,
    eager=True,
    stood_in=True,
    releases=("0.5.13", "0.5.15.post1"),
)
SHARED_ROWS = Deviation(
    id="F-012",
    what="rows out of the prefix cache hold what the MTP layers of whoever wrote them read",
    least_k=2,
    layered=True,
    cached=True,
)
REFUSED_STATES = Deviation(
    id="F-020",
    what="rows that MTP layers run once more in CUDA graphs read the states of refused nodes",
    least_k=2,
    layered=True,
    in_graphs=True,
    releases=("0.5.11", "0.5.14"),
)
NARROW_BLOCKS = Deviation(
    id="F-027",
    what="in CUDA graphs MTP layers behind the first attend by blocks of as many rows as the first has, so by other "
    "requests' rows; a row behind the last block says what its memory held, and that is not judged",
    least_k=2,
    layered=True,
    in_graphs=True,
    releases=("0.5.13", "0.5.14"),
)
DEVIATIONS = {
    one.id: one
    for one in (
        SLOT_CACHE,
        IDLE_CRASH,
        PADDED_DRAFT,
        GUESSED_TAIL,
        STALE_PLAN,
        SHARED_ROWS,
        REFUSED_STATES,
        NARROW_BLOCKS,
    )
}


class UnknownDeviation(ValueError):
    """A deviation that nobody wrote down."""


def checked(ids: Iterable[str]) -> tuple[str, ...]:
    """The ids in order, each once; UnknownDeviation names the nearest and all there are."""
    found = tuple(sorted(set(ids)))
    for name in found:
        if name not in DEVIATIONS:
            raise UnknownDeviation(
                f"unknown deviation {name!r}{meant(name, DEVIATIONS)}\n  allowed: {', '.join(DEVIATIONS)}"
            )
    return found


def assumed_in(header: Mapping[str, object]) -> tuple[str, ...]:
    """What a reference trace took for granted, by its header."""
    ids = header.get(HEADER, ())
    return tuple(str(one) for one in ids) if isinstance(ids, (list, tuple)) else ()


def notes(
    header: dict[str, object],
    spec: SpecConfig,
    *,
    dp: int,
    graphs: bool = False,
    cache: bool = True,
    release: str = NEWEST,
    device: str = "cpu",
) -> list[str]:
    """One line for each deviation that a run took for granted where it can show."""
    named = [DEVIATIONS[one] for one in assumed_in(header) if one in DEVIATIONS]
    return [
        f"{ASSUMED}{one.id}, {one.what}"
        for one in named
        if one.shows_in(spec, dp=dp, graphs=graphs, cache=cache, release=release, device=device)
    ]


def in_vain(
    ids: Iterable[str],
    drafts: Sequence[tuple[SpecConfig, EngineConfig]],
    *,
    release: str = NEWEST,
    device: str = "cpu",
) -> list[str]:
    """One line for each deviation that none of the drafts, each on its engine, can show on `release`."""

    def shows(one: Deviation, spec: SpecConfig, engine: EngineConfig) -> bool:
        about = {"graphs": engine.graphs, "cache": engine.prefix_cache}
        return one.shows_in(spec, dp=engine.dp, release=release, device=device, **about)

    return [
        f"{one.id} is assumed in vain: it cannot show in any of these scenarios ({one.needs})"
        for one in (DEVIATIONS[name] for name in ids)
        if not any(shows(one, spec, engine) for spec, engine in drafts)
    ]


def told_in(reasons: Iterable[str]) -> list[str]:
    """The ids that a verdict's reasons say were assumed, in order."""
    return sorted({reason[len(ASSUMED) :].split(",")[0] for reason in reasons if reason.startswith(ASSUMED)})
