"""Known defects of SGLang, as docs/findings has them: what a run takes for granted, and what a finding may be.

Nothing is taken for granted unless it is named. What was assumed stands in the reference's header and in the verdict. A
finding that merely looks like a known one changes no verdict. This module must not judge.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from harness.contract.conditions import NO_DRAFT, DraftFacts
from harness.contract.finding_pages import NEWEST, KnownIssue, issues, reproductions
from harness.contract.scenario import Scenario
from harness.contract.settings import EngineConfig, SpecConfig
from harness.contract.usage import unknown

#: Key of the reference trace's header that holds the ids that were assumed, and how a line about one begins.
HEADER, ASSUMED = "assumed", "assumed: "


def assumable() -> dict[str, KnownIssue]:
    """Those that `--assume` takes."""
    return {name: one for name, one in issues().items() if one.assume != "not"}


class UnknownIssue(ValueError):
    """A finding that has no page, or that cannot be assumed."""


def checked(ids: Iterable[str]) -> tuple[str, ...]:
    """Ids to assume, in any case, in order, each once; UnknownIssue names the nearest and all there are."""
    found = tuple(sorted({name.upper() for name in ids}))
    for name in found:
        if name in issues() and name not in assumable():
            raise UnknownIssue(
                f"{name} is known, but cannot be assumed: the reference does not predict it\n"
                f"  can be assumed: {', '.join(assumable())}"
            )
        if name not in assumable():
            raise UnknownIssue(unknown("finding", name, assumable()))
    return found


def assumed_in(header: Mapping[str, object]) -> tuple[str, ...]:
    """What a reference trace took for granted, by its header."""
    ids = header.get(HEADER, ())
    return tuple(str(one) for one in ids) if isinstance(ids, (list, tuple)) else ()


def notes(
    header: Mapping[str, object],
    spec: SpecConfig,
    engine: EngineConfig | None = None,
    *,
    release: str = NEWEST,
    device: str = "cpu",
    asked: Collection[str] | None = None,
) -> list[str]:
    """One line for each finding that a run took for granted where it can show; asked: see KnownIssue.shows_in."""
    named = [issues()[one] for one in assumed_in(header) if one in issues()]
    return [
        f"{ASSUMED}{one.id}, {one.expects}"
        for one in named
        if one.shows_in(spec, engine, release=release, device=device, asked=asked)
    ]


def without_effect(
    ids: Iterable[str],
    engines: Sequence[tuple[SpecConfig, EngineConfig]],
    *,
    release: str = NEWEST,
    device: str = "cpu",
) -> list[str]:
    """One line for each finding that is assumed and can show on none of the engines."""
    return [
        f"--assume {one.id} has no effect: it cannot show in any of these scenarios (it needs {one.needs}"
        f"{', a CPU' if one.assume == 'replacement kernel' else ''}, SGLang {one.window})"
        for one in (issues()[name] for name in ids)
        if not any(one.shows_in(spec, engine, release=release, device=device) for spec, engine in engines)
    ]


def assumed_by(reasons: Iterable[str]) -> list[str]:
    """The ids that a verdict's reasons say were assumed, in order."""
    return sorted({reason[len(ASSUMED) :].split(",")[0] for reason in reasons if reason.startswith(ASSUMED)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What to say of a known finding beside a verdict. fixed_in: a release; link: of SGLang's project; or empty.

    assume: whether `--assume` takes it on that device; predicted: whether a recheck alone can; behind: what else has to
    be assumed with it. shown: the files that show it with SGLang alone and take it away, or empty.
    """

    id: str
    title: str
    window: str
    fixed_in: str
    link: str
    assume: bool
    predicted: bool
    behind: tuple[str, ...] = ()
    shown: tuple[str, ...] = ()

    @property
    def line(self) -> str:
        link = f", {self.link}" if self.link else ""
        fixed = f", fixed in {self.fixed_in}" if self.fixed_in else ""
        shown = "".join(f"; {'shown' if one.endswith('.py') else 'taken away'} by {one}" for one in self.shown)
        text = f"{self.title}; {self.window}{fixed}{link}{shown}"
        return f"known: {self.id} ({text}), see  eaglecheck findings {self.id}"


def known_as(
    texts: Iterable[str],
    *,
    scenario: Scenario,
    release: str,
    device: str,
    revert: int | None = None,
    reasons: Sequence[str] = (),
    draft: DraftFacts = NO_DRAFT,
    coverage: Mapping[str, int] = {},
) -> dict[str, tuple[Known, ...]]:
    """Text -> what it may be, for those of the texts (signatures, or reasons for UNKNOWN) that may be any.

    Two defects can look alike, so a text may point at several. reasons: of the verdict; what was assumed is expected,
    so what is left is something else. draft: of a pair of the user's, whose scenario names a checkpoint of ours.
    coverage: coverage point -> times it happened.
    """
    assumed, requests = assumed_by(reasons), len(scenario.requests)
    asked = {key for request in scenario.requests for key in request.asked}
    able = [
        one
        for one in issues().values()
        if one.id not in assumed
        and one.on(release, revert)
        and (not one.keys or asked & set(one.keys))
        and one.could_show(coverage)
        and one.reached_by(
            scenario.spec,
            scenario.engine,
            requests=requests,
            updates=scenario.updates,
            checkpoint=scenario.checkpoint,
            draft=draft,
        )
    ]
    found = {text: tuple(_known(one, device) for one in able if one.looks_like(text)) for text in dict.fromkeys(texts)}
    return {text: known for text, known in found.items() if known}


def ends_boot(scenario: Scenario, *, release: str, device: str) -> KnownIssue | None:
    """The known issue that ends such an engine while it boots, so that nothing can be driven on it."""
    return next(
        (
            one
            for one in issues().values()
            if not one.signatures
            and device in one.devices
            and one.releases.has(release)
            and one.reached_by(scenario.spec, scenario.engine, checkpoint=scenario.checkpoint)
        ),
        None,
    )


def _known(one: KnownIssue, device: str) -> Known:
    return Known(
        id=one.id,
        title=one.title,
        window=one.window,
        fixed_in=one.fixed_in or "",
        link=one.upstream.link,
        assume=one.assumable_on(device),
        predicted=one.assume == "predicted",
        behind=one.behind,
        shown=tuple(f"docs/findings/repro/{file}" for file in reproductions(one.id)),
    )
