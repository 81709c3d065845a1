"""Scenarios: what an engine is started with, which requests it gets, and when.

This module must not import torch, sglang or any other room.
"""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from harness.contract import scenario_v1
from harness.contract.requests import NO_NUMBER, SEED_IS, RequestSpec, Strict
from harness.contract.script import Op, check_pauses, check_samples, check_served, check_sides, check_updates
from harness.contract.settings import EngineConfig, SpecConfig

SCENARIO_SCHEMA: Literal[2] = 2


class Scenario(Strict):
    """A batch program: pure data, the same scenario gives the same batches.

    `id` is derived from the content (see `Scenario.id`), so it is stable across machines and years.
    """

    schema_version: Literal[2] = SCENARIO_SCHEMA
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,60}$")]
    seed: Annotated[int, Field(ge=0, le=2**63 - 1, description=SEED_IS)] = 0
    checkpoint: str = "eagle-tiny"
    spec: SpecConfig = SpecConfig()
    engine: EngineConfig = EngineConfig()
    requests: Annotated[tuple[RequestSpec, ...], Field(min_length=1)]
    script: Annotated[tuple[Op, ...], Field(min_length=1)]
    wants: tuple[str, ...] = ()

    @field_validator("requests")
    @classmethod
    def _numbers(cls, requests: tuple[RequestSpec, ...], info: ValidationInfo) -> tuple[RequestSpec, ...]:
        engine = info.data.get("engine")
        return requests if engine is None else numbered(requests, engine)

    @model_validator(mode="after")
    def _names_resolve(self) -> Scenario:
        rids = [request.rid for request in self.requests]
        if len(set(rids)) != len(rids):
            twice = sorted({rid for rid in rids if rids.count(rid) > 1})
            raise ValueError(f"rid {', '.join(twice)}: used twice\n  allowed: a name of its own for each request")
        for op in self.script:
            unknown = sorted(set(op.rids) - set(rids))
            if unknown:
                raise ValueError(f"op {op.kind!r} names unknown rid {unknown[0]!r}\n  allowed: {', '.join(rids)}")
        for side in ("prefill", "decode") if self.engine.disaggregation else ("",):
            given = [op for op in self.script if op.kind == "submit" and (op.name or side) == side]
            sent = [rid for op in given for rid in op.rids]
            if wrong := [f"{rid} is submitted {sent.count(rid)} times" for rid in rids if sent.count(rid) != 1]:
                where = f" to the {side} side" if side else ""
                raise ValueError(f"{', '.join(wrong)}\n  allowed: exactly once{where}, by an op 'submit' with its rid")
        check_sides(self.script, spec=self.spec, engine=self.engine)
        check_served(self.requests, engine=self.engine)
        check_samples(self.script, asked=self.requests, sampled=self.sampled.requests, engine=self.engine)
        check_updates(self.script, engine=self.engine)
        if self.script[-1].kind != "drain":
            raise ValueError('the script must end with a drain op\n  allowed: {"kind": "drain"} at its end')
        ranked = [request.rid for request in self.requests if request.priority is not None]
        if ranked and not self.engine.priority_scheduling:
            raise ValueError(
                f"request {ranked[0]!r} has a priority\n  allowed: none, or engine.priority_scheduling true"
            )
        limit = self.engine.running_limit
        if limit is not None and limit > self.engine.max_running_requests:
            raise ValueError(
                f"running_limit {limit} is above max_running_requests {self.engine.max_running_requests}\n"
                "  allowed: 1 to that"
            )
        check_pauses(self.script)
        if self.engine.rejection_sampling and self.spec.eagle_topk > 1:
            raise ValueError("engine.rejection_sampling draws chains\n  allowed: with spec.eagle_topk 1")
        return self

    @property
    def id(self) -> str:
        """Content hash (12 hex digits of SHA-256 over canonical JSON), independent of field order.

        Defaults are left out, so that a field added later changes no id; names are those of schema version 1, so that
        the second one changed none either.
        """
        content = scenario_v1.downgrade(self.model_dump(mode="json", exclude_defaults=True))
        for request, one in zip(self.requests, content["requests"], strict=True):
            if request.unlimited:  # as it was written before null was
                one |= {"max_new_tokens": request.max_new_tokens, "unlimited": True}
        text = json.dumps(content, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def boot_key(self) -> str:
        """Scenarios with one boot key can share one engine process."""
        parts = {"checkpoint": self.checkpoint, "spec": self.spec.model_dump(), "engine": self.engine.boot()}
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]

    @property
    def updates(self) -> int:
        """How often its engine is given other weights."""
        return sum(op.kind == "update" for op in self.script)

    def request(self, rid: str) -> RequestSpec:
        """The request called `rid`, or the one of a request's samples; KeyError if there is none."""
        for request in (*self.requests, *self.sampled.requests):
            if request.rid == rid:
                return request
        raise KeyError(rid)

    @property
    def sampled(self) -> Scenario:
        """With the requests that SGLang runs: those with n > 1 are several. Its id is another then."""
        runs = {request.rid: request.runs for request in self.requests}
        if all(len(one) == 1 for one in runs.values()):
            return self
        ops = (
            op.model_copy(update={"rids": tuple(one.rid for rid in op.rids for one in runs[rid])}) for op in self.script
        )
        return self.model_copy(
            update={"requests": tuple(one for run in runs.values() for one in run), "script": tuple(ops)}
        )


def room(prompt: int, engine: EngineConfig) -> int:
    """New tokens that SGLang lets a request write that asks for no number: all but two of the context, or the pool."""
    return min(engine.context_length, engine.max_total_tokens) - 2 - prompt


def numbered(requests: tuple[RequestSpec, ...], engine: EngineConfig) -> tuple[RequestSpec, ...]:
    """Those that ask for no number of new tokens with the one that SGLang comes to; 0 where the prompt leaves none."""
    return tuple(
        one.model_copy(update={"max_new_tokens": max(0, room(len(one.input_ids), engine)), "unlimited": True})
        if one.unlimited or one.max_new_tokens == NO_NUMBER
        else one
        for one in requests
    )
