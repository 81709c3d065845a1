"""Which scenarios a command runs, and whether an engine could run them at all: asked before one is booted.

What is refused here would only end in an engine that does not start, or in a request that is cut short without a word.
It must not import torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from cases import catalogue, fixed
from cases.checkpoints import RECIPES
from cases.families import FAMILIES
from cases.recipes import Qwen3Recipe, Recipe
from cases.situations import SITUATIONS
from harness.both_sides.mutants import MUTANTS
from harness.contract.types import RequestSpec, Scenario
from harness.contract.usage import UsageError, unknown
from harness.driving.pairs import OwnPair
from harness.engines.launch import BACKENDS, CONTEXT_LENGTH

#: SGLang keeps this many tokens of the context to itself when it admits a request.
CONTEXT_SPARE = 2


def choose_scenarios(names: list[str], files: list[Path], family: str | None = None) -> list[Scenario]:
    """The family's set (None: the default one), or the named ones (that set and the corpus) and those in files."""
    if family is not None and family not in FAMILIES:
        raise UsageError(unknown("family", family, FAMILIES))
    usual = fixed.default_scenarios() if family is None else list(FAMILIES[family].scenarios)
    if not names and not files:
        return usual
    known = {scenario.name: scenario for scenario in usual}
    known |= {name: catalogue.load(name).scenario for name in catalogue.names()}
    if family is not None and files and not names:
        raise UsageError(f"--family {family} says nothing about a --scenario-file\n  leave one of them out")
    for name in names:
        if name not in known:
            raise UsageError(unknown("scenario", name, known) + (_owner(name) or _of_others(family)))
    chosen = [known[name] for name in names] + [catalogue.read_scenario(path) for path in files]
    twice = [name for (name, _), count in Counter((one.name, one.id) for one in chosen).items() if count > 1]
    if twice:
        raise UsageError(f"scenario {twice[0]!r} is asked for twice\n  name it once: the same scenario repeats exactly")
    return chosen


def _owner(name: str) -> str:
    """Where a scenario of that name is, if another family has it."""
    found = [family for family, one in FAMILIES.items() if any(scenario.name == name for scenario in one.scenarios)]
    return f"\n  {name} is a scenario of another family:  --family {found[0]} --scenario {name}" if found else ""


def _of_others(family: str | None) -> str:
    """How to see the names that other families have."""
    others = [one for one in FAMILIES if one != (family or next(iter(FAMILIES)))]
    return (
        f"\n  other families have scenarios of their own, by name in docs/scenarios.md: {', '.join(others)}"
        f"\n  for example:  --family {others[0]} --scenario {FAMILIES[others[0]].scenarios[0].name}"
    )


def check_scenarios(scenarios: Sequence[Scenario], *, device: str, own: OwnPair | None = None) -> None:
    """UsageError for the first scenario that no engine of this version could run."""
    for scenario in scenarios:
        _check_engine(scenario, device)
        for name in scenario.wants:
            if name not in SITUATIONS:
                raise _refusal(scenario, f"wants: {unknown('situation', name, SITUATIONS)}")
        if own is None and scenario.checkpoint not in RECIPES:
            raise _refusal(scenario, unknown("checkpoint", scenario.checkpoint, sorted(RECIPES)))
        for op in scenario.script:
            if op.kind == "fault" and op.name not in MUTANTS:
                raise _refusal(scenario, unknown("fault", str(op.name), MUTANTS))
        vocab = own.vocab if own is not None else RECIPES[scenario.checkpoint].vocab
        for request in scenario.requests:
            _check_request(scenario, request, vocab)


