"""Known defects of SGLang, read from the front matter of docs/findings.

The front matter of a page is the only place that says which releases have a finding, what reaches it, what it shows as
and whether `--assume` takes it for granted. Nothing is taken for granted unless it is named. What was assumed stands in
the reference's header and in the verdict. A finding that merely looks like a known one changes no verdict. This module
must not judge.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from packaging.version import InvalidVersion, Version
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from harness.contract.conditions import NO_DRAFT, DraftFacts, compiled, holds, settings_of
from harness.contract.json_files import BadDocument, validated
from harness.contract.scenario import Scenario
from harness.contract.settings import Algorithm, EngineConfig, SpecConfig
from harness.contract.usage import unknown

#: Where the pages are, in a checkout and in an installed wheel alike.
FOLDER = Path(__file__).parents[2] / "docs" / "findings"
#: Key of the reference trace's header that holds the ids that were assumed, and how a line about one begins.
HEADER, ASSUMED = "assumed", "assumed: "
#: Newer than every release: one that has every fix there is.
NEWEST = "99"

Release = Annotated[str, Field(pattern=r"^\d+(\.\d+)+(rc\d+|\.post\d+)?$")]
Signature = Annotated[str, Field(pattern=r"^[A-Z_]+:\S+:\S+:\S+$")]
CellPattern = Annotated[str, Field(pattern=r"^(case|fixed|generated)/.+$")]
Rate = Annotated[float, Field(gt=0.0, le=1.0)]
Severity = Literal[
    "crash", "hang", "wrong text", "leak", "lower acceptance", "limit exceeded", "wrong returned data", "wasted work"
]


class _Page(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Releases(_Page):
    """The first and the last release that have it. seen: where it was run and showed.

    not_run: what is said of the others, by reading the source; empty where nothing is.
    """

    first: Release
    last: Release | Literal["open"]
    seen: Annotated[tuple[Release, ...], Field(min_length=1)]
    not_run: str = ""

    def has(self, release: str) -> bool:
        """Whether a release has it; what is no version (a commit's own name) is taken for the newest."""
        try:
            asked = Version(release)
        except InvalidVersion:
            asked = Version(NEWEST)
        return Version(self.first) <= asked and (self.last == "open" or asked <= Version(self.last))

    @property
    def text(self) -> str:
        if self.last == "open":
            return f"{self.first} and later"
        return self.first if self.first == self.last else f"{self.first} to {self.last}"


class Upstream(_Page):
    """Where SGLang's own project speaks of it, and how that stands. pulls: the pull requests that fixed it."""

    state: Literal["open", "closed, not fixed", "fixed", "not found", "not searched"]
    reference: str = ""
    pulls: tuple[int, ...] = ()

    @property
    def link(self) -> str:
        """The first page of SGLang's project that speaks of it; empty where none does."""
        found = re.search(r"(pull request|issue) (\d+)", self.reference)
        sort, number = ("pull request", self.pulls[0]) if self.pulls else found.groups() if found else ("", "")
        return f"https://github.com/sgl-project/sglang/{'issues' if sort == 'issue' else 'pull'}/{number}" * bool(sort)


class Nights(_Page):
    """Cells (kind/name) of a night where it was seen on the releases that were run; anywhere else it is new.

    expires: the day from which that is an error. devices: those of the page if left out. rate: least share of scenarios
    that show it, the lower end of the exact 95 % interval of what was counted (shown, of); 1 where scenarios are fixed.
    It decides when to say "gone".
    """

    cells: Annotated[tuple[CellPattern, ...], Field(min_length=1)]
    expires: datetime.date
    rate: Rate = 1.0
    devices: tuple[Literal["cpu", "cuda"], ...] | None = None
    counted: tuple[int, int] | None = None


class Measured(_Page):
    """Mean accept lengths of `verifies` verifies on the trained pair, what is lost in percent, and how to see it."""

    pair: Literal["trained-eagle1", "trained-eagle3"]
    release: Release
    verifies: Annotated[int, Field(gt=0)]
    expected: Annotated[float, Field(ge=1.0)]
    observed: Annotated[float, Field(ge=1.0)]
    percent: float
    command: str

    @model_validator(mode="after")
    def _adds_up(self) -> Measured:
        lost = 100.0 * (self.expected - self.observed) / self.expected
        if abs(self.percent - lost) > 0.06:
            raise ValueError(f"percent is {self.percent}; expected {lost:.1f}, by its accept lengths")
        return self

    @property
    def text(self) -> str:
        means = f"expected {self.expected:.2f}, observed {self.observed:.2f}"
        return f"{self.pair} on {self.release}: {means}, lost {self.percent:.1f} % (of {self.verifies} verifies)"


class Cost(_Page):
    """What a finding costs in accept length on the trained pair, or why that pair cannot show it."""

    measured: tuple[Measured, ...] = ()
    not_shown: str = ""

    @model_validator(mode="after")
    def _says_one_thing(self) -> Cost:
        if bool(self.measured) == bool(self.not_shown):
            raise ValueError("cost says either what was measured or why nothing was")
        return self


class KnownIssue(_Page):
    """The front matter of one page.

    devices: where it was seen. algorithms, settings and keys: what reaches it; all settings must hold, and some request
    must ask for one of the keys. signatures: patterns
    of what it shows as; reasons: parts of a reason for UNKNOWN. assume: whether the reference predicts it, or a
    replacement kernel lets an engine on a CPU past it; expects: what is then taken for granted, in words; behind: ids
    of what an engine that got past it meets next.
    """

    id: Annotated[str, Field(pattern=r"^F-\d{3}$")]
    title: str
    severity: Annotated[tuple[Severity, ...], Field(min_length=1)]
    releases: Releases
    fixed_in: Release | None = None
    devices: Annotated[tuple[Literal["cpu", "cuda"], ...], Field(min_length=1)]
    algorithms: Annotated[tuple[Algorithm, ...], Field(min_length=1)] = ("EAGLE", "EAGLE3", "MTP")
    settings: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    signatures: tuple[Signature, ...] = ()
    reasons: tuple[str, ...] = ()
    assume: Literal["predicted", "replacement kernel", "not"] = "not"
    expects: str = ""
    behind: tuple[str, ...] = ()
    upstream: Upstream
    command: str
    cost: Cost
    nights: tuple[Nights, ...] = ()

    @field_validator("settings")
    @classmethod
    def _are_conditions(cls, conditions: tuple[str, ...]) -> tuple[str, ...]:
        for one in conditions:
            compiled(one)
        return conditions

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> KnownIssue:
        if not all(self.releases.has(one) for one in self.releases.seen):
            raise ValueError(f"releases.seen names one that is outside {self.window}")
        if (self.fixed_in is None) != (self.releases.last == "open"):
            raise ValueError("fixed_in is there exactly where releases.last is not open")
        if self.fixed_in is not None and self.releases.has(self.fixed_in):
            raise ValueError(f"fixed_in {self.fixed_in} is inside {self.window}")
        if bool(self.expects) != (self.assume != "not"):
            raise ValueError("expects says what --assume takes for granted, and is there exactly where it does")
        if not self.signatures and not self.reasons:
            raise ValueError("it shows as nothing: name a signature or a reason")
        return self

    @property
    def window(self) -> str:
        """Its releases in words."""
        return self.releases.text

    def on(self, release: str, revert: int | None) -> bool:
        """Whether it can show there. revert: the fix that SGLang was told to take out."""
        return self.releases.has(release) or (revert is not None and revert in self.upstream.pulls)

    @property
    def newest_bad(self) -> str:
        """The last release that has it; of an open one the newest that was run."""
        return max(self.releases.seen, key=Version) if self.releases.last == "open" else self.releases.last

    @property
    def needs(self) -> str:
        """What reaches it, in words."""
        algorithms = [] if len(self.algorithms) == 3 else [" or ".join(self.algorithms)]
        keys = [f"a request with {' or '.join(self.keys)}"] if self.keys else []
        return ", ".join((*algorithms, *self.settings, *keys))

    def looks_like(self, text: str) -> bool:
        """Whether a signature, or a reason for UNKNOWN, is one of its own."""
        return any(fnmatchcase(text, one) for one in self.signatures) or any(part in text for part in self.reasons)

    def reached_by(self, spec: SpecConfig, engine: EngineConfig, **facts: Any) -> bool:
        """Whether such an engine can show it. facts: what else conditions speak of, see `conditions.settings_of`."""
        settings = settings_of(spec, engine, **facts)
        return spec.algorithm in self.algorithms and all(holds(one, settings) for one in self.settings)

    def replaced_on(self, device: str) -> bool:
        """Whether --assume changes the engine there: replacement kernels are for a CPU only."""
        return self.assume == "replacement kernel" and device == "cpu"

    def assumable_on(self, device: str) -> bool:
        """Whether --assume does anything there."""
        return self.assume == "predicted" or self.replaced_on(device)

    def shows_in(
        self,
        spec: SpecConfig,
        engine: EngineConfig | None = None,
        *,
        release: str = NEWEST,
        device: str = "cpu",
        asked: Collection[str] | None = None,
    ) -> bool:
        """Whether assuming it can matter on such an engine; release left out: one that has every fix there is.

        asked: all that its requests ask for, where that is known.
        """
        reached = self.reached_by(spec, engine or EngineConfig())
        reached &= asked is None or not self.keys or bool(set(self.keys) & set(asked))
        return self.assumable_on(device) and self.releases.has(release) and reached


def read(folder: Path = FOLDER) -> dict[str, KnownIssue]:
    """Every page of a folder by its id, in order; BadDocument names the page, the place, and what is allowed there."""
    found = {path.stem: _read(path) for path in sorted(folder.glob("F-*.md"))}
    wrong = next((name for name, one in found.items() if one.id != name), None)
    if wrong:
        raise BadDocument(f"{folder / wrong}.md holds id {found[wrong].id!r}")
    return found


def _read(path: Path) -> KnownIssue:
    head, _ = _split(path)
    try:
        return validated(yaml.load(head, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)), KnownIssue)
    except (yaml.YAMLError, BadDocument) as error:
        raise BadDocument(f"{path}: {error}") from error


