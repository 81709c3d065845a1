"""The pinned corpus: one minimal scenario a known bug, with the releases it lives in. Read from `corpus/*.json`.

It must not run anything; it says what is expected, and a run that disagrees is an error of the entry or a finding.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from packaging.version import Version
from pydantic import BaseModel, ConfigDict, Field

from harness.contract import plain_files, scenario_v1
from harness.contract.finding_pages import issues
from harness.contract.json_files import BadDocument, NotJSON, parsed, shown, validated
from harness.contract.scenario import SCENARIO_SCHEMA, Scenario
from harness.contract.types import Outcome, Verdict
from harness.contract.usage import UserError, meant, unknown

CORPUS = Path(__file__).with_name("corpus")
EXAMPLE = f"working examples:  {Path(__file__).with_name('scenarios')}/*.json"


class CaseError(UserError):
    """A case that does not exist or cannot be read."""


class Case(BaseModel):
    """One corpus entry.

    finding: the page of docs/findings whose releases these are; only a case without one says them itself.
    bad_from: oldest release it was seen on, None where all older ones have it too; beside a finding: where another
    one hides it before. bad_up_to: newest release with the bug; good_from: oldest release without it, None if there is
    none yet. revert: the number SGLang's own switch takes to put the bug back (0.5.13 and later), if it knows this one.
    kinds: what the bug shows first. assumes: known issues that hide the bug, or the absence of it, unless they are
    assumed. devices: where this very scenario was seen to show it; another one may accept other tokens, or act on an
    abort one scheduler step later.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    case_schema: Literal[1]
    id: Annotated[str, Field(pattern=r"^[a-z0-9-]{1,40}$")]
    title: str
    finding: str | None = None
    source: str
    bad_from: str | None = None
    bad_up_to: str
    good_from: str | None
    revert: int | None = None
    kinds: tuple[str, ...]
    devices: tuple[Literal["cpu", "cuda"], ...] = ("cpu", "cuda")
    assumes: tuple[str, ...] = ()
    scenario: Scenario

    def expected(self, *, release: str, revert: int | None, device: str = "cpu") -> Literal["PASS", "FAIL", "unknown"]:
        """What the window says about one release; 'unknown' before it, between its ends, and where it was not seen."""
        said = self._on_release(release, revert)
        return "unknown" if said == "FAIL" and device not in self.devices else said

    def as_expected(
        self, expected: str, verdict: Outcome, kinds: Collection[str], *, unexplained: Collection[str] = ()
    ) -> bool | None:
        """Whether a verdict is the one that is expected, and of a failure its kinds too; None where nothing is.

        unexplained: kinds of roots that no known finding explains: they may be the case's own only.
        """
        if expected == "unknown":
            return None
        its_own = {*unexplained} <= {*self.kinds} <= {*kinds}
        return expected == verdict and (verdict is not Outcome.FAIL or its_own)

    def _on_release(self, release: str, revert: int | None) -> Literal["PASS", "FAIL", "unknown"]:
        if self.bad_from is not None and Version(release) < Version(self.bad_from):
            return "unknown"
        if Version(release) <= Version(self.bad_up_to):
            return "FAIL"
        if self.good_from is None or Version(release) < Version(self.good_from):
            return "unknown"
        return "FAIL" if revert is not None and revert == self.revert else "PASS"


def outcome_of(cells: Sequence[Mapping[str, Any]]) -> Outcome:
    """The verdict over cells (their `verdict` and `as_expected`): a known bug that shows is as good as a sound cell.

    One that does not show, or as something else, is a failure. Where nothing is expected the cell's own verdict counts.
    """
    own = [Outcome(cell["verdict"]) for cell in cells]
    said = {True: Outcome.PASS, False: Outcome.FAIL}
    return Verdict.merge(
        [
            outcome if outcome is Outcome.UNKNOWN else said.get(cell["as_expected"], outcome)
            for cell, outcome in zip(cells, own, strict=True)
        ]
    )


def names() -> list[str]:
    """Every case id in the corpus, sorted."""
    return sorted(path.stem for path in CORPUS.glob("*.json"))


