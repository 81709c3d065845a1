"""The JSON documents as docs/json.md promises them, strictly: a key more or less, or another type, is a failure."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from harness.contract.types import Kind, Outcome, Phase, Policy

Count = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(ge=0.0)]
#: JSON has no infinity: such a margin is text.
Margin = float | Literal["inf", "-inf", "nan"] | None


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Place(Strict):
    """Where two sides part, in the words of a matrix cell."""

    kind: Annotated[Kind, Field(strict=False)]
    rid: str
    dp_rank: int
    committed_len: int
    round: int
    phase: Annotated[Phase, Field(strict=False)]
    step: int
    slot: int
    expected: JsonValue
    observed: JsonValue


class Divergence(Place):
    check: str
    attempt: int
    policy: Annotated[Policy, Field(strict=False)]
    margin: Margin
    hint: str


class Known(Strict):
    id: Annotated[str, Field(pattern=r"^F-\d{3}$")]
    title: str
    releases: str
    fixed_in: str
    link: str
    assume: bool
    shown_by: list[str]


class Accept(Strict):
    verifies: Count
    expected: float
    observed: float
    lost_percent: float
    sampled: Count


class Finding(Strict):
    signature: str
    kind: Annotated[Kind, Field(strict=False)]
    scenario: str
    count: Annotated[int, Field(ge=1)]
    rids: list[str]
    consequence_of: str | None
    component: str
    made_by: str
    read_by: str
    around: list[str]
    known: list[Known]
    accept: Accept | None
    first: Divergence


class CoveragePoint(Strict):
    asked: Count
    reached: Count
    scenarios: Count
    times: Count
    positions: Count


class Cost(Strict):
    boots: Count
    boot_seconds: Seconds
    waited_seconds: Seconds
    engine_seconds: Seconds
    reference_seconds: Seconds
    reference_mib: Count
    reference_said_mib: Count
    judge_seconds: Seconds
    store_seconds: Seconds
    total_seconds: Seconds


class Witness(Strict):
    requests: Count
    rows: Count
    without: Count


class Scenario(Strict):
    name: str
    id: Annotated[str, Field(pattern=r"^[0-9a-f]{12}$")]
    verdict: Annotated[Outcome, Field(strict=False)]
    reasons: list[str]
    kinds: list[str]
    known: list[str]
    providers: dict[str, str]
    witness: Witness | None
    text_identical: bool | None
    rounds: Count
    draft_steps: Count
    accept_length: float | None
    accept: Accept | None
    coverage: dict[str, Count]
    compared: dict[str, Count]
    ties: Count
    server_flags: str
    output_ids: dict[str, list[int]]
    folder: str
    reproducer: str | None


class Checkpoint(Strict):
    folder: str
    architecture: str
    parameters: Count | None
    hidden: Count | None
    layers: Count | None
    vocab: Count | None
    dtype: str
    sha256: dict[str, str]
    of_target: bool = False


class Pair(Strict):
    algorithm: str
    target: Checkpoint
    draft: Checkpoint


class Replaced(Strict):
    operation: str
    by: str
    subject: str
    reason: str


class Run(Strict):
    """`run --json` and `recheck --json`."""

    schema_: Literal[2] = Field(alias="schema")
    engine: str
    device: str
    revert: int | None
    worker: str | None
    overlap: bool | None
    covers: str
    replaced: list[Replaced]
    assumed: list[str]
    pair: Pair | None = None
    providers: dict[str, str]
    witness: Witness | None
    verdict: Annotated[Outcome, Field(strict=False)]
    reasons: list[str]
    findings: list[Finding]
    coverage: dict[str, Count]
    coverage_points: dict[str, CoveragePoint]
    compared: dict[str, Count]
    ties: Count
    accept_length: float | None
    accept: Accept | None
    scenarios: list[Scenario]
    cost: Cost
    run: str
    component: dict[str, object] | None = None
    seed: int | None = None
    interrupted: Literal[True] | None = None


class Cell(Strict):
    engine: str
    device: str
    case: str
    revert: int | None
    verdict: Annotated[Outcome, Field(strict=False)]
    reasons: list[str]
    expected: Literal["PASS", "FAIL", "unknown"]
    as_expected: bool | None
    kinds: list[str]
    first: Place | None
    known: list[str]
    text_identical: bool | None
    run: str


class Matrix(Strict):
    """`matrix --json`."""

    schema_: Literal[1] = Field(alias="schema")
    cells: list[Cell]