def _check_engine(scenario: Scenario, device: str) -> None:
    spec, engine = scenario.spec, scenario.engine
    only: dict[str, tuple[object, object]] = {"engine.tp": (engine.tp, engine.dp)}
    recipe = RECIPES.get(scenario.checkpoint)
    if engine.dp > 1:
        _check_ranks(scenario, recipe)
    if recipe is not None and spec.algorithm != recipe.algorithm:
        raise _refusal(
            scenario,
            f"spec.algorithm is {spec.algorithm!r}, and checkpoint {scenario.checkpoint!r} is not of that kind\n"
            f"  allowed: {recipe.algorithm!r}, or one of: {', '.join(_of_kind(spec.algorithm))}",
        )
    if device == "cpu":
        only |= {"engine.graphs": (engine.graphs, False)}
    if engine.backend not in BACKENDS[device]:
        backends = ", ".join(map(repr, BACKENDS[device]))
        raise _refusal(
            scenario, f"engine.backend is {engine.backend!r}, which cannot be run on {device}\n  allowed: {backends}"
        )
    if engine.chunk is not None and engine.chunk < engine.page:
        raise _refusal(
            scenario,
            f"engine.chunk is {engine.chunk} and engine.page {engine.page}: chunks are whole pages, so prompts would "
            f"wait for ever\n  allowed: a chunk of {engine.page} or more, or pages of at most {engine.chunk}",
        )
    for key, (found, allowed) in only.items():
        if found != allowed:
            where = f" on {device}" if key == "engine.graphs" else " by this version"
            raise _refusal(scenario, f"{key} is {found!r}, which cannot be run{where}\n  allowed: {allowed!r}")


def _check_ranks(scenario: Scenario, recipe: Recipe | None) -> None:
    """DP attention: SGLang builds it into some targets only, and an EAGLE-1 draft is no part of it and hangs."""
    able = [name for name, one in RECIPES.items() if isinstance(one, Qwen3Recipe)]
    if recipe is not None and not isinstance(recipe, Qwen3Recipe):
        raise _refusal(
            scenario,
            f"engine.dp is {scenario.engine.dp}, and the target of checkpoint {scenario.checkpoint!r} cannot run under "
            f"DP attention\n  allowed: {', '.join(able)}, or engine.dp 1",
        )


def _of_kind(algorithm: str) -> list[str]:
    return sorted(name for name, recipe in RECIPES.items() if recipe.algorithm == algorithm)


def _check_request(scenario: Scenario, request: RequestSpec, vocab: int) -> None:
    where = f"request {request.rid!r}"
    if request.dp_rank >= scenario.engine.dp:
        raise _refusal(scenario, f"{where}: dp_rank {request.dp_rank}\n  allowed: below {scenario.engine.dp}")
    foreign = [token for token in (*request.prompt, *request.stop_ids) if not 0 <= token < vocab]
    if foreign:
        what = "token id" if foreign[0] in request.prompt else "stop id"
        raise _refusal(
            scenario,
            f"{where}: {what} {foreign[0]} is outside the vocabulary of checkpoint {scenario.checkpoint!r}\n"
            f"  allowed: 0 to {vocab - 1}; use smaller ids, or a checkpoint with a larger vocabulary",
        )
    _check_length(scenario, request, where)


def _check_length(scenario: Scenario, request: RequestSpec, where: str) -> None:
    """Positions run up to k beyond the last token; a round holds twice its nodes in KV slots (SGLang's own reserve)."""
    spec, prompt, new = scenario.spec, len(request.prompt), request.max_new_tokens
    asked = f"{where}: {prompt} prompt tokens and {new} new ones"
    context = CONTEXT_LENGTH - max(CONTEXT_SPARE, spec.k)
    if prompt + new > context:
        raise _refusal(
            scenario,
            f"{asked} exceed the context of {CONTEXT_LENGTH} less {CONTEXT_LENGTH - context} to speculate\n"
            f"  allowed: together at most {context}",
        )
    pool = scenario.engine.pool_tokens - 2 * max(spec.k * spec.t, spec.n)
    if prompt + new > pool:
        raise _refusal(
            scenario,
            f"{asked} never fit engine.pool_tokens {scenario.engine.pool_tokens}\n"
            f"  allowed: together at most {max(pool, 0)}, or a larger pool",
        )

    page = scenario.engine.page
    whole, held = scenario.engine.pool_tokens // page * page, -(-prompt // page) * page
    if page > 1 and held + new + page > whole:  # else SGLang shortens the answer, or never lets the request in
        raise _refusal(
            scenario,
            f"{asked} never fit engine.pool_tokens {scenario.engine.pool_tokens} in pages of {page}: the prompt takes "
            f"whole pages, and SGLang keeps one\n  allowed: engine.pool_tokens "
            f"{-(-(held + new + page) // page) * page} or "
            "more, or smaller pages",
        )


def _refusal(scenario: Scenario, text: str) -> UsageError:
    return UsageError(f"scenario {scenario.name!r}: {text}")