def load(name: str) -> Case:
    """The case called `name`; CaseError names the nearest one and all there are."""
    path = CORPUS / f"{name}.json"
    if not os.path.isfile(path):  # which may be asked of any name
        raise CaseError(f"unknown case {name!r}{meant(name, names())}\n  allowed: {', '.join(names())}")
    try:
        case = validated(_with_releases(parsed(plain_files.content(path))), Case)
    except BadDocument as error:
        raise CaseError(f"case file {path} is not valid: {error}") from error
    if case.id != name:
        raise CaseError(f"case file {path} is called {name!r} but holds id {case.id!r}")
    return case


def _with_releases(content: Any) -> Any:
    """An entry that names a finding, with the releases that the finding's page says; Unfit if it says them too."""
    name = content.get("finding") if isinstance(content, dict) else None
    if name is None:
        return content
    if name not in issues():
        raise BadDocument(unknown("finding", str(name), issues()))
    said = sorted({"source", "bad_up_to", "good_from"} & set(content))
    if said:
        raise BadDocument(f"finding {name} says it already: leave out {', '.join(said)}")
    one = issues()[name]
    window = {"bad_from": one.releases.first, "bad_up_to": one.newest_bad, "good_from": one.fixed_in}
    return {"source": f"docs/findings/{name}.md", **window, **content}


def read_scenario(path: Path) -> Scenario:
    """A scenario from a JSON file of its own; CaseError for a missing, malformed or newer-version file."""
    try:
        content = parsed(plain_files.named(path))
    except OSError as error:
        raise CaseError(
            f"cannot read scenario file {path}: {error.strerror}\n  name a JSON file:  --scenario-file FILE"
        ) from error
    except NotJSON as error:
        raise CaseError(f"scenario file {path} is not JSON: {error}\n  {EXAMPLE}") from error
    if not isinstance(content, dict):
        raise CaseError(f"scenario file {path} holds {shown(content)}, not a JSON object\n  {EXAMPLE}")
    if "case_schema" in content:
        raise CaseError(
            f"scenario file {path} is a whole corpus case, not a scenario\n"
            "  name a corpus case by its id:  --scenario ID; or put its 'scenario' object in a file of its own"
        )
    version = content.get("schema_version", SCENARIO_SCHEMA)
    if type(version) is not int or not 1 <= version <= SCENARIO_SCHEMA:
        raise CaseError(
            f"scenario file {path} has schema_version {shown(version)}\n"
            f"  allowed: 1 to {SCENARIO_SCHEMA}; a newer file needs a newer eaglecheck"
        )
    try:
        scenario = validated(scenario_v1.upgraded(content), Scenario, spelling=scenario_v1.spelling(content))
    except BadDocument as error:
        raise CaseError(f"scenario file {path}: {error}") from error
    _check_ops(path, scenario, [op["kind"] for op in content["script"]])
    return scenario


#: The keys that each op takes beside its kind; any other would change nothing, and is refused in a file. What it needs.
TAKES = {
    **dict.fromkeys(("submit", "abort", "transfer", "retract"), ("rids", "name")),
    "step": ("count",),
    "mutant": ("name", "count"),
    "update": ("name", "source", "selector", "mode"),
    "memory": ("name",),
}
NEEDS = {**dict.fromkeys(("submit", "abort", "transfer"), "rids"), "mutant": "name", "update": "name", "memory": "name"}


def _check_ops(path: Path, scenario: Scenario, kinds: Sequence[str]) -> None:
    """CaseError for an op with a key that does nothing, or without one that it needs. kinds: as the file says them."""
    for number, op in enumerate(scenario.script):
        takes = TAKES.get(op.kind, ())
        foreign = sorted({*op.model_dump(exclude_defaults=True)} - {"kind", *takes})
        needed = NEEDS.get(op.kind, "")
        missing = "" if not needed or getattr(op, needed) else needed
        if foreign or missing:
            said = f"does not take {foreign[0]!r}" if foreign else f"needs {missing!r}"
            raise CaseError(
                f"scenario file {path}: script.{number}: op {kinds[number]!r} {said}\n"
                f"  it takes: {', '.join(takes) or 'nothing but its kind'}"
            )
