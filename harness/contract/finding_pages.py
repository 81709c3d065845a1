"""The pages of docs/findings: what their front matter says of each known defect of SGLang.

The front matter of a page is the only place that says which releases have a finding, what reaches it, what it shows as
and whether `--assume` takes it for granted. This module must not judge.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from packaging.version import InvalidVersion, Version
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from harness.contract.conditions import compiled, holds, settings_of
from harness.contract.json_files import BadDocument, validated
from harness.contract.settings import Algorithm, EngineConfig, SpecConfig

#: Where the pages are, in a checkout and in an installed wheel alike.
FOLDER = Path(__file__).parents[2] / "docs" / "findings"
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
    must ask for one of the keys. happened: coverage points without all of which it does not show. signatures:
    patterns of what it shows as; reasons: parts of a reason for UNKNOWN. assume: whether the reference predicts it, or
    a replacement kernel lets an engine on a CPU past it; expects: what is then taken for granted, in words; behind: ids
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
    happened: tuple[str, ...] = ()
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
        return ", ".join((*algorithms, *self.settings, *keys, *self.happened))

    def looks_like(self, text: str) -> bool:
        """Whether a signature, or a reason for UNKNOWN, is one of its own."""
        return any(fnmatchcase(text, one) for one in self.signatures) or any(part in text for part in self.reasons)

    def could_show(self, coverage: Mapping[str, int]) -> bool:
        """Whether what it needs did happen. coverage: coverage point -> times it happened."""
        return all(coverage.get(point) for point in self.happened)

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


def reproductions(name: str) -> list[str]:
    """The file that shows a finding with SGLang alone, and the patch with which it is gone."""
    files = [FOLDER / "repro" / f"{name}.{sort}" for sort in ("py", "patch")]
    return [path.name for path in files if path.is_file()]
