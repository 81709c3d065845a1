"""The records every room shares: scenarios going in, rows and findings coming out.

This module must not import torch, sglang or any other room: it is the vocabulary, not the behaviour.

Symbols used in shapes: b live requests, k speculative steps, t topk, n draft tokens, e sum of extend lengths,
h hidden width.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

SCENARIO_SCHEMA: Literal[1] = 1


class Phase(StrEnum):
    """Which forward or decision a row belongs to, in the order they happen to one request."""

    PREFILL = "PREFILL"  # target over prompt rows (one chunk)
    DRAFT_PREFILL = "DRAFT_PREFILL"  # draft over the same chunk, tokens rotated left by one
    DRAFT = "DRAFT"  # draft forward `step` of a round
    VERIFY = "VERIFY"  # target over the draft tree
    ACCEPT = "ACCEPT"  # the walk: one row per committed token
    EXTEND = "EXTEND"  # draft over the tokens the verify committed
    IDLE = "IDLE"  # a rank without requests entering a stage
    PREBUILT = "PREBUILT"  # decode-side batch whose prefill ran elsewhere


class Kind(StrEnum):
    """What is wrong. Stable: gates and known-failure files read these words."""

    TOKEN = "TOKEN"
    POSITION = "POSITION"
    PARENT = "PARENT"
    ACCEPT = "ACCEPT"
    EXTEND_INPUT = "EXTEND_INPUT"
    CACHE_SLOT = "CACHE_SLOT"
    NUMERIC = "NUMERIC"
    SHAPE = "SHAPE"
    MISSING_ROW = "MISSING_ROW"
    EXTRA_ROW = "EXTRA_ROW"
    LOCKSTEP = "LOCKSTEP"
    LEAK = "LEAK"
    CRASH = "CRASH"
    HANG = "HANG"
    NONDETERMINISM = "NONDETERMINISM"


class Outcome(StrEnum):
    """Three-valued judgement; merged by priority FAIL > UNKNOWN > PASS."""

    PASS = "PASS"
    FAIL = "FAIL"
    UNKNOWN = "UNKNOWN"


class Policy(StrEnum):
    """How a value was compared. There is no fourth."""

    EXACT = "EXACT"
    TIE = "TIE"
    BUDGET = "BUDGET"


#: Why a number is not allowed to be larger: what a message about it says behind what is allowed.
CONTEXT_IS = "engines are booted for 512 tokens of context"
RUNNING_IS = "an engine keeps room for each of them"
POOL = 512 * 256
POOL_IS = f"{POOL} tokens are 256 requests of the whole context, and memory is taken for all of them at boot"
TURNS_ARE = "512 turns end any request, and each is waited for"
SEED_IS = "SGLang keeps seeds in 64 bits"
LEAST_HEAT = 1e-6
HEAT_IS = "below 0.000001 SGLang takes it for 0, which is greedy, and far above 1 every token is as likely"


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class SpecConfig(_Strict):
    """Speculation knobs: k steps, t candidates a step, n nodes in the verified tree (root included).

    MTP: k layers of a multi-layer MTP draft, each proposing one token; a chain only.

    plugin: EAGLE as an algorithm that a plugin of SGLang registers (see harness.both_sides.plugin_algorithm), which of
    a hand-over makes no draft input (none) or one of its own class (own); bare: with nothing but what SGLang asks of a
    plugin.
    """

    algorithm: Literal["EAGLE", "EAGLE3", "MTP"] = "EAGLE"
    k: Annotated[int, Field(ge=1, le=16)] = 3
    t: Annotated[int, Field(ge=1, le=16)] = 1
    n: Annotated[int, Field(ge=2, le=256)] = 4
    plugin: Literal["bare", "none", "own"] | None = None

    @model_validator(mode="after")
    def _tree_is_possible(self) -> SpecConfig:
        if self.t == 1 and self.n != self.k + 1:
            raise ValueError(f"n must be k+1 = {self.k + 1} when t = 1, not {self.n}")
        if self.algorithm == "MTP" and self.t != 1:
            raise ValueError(f"t must be 1 for MTP, whose layers propose one chain, not {self.t}")
        most = 1 + self.t + (self.k - 1) * self.t * self.t
        if self.n > most:
            raise ValueError(f"n = {self.n} exceeds the {most} nodes that k = {self.k}, t = {self.t} can propose")
        return self

    @property
    def layers(self) -> int:
        """Draft forwards that catch up with a chunk or a verify, each over the same rows: one, or one a layer."""
        return self.k if self.algorithm == "MTP" else 1

    @property
    def draft_steps(self) -> int:
        """Draft forwards of a round before its verify: layers propose the whole chain while they catch up."""
        return 0 if self.algorithm == "MTP" else self.k - 1


class EngineConfig(_Strict):
    """Engine knobs, all fixed at boot but `chunk` and `running_limit`, which may change between scenarios.

    running_limit lowers max_running for one scenario. priority: requests of higher priority go first, and one that is
    higher by more than ten takes the place of a running one. dp above 1 is DP attention over tp = dp ranks; chunk,
    max_running and running_limit then hold for each rank.

    overlap None: what the release does by default for this speculation on this device.

    pd: prompts run on one engine and decoding on another, each with these knobs (running_limit, dp and tp: the decode
    side's; the prefill side has one rank).
    decode_cache: the decode side keeps a prefix cache; releases before 0.5.23 refuse that beside speculation.

    deterministic: a request's seed decides what it samples, whoever shares its batch. rejection: drafts are drawn from
    the draft's law and verified against it (rejection sampling), instead of the draft's best.
    """

    dp: Annotated[int, Field(ge=1, le=8)] = 1
    tp: Annotated[int, Field(ge=1, le=8)] = 1
    page: Annotated[int, Field(ge=1, le=512, description=CONTEXT_IS)] = 1
    overlap: bool | None = None
    graphs: bool = False
    backend: str = "triton"
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    prefix_cache: bool = True
    max_running: Annotated[int, Field(ge=1, le=256, description=RUNNING_IS)] = 8
    priority: bool = False
    pool_tokens: Annotated[int, Field(ge=16, le=POOL, description=POOL_IS)] = 4096
    chunk: Annotated[int, Field(ge=1, le=512)] | None = Field(default=None, description=CONTEXT_IS)
    running_limit: Annotated[int, Field(ge=1, le=256)] | None = Field(default=None, description=RUNNING_IS)
    pd: bool = False
    decode_cache: bool = False
    deterministic: bool = False
    rejection: bool = False

    def boot(self) -> dict[str, Any]:
        """The part that needs a reboot to change, as JSON-ready data."""
        return self.model_dump(exclude={"chunk", "running_limit"})


class RequestSpec(_Strict):
    """One request, by token ids alone; temperature 0 is greedy."""

    rid: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,40}$")]
    prompt: Annotated[tuple[int, ...], Field(min_length=1)]
    max_new_tokens: Annotated[int, Field(ge=1)] = 16
    temperature: Annotated[float, Field(ge=0.0, le=100.0, allow_inf_nan=False, description=HEAT_IS)] = 0.0
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] | None = Field(default=None, description=SEED_IS)
    stop_ids: tuple[int, ...] = ()
    priority: Annotated[int, Field(ge=-(10**6), le=10**6)] | None = None
    dp_rank: Annotated[int, Field(ge=0)] = 0

    @field_validator("temperature")
    @classmethod
    def _sampled_or_greedy(cls, value: float) -> float:
        if 0.0 < value < LEAST_HEAT:
            raise ValueError(
                f"{value:g} is neither greedy nor sampled: {HEAT_IS}\n  allowed: 0, or {LEAST_HEAT:f} to 100"
            )
        return value


class Op(_Strict):
    """One instruction of a scenario script.

    submit   rids arrive at the next tick, in this order
    tick     `count` turns of the scheduler loop
    abort    rids are aborted at the next tick
    retract  every running request goes back to the waiting queue at the next tick, and generation goes on
    pause    the loop runs on without batches from the next tick; submit nothing before resume
    resume   the end of a pause
    flush    the prefix cache is emptied now; does nothing while requests are alive
    transfer hand-overs of rids between prefill and decode side, as `name` says from now on: hold (nothing arrives),
             release (what is held arrives, in the order of these ops), fail (both sides are told so), drop (the prefill
             side is done, and nothing arrives), fake (said before the submit: SGLang's own backend of that name,
             which moves nothing)
    fault    arm the mutant `name` (see harness.both_sides.mutants), from the `count`-th batch of the scenario on
    drain    turns until nothing is left; how many at most follows from the tokens asked for

    Where prefill and decode are two engines, `name` "prefill" or "decode" lets only that side know of an abort or a
    submit; each side must be given every request once.
    """

    kind: Literal["submit", "tick", "abort", "retract", "pause", "resume", "flush", "transfer", "fault", "drain"]
    rids: tuple[str, ...] = ()
    count: Annotated[int, Field(ge=1, le=10_000, description=TURNS_ARE)] = 1
    name: str | None = None


class Scenario(_Strict):
    """A batch program: pure data, the same scenario gives the same batches.

    `id` is derived from the content (see `Scenario.id`), so it is stable across machines and years.
    """

    schema_version: Literal[1] = SCENARIO_SCHEMA
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,60}$")]
    seed: Annotated[int, Field(ge=0, le=2**63 - 1, description=SEED_IS)] = 0
    checkpoint: str = "eagle-tiny"
    spec: SpecConfig = SpecConfig()
    engine: EngineConfig = EngineConfig()
    requests: Annotated[tuple[RequestSpec, ...], Field(min_length=1)]
    script: Annotated[tuple[Op, ...], Field(min_length=1)]
    wants: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _names_resolve(self) -> Scenario:
        rids = [request.rid for request in self.requests]
        if len(set(rids)) != len(rids):
            twice = sorted({rid for rid in rids if rids.count(rid) > 1})
            raise ValueError(f"rid {', '.join(twice)}: used twice; allowed: a name of its own for each request")
        for op in self.script:
            unknown = sorted(set(op.rids) - set(rids))
            if unknown:
                raise ValueError(f"op {op.kind!r} names unknown rid {unknown[0]!r}; allowed: {', '.join(rids)}")
        for side in ("prefill", "decode") if self.engine.pd else ("",):
            given = [op for op in self.script if op.kind == "submit" and (op.name or side) == side]
            sent = [rid for op in given for rid in op.rids]
            if wrong := [f"{rid} is submitted {sent.count(rid)} times" for rid in rids if sent.count(rid) != 1]:
                where = f" to the {side} side" if side else ""
                raise ValueError(f"{', '.join(wrong)}; allowed: exactly once{where}, by an op 'submit' with its rid")
        _check_sides(self)
        if self.script[-1].kind != "drain":
            raise ValueError("the script must end with a drain op")
        ranked = [request.rid for request in self.requests if request.priority is not None]
        if ranked and not self.engine.priority:
            raise ValueError(f"request {ranked[0]!r} has a priority; set engine.priority to true, or leave it out")
        limit = self.engine.running_limit
        if limit is not None and limit > self.engine.max_running:
            raise ValueError(
                f"running_limit {limit} is above max_running {self.engine.max_running}; allowed: 1 to that"
            )
        _check_pauses(self.script)
        if self.engine.rejection and (self.spec.t > 1 or self.spec.algorithm == "MTP" or self.engine.pd):
            raise ValueError("engine.rejection is driven with chains (spec.t 1) of EAGLE or EAGLE3, without engine.pd")
        return self

    @property
    def id(self) -> str:
        """Content hash (12 hex digits of SHA-256 over canonical JSON), independent of field order.

        Defaults are left out, so that a field added later changes no id.
        """
        text = json.dumps(self.model_dump(mode="json", exclude_defaults=True), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def boot_key(self) -> str:
        """Scenarios with one boot key can share one engine process."""
        parts = {"checkpoint": self.checkpoint, "spec": self.spec.model_dump(), "engine": self.engine.boot()}
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]

    def request(self, rid: str) -> RequestSpec:
        """The request called `rid`; KeyError if there is none."""
        for request in self.requests:
            if request.rid == rid:
                return request
        raise KeyError(rid)


TRANSFERS = ("hold", "release", "fail", "drop", "fake")


def _check_sides(scenario: Scenario) -> None:
    """What only a pair of engines can do, and what it cannot."""
    given = set[str]()
    for op in scenario.script:
        given |= set(op.rids) if op.kind == "submit" else set()
        if op.kind == "transfer" and op.name == "fake" and given & set(op.rids):
            raise ValueError("op 'transfer' with name 'fake' comes after the submit of its request; put it before")
        if op.kind == "transfer" and op.name not in TRANSFERS:
            raise ValueError(f"op 'transfer' has name {op.name!r}; allowed: {', '.join(TRANSFERS)}")
        if op.kind == "transfer" and not scenario.engine.pd:
            raise ValueError("op 'transfer' needs two engines; set engine.pd to true, or leave it out")
        if op.kind in ("submit", "abort") and op.name not in (None, *(("prefill", "decode") * scenario.engine.pd)):
            raise ValueError(f"op {op.kind!r} has name {op.name!r}; allowed: prefill or decode with engine.pd, or none")
    if scenario.engine.decode_cache and not scenario.engine.pd:
        raise ValueError("engine.decode_cache needs engine.pd; set both, or neither")
    if scenario.spec.plugin and (not scenario.engine.pd or scenario.spec.algorithm != "EAGLE"):
        raise ValueError("spec.plugin needs engine.pd and algorithm EAGLE; set both, or leave spec.plugin out")


def _check_pauses(script: tuple[Op, ...]) -> None:
    """SGLang holds arrivals back while paused, and a paused engine never drains."""
    paused = False
    for op in script:
        if paused and op.kind in ("submit", "drain", "pause", "retract"):
            raise ValueError(f"op {op.kind!r} inside a pause; put a resume op before it")
        if not paused and op.kind == "resume":
            raise ValueError("op 'resume' without a pause before it")
        if op.kind in ("pause", "resume"):
            paused = op.kind == "pause"


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Key:
    """What two rows must share to be compared: meaning, never order of arrival."""

    dp_rank: int
    rid: str
    epoch: int
    committed: int
    phase: str
    step: int
    slot: int

    @staticmethod
    def of_rank(dp_rank: int, phase: str, *, step: int = 0) -> Key:
        """Of something that belongs to a rank, not to a request."""
        return Key(dp_rank=dp_rank, rid="", epoch=0, committed=-1, phase=phase, step=step, slot=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """One disagreement between engine and reference (or engine and invariant). check: id of the check that found it."""

    kind: Kind
    key: Key
    round: int
    expected: Any
    observed: Any
    check: str = ""
    policy: Policy = Policy.EXACT
    margin: float | None = None
    hint: str = ""
    first: bool = False
    #: signature of the earlier divergence that explains this one; empty for a root
    cause: str = ""

    @property
    def signature(self) -> str:
        """Failure identity: the same defect in another request or round has the same signature."""
        return f"{self.kind}:{self.check}:{self.key.phase}:{self.hint or 'any'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Judgement of one scenario or one run."""

    outcome: Outcome
    reasons: tuple[str, ...] = ()
    #: situation -> times it happened, and positions compared where it did
    coverage: dict[str, int] = field(default_factory=dict)
    inside: dict[str, int] = field(default_factory=dict)
    compared: dict[str, int] = field(default_factory=dict)
    ties: int = 0
    #: kinds of every divergence, and of those that nothing earlier explains
    kinds: tuple[str, ...] = ()
    root_kinds: tuple[str, ...] = ()

    @staticmethod
    def merge(outcomes: list[Outcome]) -> Outcome:
        """FAIL > UNKNOWN > PASS; an empty list is UNKNOWN, since nothing to compare is never a pass."""
        if Outcome.FAIL in outcomes:
            return Outcome.FAIL
        if not outcomes or Outcome.UNKNOWN in outcomes:
            return Outcome.UNKNOWN
        return Outcome.PASS