def _split(path: Path) -> tuple[str, str]:
    """(front matter, body) of a page."""
    before, head, body = (*path.read_text().split("---\n", 2), "", "")[:3]
    if before or not body:
        raise BadDocument(f"{path}: it begins with no front matter between two lines of ---")
    return head, body.lstrip("\n")


@cache
def issues() -> Mapping[str, KnownIssue]:
    """Our own pages by id."""
    return read()


def body(name: str) -> str:
    """The text of a page behind its front matter, Markdown."""
    return _split(FOLDER / f"{name}.md")[1]


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
) -> dict[str, tuple[Known, ...]]:
    """Text -> what it may be, for those of the texts (signatures, or reasons for UNKNOWN) that may be any.

    Two defects can look alike, so a text may point at several. reasons: of the verdict; what was assumed is expected,
    so what is left is something else. draft: of a pair of the user's, whose scenario names a checkpoint of ours.
    """
    assumed, requests = assumed_by(reasons), len(scenario.requests)
    asked = {key for request in scenario.requests for key in request.asked}
    able = [
        one
        for one in issues().values()
        if one.id not in assumed
        and one.on(release, revert)
        and (not one.keys or asked & set(one.keys))
        and one.reached_by(
            scenario.spec,
            scenario.engine,
            requests=requests,
            updates=scenario.updates,
            late_writes=sum(op.kind == "transfer" and op.name == "land" for op in scenario.script),
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


def reproductions(name: str) -> list[str]:
    """The file that shows a finding with SGLang alone, and the patch with which it is gone."""
    files = [FOLDER / "repro" / f"{name}.{sort}" for sort in ("py", "patch")]
    return [path.name for path in files if path.is_file()]
