"""Makes a failing scenario small: the same failure signature from fewer requests, ops, tokens and settings.

A candidate counts only if it shows the *same* signature; another failure on the way is reported, not followed. The
candidates are valid scenarios with less of something, greatest cuts first. It must not run an engine: the caller says
what a scenario's failures are, and what that may cost.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from harness.contract.requests import RequestSpec
from harness.contract.scenario import Scenario
from harness.contract.script import Op
from harness.contract.settings import SpecConfig

#: The root signatures of a scenario's failures; empty if it passes or cannot be judged.
Fails = Callable[[Scenario], frozenset[str]]

#: Fields that change, each.
Cut = Iterator[dict[str, Any]]
Change = Callable[[RequestSpec], dict[str, Any]]

#: Failures after which an engine must be booted anew.
ENDING = ("CRASH:", "HANG:")


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """When to stop: seconds of wall time, engine restarts, scenarios tried."""

    seconds: float = 60.0
    restarts: int = 4
    tries: int = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Shrunk:
    """The smallest scenario found. finished: nothing smaller was left to try; other: signatures met on the way."""

    scenario: Scenario
    tries: int
    restarts: int
    finished: bool
    other: frozenset[str]


class _BudgetSpent(Exception):
    pass


@dataclass(slots=True)
class _Search:
    fails: Fails
    signature: str
    budget: Budget
    best: Scenario
    start: float = field(default_factory=time.monotonic)
    seen: set[str] = field(default_factory=set)
    other: set[str] = field(default_factory=set)
    restarts: int = 0
    booted: str = ""

    def shows(self, candidate: Scenario) -> bool:
        """Whether a candidate fails in the same way; then it is the best so far."""
        if candidate.id in self.seen or size_with_settings(candidate) >= size_with_settings(self.best):
            return False
        if candidate.boot_key() != self.booted:
            self._restart(candidate)
        if time.monotonic() - self.start >= self.budget.seconds or len(self.seen) >= self.budget.tries:
            raise _BudgetSpent
        self.seen.add(candidate.id)
        found = self.fails(candidate)
        self.other |= found - {self.signature}
        if any(signature.startswith(ENDING) for signature in found):
            self.booted = ""
        if self.signature in found:
            self.best = candidate
        return self.signature in found

    def _restart(self, candidate: Scenario) -> None:
        if self.restarts >= self.budget.restarts:
            raise _BudgetSpent
        self.restarts += 1
        self.booted = candidate.boot_key()


def shrink(scenario: Scenario, fails: Fails, signature: str, *, budget: Budget | None = None) -> Shrunk:
    """The smallest scenario found with root signature `signature`; `scenario` itself if nothing smaller has it.

    First within its boot configuration, then with simpler boot configurations as far as the restarts last.
    """
    search = _Search(
        fails=fails, signature=signature, budget=budget or Budget(), best=scenario, booted=scenario.boot_key()
    )
    finished = True
    try:
        _to_fixpoint(search)
        for candidate in simpler_boots(search.best):
            if search.shows(candidate):
                _to_fixpoint(search)
    except _BudgetSpent:
        finished = False
    return Shrunk(
        scenario=search.best,
        tries=len(search.seen),
        restarts=search.restarts,
        finished=finished,
        other=frozenset(search.other),
    )


def _to_fixpoint(search: _Search) -> None:
    """Start over after every success: the greatest cuts come first."""
    while any(map(search.shows, smaller(search.best))):
        pass


def size(scenario: Scenario) -> tuple[int, ...]:
    """What shrinking reduces, in this order: requests, ops, tokens to generate, prompt tokens, scheduler steps."""
    return (
        len(scenario.requests),
        sum(op.kind != "step" for op in scenario.script),
        sum(request.max_new_tokens for request in scenario.requests),
        sum(len(request.input_ids) for request in scenario.requests),
        sum(len(request.stop_token_ids) for request in scenario.requests),
        sum(op.count for op in scenario.script if op.kind == "step"),
        len(scenario.wants)
        + sum(value is not None for value in (scenario.engine.chunked_prefill_size, scenario.engine.running_limit)),
    )


def size_with_settings(scenario: Scenario) -> tuple[int, ...]:
    """As `size`, and last how far the boot configuration is from the simplest one."""
    plain = Scenario.model_fields["engine"].default
    unusual = sum(
        getattr(scenario.engine, name) != getattr(plain, name)
        for name in ("page_size", "radix_cache", "max_total_tokens")
    )
    return (*size(scenario), unusual, scenario.spec.num_steps, scenario.spec.eagle_topk)


def smaller(scenario: Scenario) -> Iterator[Scenario]:
    """Candidates with the same boot configuration."""
    for cut in (_fewer_requests, _fewer_ops, _simpler_settings, _smaller_requests, _fewer_steps):
        for changes in cut(scenario):
            candidate = _valid(scenario, changes)
            if candidate is not None:
                yield candidate


def simpler_boots(scenario: Scenario) -> Iterator[Scenario]:
    """Candidates that need another engine: pages of one token, a chain instead of a tree, or two draft steps."""
    engine, spec = scenario.engine, scenario.spec
    if engine.page_size > 1:
        yield scenario.model_copy(update={"engine": engine.model_copy(update={"page_size": 1})})
    for steps in [spec.num_steps] if spec.eagle_topk > 1 else [2] if spec.num_steps > 2 else []:
        chain = SpecConfig(algorithm=spec.algorithm, num_steps=steps, eagle_topk=1, num_draft_tokens=steps + 1)
        yield scenario.model_copy(update={"spec": chain})


def _valid(scenario: Scenario, changes: dict[str, Any]) -> Scenario | None:
    """The scenario with these fields; wants are dropped, since a smaller one need not bring them about."""
    try:
        return Scenario.model_validate({**scenario.model_dump(), "wants": (), **changes})
    except ValidationError:
        return None


def _fewer_requests(scenario: Scenario) -> Cut:
    rids = [request.rid for request in scenario.requests]
    halves = [rids[: len(rids) // 2], rids[len(rids) // 2 :]] if len(rids) > 2 else []
    for gone in [*halves, *([rid] for rid in rids)]:
        if len(gone) < len(rids):
            kept = tuple(request for request in scenario.requests if request.rid not in gone)
            yield {"requests": kept, "script": _without_rids(scenario.script, gone)}


def _without_rids(script: tuple[Op, ...], gone: list[str]) -> tuple[Op, ...]:
    kept = []
    for op in script:
        rids = tuple(rid for rid in op.rids if rid not in gone)
        if rids or not op.rids:
            kept.append(op.model_copy(update={"rids": rids}))
    return tidy(kept)


def _fewer_ops(scenario: Scenario) -> Cut:
    script = scenario.script
    for place, op in enumerate(script):
        if op.kind == "pause":
            end = next((i for i in range(place, len(script)) if script[i].kind == "resume"), place)
            yield _without_ops(script, place, end)
        elif op.kind in ("abort", "retract", "flush", "update", "mutant"):  # of "memory" both, or none
            yield _without_ops(script, place)
    together = [rid for op in script if op.kind == "submit" for rid in op.rids]
    if sum(op.kind == "submit" for op in script) > 1:
        rest = [op for op in script if op.kind != "submit"]
        yield {"script": tidy([Op(kind="submit", rids=tuple(together)), *rest])}


def _without_ops(script: tuple[Op, ...], *places: int) -> dict[str, Any]:
    return {"script": tidy([op for place, op in enumerate(script) if place not in places])}


def _simpler_settings(scenario: Scenario) -> Cut:
    for name in ("running_limit", "chunked_prefill_size"):
        if getattr(scenario.engine, name) is not None:
            yield {"engine": scenario.engine.model_copy(update={name: None})}


def _smaller_requests(scenario: Scenario) -> Cut:
    """The change on all requests at once, then on one at a time."""
    one_token: list[Change] = [lambda r: {"max_new_tokens": 1}] if len(scenario.requests) == 1 else []
    for change in (*one_token, *REQUEST_CUTS):
        changed = [request.model_copy(update=change(request)) for request in scenario.requests]
        if len(changed) > 1:
            yield {"requests": tuple(changed)}
        for place, request in enumerate(changed):
            if request != scenario.requests[place]:
                yield {"requests": (*scenario.requests[:place], request, *scenario.requests[place + 1 :])}


def _prompt_less(share: int) -> Change:
    return lambda r: {"input_ids": r.input_ids[: max(1, len(r.input_ids) - len(r.input_ids) // share)]}


#: Fewer new tokens, shorter prompts, cut at the end so that shared prefixes stay shared, and fewer stop ids.
REQUEST_CUTS: tuple[Change, ...] = (
    lambda r: {"max_new_tokens": max(1, r.max_new_tokens // 2)},
    lambda r: {"max_new_tokens": max(1, r.max_new_tokens - 1)},
    *map(_prompt_less, (2, 4, 8)),
    lambda r: {"input_ids": r.input_ids[: max(1, len(r.input_ids) - 1)]},
    lambda r: {"stop_token_ids": ()},
    lambda r: {"stop_token_ids": r.stop_token_ids[0::2] or r.stop_token_ids},
    lambda r: {"stop_token_ids": r.stop_token_ids[1::2] or r.stop_token_ids},
)


def _fewer_steps(scenario: Scenario) -> Cut:
    script = scenario.script
    for place, op in enumerate(script):
        if op.kind == "step":
            yield _without_ops(script, place)
            for count in (op.count // 2, op.count - 1):
                if 0 < count < op.count:
                    fewer = op.model_copy(update={"count": count})
                    yield {"script": tidy([fewer if i == place else o for i, o in enumerate(script)])}


def tidy(script: list[Op]) -> tuple[Op, ...]:
    """Neighbouring scheduler steps as one, none before the first op or right before the drain."""
    kept: list[Op] = []
    for op in script:
        if op.kind == "step" and (not kept or kept[-1].kind == "step"):
            if kept:
                kept[-1] = kept[-1].model_copy(update={"count": kept[-1].count + op.count})
            continue
        if op.kind == "drain" and kept and kept[-1].kind == "step":
            kept.pop()
        kept.append(op)
    return tuple(kept)
