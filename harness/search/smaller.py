"""What a scenario can be made smaller by: valid candidates with less of something, greatest cuts first.

Pure data. It must not know what a failure is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from pydantic import ValidationError

from harness.contract.types import Op, RequestSpec, Scenario, SpecConfig


def smaller(scenario: Scenario) -> Iterator[tuple[Scenario, str]]:
    """(candidate, what was done), all with the same boot configuration."""
    for cut in (
        _fewer_requests,
        _fewer_ops,
        _simpler_knobs,
        _fewer_new_tokens,
        _shorter_prompts,
        _fewer_stops,
        _fewer_turns,
    ):
        for changes, what in cut(scenario):
            candidate = _valid(scenario, changes)
            if candidate is not None:
                yield candidate, what


def simpler_boots(scenario: Scenario) -> Iterator[tuple[Scenario, str]]:
    """Candidates that need another engine: one knob at a time back to the simplest."""
    engine, spec = scenario.engine, scenario.spec
    if engine.page > 1:
        yield scenario.model_copy(update={"engine": engine.model_copy(update={"page": 1})}), "pages of one token"
    if spec.t > 1:
        chain = SpecConfig(algorithm=spec.algorithm, k=spec.k, t=1, n=spec.k + 1)
        yield scenario.model_copy(update={"spec": chain}), "a chain, no tree"
    if spec.t == 1 and spec.k > 2:
        short = SpecConfig(algorithm=spec.algorithm, k=2, t=1, n=3)
        yield scenario.model_copy(update={"spec": short}), "two draft steps"


def _valid(scenario: Scenario, changes: dict[str, Any]) -> Scenario | None:
    """The scenario with these fields; wants are dropped, since a smaller one need not bring them about."""
    try:
        return Scenario.model_validate({**scenario.model_dump(), "wants": (), **changes})
    except ValidationError:
        return None


Cut = Iterator[tuple[dict[str, Any], str]]
Change = Callable[[RequestSpec], dict[str, Any]]


def _fewer_requests(scenario: Scenario) -> Cut:
    rids = [request.rid for request in scenario.requests]
    halves = [rids[: len(rids) // 2], rids[len(rids) // 2 :]] if len(rids) > 2 else []
    for gone in [*halves, *([rid] for rid in rids)]:
        if len(gone) < len(rids):
            kept = tuple(request for request in scenario.requests if request.rid not in gone)
            yield {"requests": kept, "script": _without_rids(scenario.script, gone)}, f"without {', '.join(gone)}"


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
            yield (
                {"script": tidy([o for i, o in enumerate(script) if i not in (place, end)])},
                "without pause and resume",
            )
        elif op.kind in ("abort", "retract", "flush", "fault"):
            yield {"script": tidy([o for i, o in enumerate(script) if i != place])}, f"without {op.kind}"
    together = [rid for op in script if op.kind == "submit" for rid in op.rids]
    if sum(op.kind == "submit" for op in script) > 1:
        rest = [op for op in script if op.kind != "submit"]
        yield {"script": tidy([Op(kind="submit", rids=tuple(together)), *rest])}, "all arriving together"


def _simpler_knobs(scenario: Scenario) -> Cut:
    for name in ("running_limit", "chunk"):
        if getattr(scenario.engine, name) is not None:
            yield {"engine": scenario.engine.model_copy(update={name: None})}, f"without {name}"


def _fewer_new_tokens(scenario: Scenario) -> Cut:
    for count in (r.max_new_tokens for r in scenario.requests) if len(scenario.requests) < 2 else ():
        yield from _with_each(scenario, lambda r: {"max_new_tokens": 1}, f"1 new token instead of {count}")
    yield from _with_each(scenario, lambda r: {"max_new_tokens": max(1, r.max_new_tokens // 2)}, "half the new tokens")
    yield from _with_each(scenario, lambda r: {"max_new_tokens": max(1, r.max_new_tokens - 1)}, "one new token less")


def _shorter_prompts(scenario: Scenario) -> Cut:
    """Cut at the end, so that shared prefixes stay shared."""
    for share in (2, 4, 8):
        yield from _with_each(scenario, _prompt_less(share), f"1/{share} of the prompt less")
    yield from _with_each(
        scenario, lambda r: {"prompt": r.prompt[: max(1, len(r.prompt) - 1)]}, "one prompt token less"
    )


def _prompt_less(share: int) -> Change:
    return lambda r: {"prompt": r.prompt[: max(1, len(r.prompt) - len(r.prompt) // share)]}


def _half_the_stops(half: int) -> Change:
    return lambda r: {"stop_ids": r.stop_ids[half::2] or r.stop_ids}


def _fewer_stops(scenario: Scenario) -> Cut:
    yield from _with_each(scenario, lambda r: {"stop_ids": ()}, "without stop ids")
    for half in (0, 1):
        yield from _with_each(scenario, _half_the_stops(half), "half the stop ids")


def _with_each(scenario: Scenario, change: Change, what: str) -> Cut:
    """The change on all requests at once, then on one at a time."""
    changed = [request.model_copy(update=change(request)) for request in scenario.requests]
    if len(changed) > 1:
        yield {"requests": tuple(changed)}, f"{what} everywhere"
    for place, request in enumerate(changed):
        if request != scenario.requests[place]:
            yield (
                {"requests": (*scenario.requests[:place], request, *scenario.requests[place + 1 :])},
                f"{request.rid}: {what}",
            )


def _fewer_turns(scenario: Scenario) -> Cut:
    script = scenario.script
    for place, op in enumerate(script):
        if op.kind == "tick":
            yield {"script": tidy([o for i, o in enumerate(script) if i != place])}, "without waiting"
            for count in (op.count // 2, op.count - 1):
                if 0 < count < op.count:
                    fewer = op.model_copy(update={"count": count})
                    yield {"script": tidy([fewer if i == place else o for i, o in enumerate(script)])}, f"{count} turns"


def tidy(script: list[Op]) -> tuple[Op, ...]:
    """Neighbouring ticks as one, none before the first op or right before the drain."""
    kept: list[Op] = []
    for op in script:
        if op.kind == "tick" and (not kept or kept[-1].kind == "tick"):
            if kept:
                kept[-1] = kept[-1].model_copy(update={"count": kept[-1].count + op.count})
            continue
        if op.kind == "drain" and kept and kept[-1].kind == "tick":
            kept.pop()
        kept.append(op)
    return tuple(kept)
