"""The JSON files of run folders as strict models: unknown keys are refused. This module must not touch the disk."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field

from harness.archive.facts import EngineFacts, Header, PairFacts
from harness.archive.trace_io import plain
from harness.contract.scenario import Scenario
from harness.contract.types import Divergence, Key, Kind, Outcome, Policy, Verdict

#: Written to every file; a reader refuses what is newer.
STORE_VERSION: Literal[1] = 1


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="strings")


class RunManifest(_Strict):
    """manifest.json of a run: who ran what, where. Written first."""

    store_version: Literal[1]
    run_id: str
    created: str
    eaglecheck: str = ""
    argv: list[str] = Field(default_factory=list)
    git_head: str = ""
    git_dirty: bool | None = None
    host: str = ""
    python: str = ""
    seed: int | None = None
    #: what the engine said about itself, or would have been: release, device, environment
    engine: EngineFacts = Field(default_factory=EngineFacts)
    #: the pair that the user named: names, sizes and digests (see harness.driving.pairs)
    pair: PairFacts | None = None

    def known_pair(self) -> dict[str, Any] | None:
        """The pair, as JSON has it; None where the run was of a pair of ours."""
        return None if self.pair is None else self.pair.model_dump(mode="json", exclude_defaults=True)


class ReproducerManifest(_Strict):
    """manifest.json of a reproducer: enough to run it again and to know when it is fixed."""

    store_version: Literal[1]
    scenario: str
    scenario_id: str
    release: str
    device: str
    header: Header
    signature: str
    replay: str


class _VerdictFields(_Strict):
    """What either sort of verdict.json says, as harness.contract.types.Verdict does."""

    store_version: Literal[1] = STORE_VERSION
    outcome: Outcome
    reasons: tuple[str, ...]
    coverage: dict[str, int]
    inside: dict[str, int] = {}
    compared: dict[str, int]
    ties: int
    kinds: tuple[str, ...]
    root_kinds: tuple[str, ...]

    def verdict(self) -> Verdict:
        """The record the rest of the harness speaks of."""
        return Verdict(**{name: getattr(self, name) for name in Verdict.__slots__})


class ScenarioVerdict(_VerdictFields):
    """verdict.json of one scenario."""

    scenario: str
    scenario_id: str

    @classmethod
    def of(cls, scenario: Scenario, verdict: Verdict) -> ScenarioVerdict:
        return cls(scenario=scenario.name, scenario_id=scenario.id, **_fields(verdict))


class RunVerdict(_VerdictFields):
    """verdict.json of a run. Written last."""

    scenarios: tuple[ScenarioVerdict, ...]

    @classmethod
    def of(cls, verdict: Verdict, scenarios: list[ScenarioVerdict]) -> RunVerdict:
        return cls(scenarios=tuple(scenarios), **_fields(verdict))


def _fields(verdict: Verdict) -> dict[str, Any]:
    return {name: plain(getattr(verdict, name)) for name in Verdict.__slots__}


class _KeyFields(_Strict):
    dp_rank: int
    rid: str
    attempt: Annotated[int, Field(validation_alias=AliasChoices("attempt", "epoch"))]
    committed: int
    phase: str
    step: int
    slot: int


def _number(value: object) -> object:
    """What JSON has no number for is written as one of these words."""
    return float(value) if isinstance(value, str) and value in ("Infinity", "-Infinity", "NaN") else value


class FindingLine(_Strict):
    """One line of findings.jsonl: a divergence and its signature, so that the file can be searched by it."""

    signature: str
    kind: Kind
    check: str
    key: _KeyFields
    round: int
    expected: Any
    observed: Any
    policy: Policy
    margin: Annotated[float | None, BeforeValidator(_number)]
    hint: str
    first: bool
    cause: str

    def divergence(self) -> Divergence:
        """The record this line was made from."""
        fields = {name: getattr(self, name) for name in Divergence.__slots__ if name != "key"}
        return Divergence(key=Key(**dict(self.key)), **fields)


def finding_line(found: Divergence) -> FindingLine:
    """A divergence as a line; values that JSON lacks become text."""
    fields = {name: plain(getattr(found, name)) for name in Divergence.__slots__ if name not in ("key", "margin")}
    key = _KeyFields(**{name: getattr(found.key, name) for name in Key.__slots__})
    return FindingLine(signature=found.signature, key=key, margin=found.margin, **fields)
