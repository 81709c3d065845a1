"""Whether an engine could run a scenario at all: asked before one is booted.

What is refused here would only end in an engine that does not start, or in a request that is cut short silently.
It must not import torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from cases.adapters import ADAPTERS
from cases.pairs import RECIPES
from cases.recipes import Recipe
from harness.both_sides.logit_processors import PARAMETER
from harness.both_sides.mutants import MUTANTS
from harness.contract.admission import LEAST_ROOM, longest, longest_prompt, reserved, reserved_slots, too_long
from harness.contract.requests import GRAMMARS, RequestSpec
from harness.contract.scenario import Scenario
from harness.contract.script import Op
from harness.contract.usage import UsageError, unknown
from harness.coverage import POINTS
from harness.driving.checkpoint_files import CheckpointFiles
from harness.driving.own_pair import OwnPair
from harness.driving.refusals import first_refusal, impossible_on
from harness.engines.launch import BACKENDS, SPARSE
from harness.engines.server_args import taken
from reference.languages import unreadable

#: What a grammar's text has to be, by its key.
ALLOWED_GRAMMARS = {
    "json_schema": 'a JSON schema, for example {"type": "array", "items": {"type": "boolean"}}',
    "regex": "a regular expression, for example [a-z]+",
    "ebnf": 'rules, one of them called root, for example root ::= "yes" | "no"',
}
#: What SGLang knows a checkpoint in Mistral's own format by: these in its path, or both "eagle" and "mistral".
MISTRALS = ("mistral-large-3", "mistral-small-4", "leanstral")
MISTRAL = f"copy it to a folder whose path does not have both 'eagle' and 'mistral' in it, nor {', '.join(MISTRALS)}"
#: SGLang's own switch for contexts that are longer than a checkpoint says it was made for.
LONGER = "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"


def check_scenarios(
    scenarios: Sequence[Scenario], *, device: str, own: OwnPair | None = None, files: Sequence[Path | None] = ()
) -> None:
    """UsageError for the first scenario that no engine of this version could run. files: as for `check_possible`."""
    if why := first_refusal(scenarios, files, lambda scenario: next(_problems(scenario, device, own), "")):
        raise UsageError(why)


def _problems(scenario: Scenario, device: str, own: OwnPair | None) -> Iterator[str]:
    if why := impossible_on(scenario.engine, device=device):
        yield why
    yield from _of_engine(scenario, device, None if own is not None else RECIPES.get(scenario.checkpoint))
    if own is not None:
        yield from _of_pair(scenario, own)
    for name in scenario.wants:
        if name not in POINTS:
            yield f"wants: {unknown('coverage point', name, POINTS)}"
    if own is None and scenario.checkpoint not in RECIPES:
        yield unknown("checkpoint", scenario.checkpoint, sorted(RECIPES))
        return
    for op in scenario.script:
        if op.kind == "mutant" and op.name not in MUTANTS:
            yield unknown("mutant", str(op.name), MUTANTS)
        if op.kind == "update":
            yield from _of_update(scenario, op, own)
    vocab = own.vocab if own is not None else RECIPES[scenario.checkpoint].vocab
    whose = f"checkpoint {scenario.checkpoint!r}" if own is None else f"--target {own.target.folder}"
    for request in scenario.requests:
        yield from (f"request {request.rid!r}: {problem}" for problem in _of_request(scenario, request, vocab, whose))
    for request in scenario.requests:
        yield from (f"request {request.rid!r}: {problem}" for problem in _of_length(scenario, request))


def _of_indexer(scenario: Scenario, target: CheckpointFiles) -> Iterator[str]:
    """What a target with a sparse attention indexer wants, and how far a reference follows it."""
    engine, most = scenario.engine, target.of_text("index_topk")
    if not most:
        return
    if (engine.attention_backend, engine.page_size) != INDEXED:
        yield (
            f"--target {target.folder}: index_topk in config.json asks for a sparse attention indexer\n"
            f"  allowed:  --attention-backend {INDEXED[0]} --page-size {INDEXED[1]}"
        )
    if engine.context_length > most:
        yield (
            f"engine.context_length is {engine.context_length}, and --target {target.folder} chooses {most} rows of "
            f"longer texts, which no reference here follows\n  allowed: at most {most}:  --context-length {most}"
        )


def _of_pair(scenario: Scenario, own: OwnPair) -> Iterator[str]:
    """What the user's own pair cannot do of a scenario."""
    spec, context = scenario.spec, scenario.engine.context_length
    if spec.algorithm != own.algorithm:
        yield (
            f"spec.algorithm is {spec.algorithm!r}, and --draft {own.draft.folder} ({own.draft.architecture}) "
            f"drafts as {own.algorithm!r}\n  allowed: {own.algorithm!r}"
        )
    if spec.algorithm == "MTP" and spec.num_steps > own.layers:
        yield (
            f"spec.num_steps is {spec.num_steps}, and --draft {own.draft.folder} has {own.layers} MTP layers, "
            f"one for each step\n  allowed: 1 to {own.layers}"
        )
    yield from _of_indexer(scenario, own.target)
    for option, one in (("--target", own.target), ("--draft", own.draft)):
        if one.config.get("auto_map") and not scenario.engine.trust_remote_code:
            yield (
                f"{option} {one.folder}: auto_map in config.json names Python files of its own, which SGLang runs only "
                f"when told\n  read them, then add:  --trust-remote-code"
            )
        if _of_mistral(one.folder):
            yield (
                f"{option} {one.folder}: SGLang takes a folder of that name for Mistral's own format and looks for "
                f"params.json, which is not there\n  {MISTRAL}"
            )
    target, draft = own.target.positions, own.draft.positions
    if target is not None and context > target:
        yield (
            f"engine.context_length is {context}, and --target {own.target.folder} was made for {target} positions\n"
            f"  allowed: at most {target}:  --context-length {target}"
        )
    elif draft is not None and context > draft and not os.environ.get(LONGER):
        yield (
            f"engine.context_length is {context}, and --draft {own.draft.folder} was made for {draft} positions, "
            f"so that SGLang does not boot\n"
            f"  allowed: at most {draft}:  --context-length {draft}; or make SGLang do it:  export {LONGER}=1"
        )


def _of_mistral(folder: Path) -> bool:
    """Whether SGLang, by the words in its path, reads params.json there and would not find it."""
    name = str(folder).lower()
    named = any(one in name for one in MISTRALS) or ("eagle" in name and "mistral" in name)
    return named and not (folder / "params.json").exists()


#: Backend and page size on which SGLang serves targets with a sparse attention indexer.
INDEXED = (SPARSE, 64)
#: What of a recipe decides the shapes of its target.
SHAPES = ("vocab", "hidden", "intermediate", "layers", "heads", "kv_heads", "head_dim", "target_architecture")


#: What decides the shapes of both, with what a head reads and where.
ALL_SHAPES = (
    *(*SHAPES, "draft_architecture", "draft_hidden", "draft_vocab", "aux_layers", "draft_layers"),
    *("q_rank", "kv_rank", "nope", "value", "experts"),
)


def _of_update(scenario: Scenario, op: Op, own: OwnPair | None) -> Iterator[str]:
    name = str(op.name)
    if own is not None or scenario.engine.disaggregation:
        yield (
            "op 'update': new weights are driven with the tiny pairs, on one engine\n"
            "  allowed: no --target and --draft, and engine.disaggregation false"
        )
    elif name not in RECIPES:
        yield unknown("checkpoint", name, sorted(RECIPES))
    elif op.source == "tensor" and scenario.engine.dp_size > 1:
        yield (
            f"op 'update' from tensors, and engine.dp_size is {scenario.engine.dp_size}: SGLang refuses it "
            "(data-parallel replicas are not supported for update weights from tensor)\n  allowed: source disk"
        )
    elif op.selector == "all" and scenario.spec.algorithm == "EAGLE3":
        yield (
            "op 'update' of all, with an EAGLE-3 head: both models have tensors of one name, lm_head.weight\n"
            "  allowed: two updates, of the target and of the draft"
        )
    else:
        now = RECIPES[scenario.checkpoint]
        like = SHAPES if op.selector == "target" else ALL_SHAPES
        fits = [other for other, one in RECIPES.items() if _like(one, now, like)]
        if name not in fits:
            yield (
                f"op 'update': the {op.selector} of {name!r} has other shapes than that of {scenario.checkpoint!r}\n"
                f"  allowed: {', '.join(fits)}"
            )


def _like(one: Recipe, other: Recipe, shapes: Sequence[str]) -> bool:
    """Whether two pairs are alike in these; what one of them does not have it has not to be alike in."""
    absent = object()
    return all(getattr(one, key, absent) == getattr(other, key, absent) for key in shapes)


def _of_engine(scenario: Scenario, device: str, recipe: Recipe | None) -> Iterator[str]:
    spec, engine = scenario.spec, scenario.engine
    if engine.dp_size > 1 and recipe is not None and device not in recipe.dp_attention:
        # SGLang builds DP attention into some targets only, and an EAGLE-1 draft is no part of it and hangs
        able = ", ".join(name for name, one in RECIPES.items() if device in one.dp_attention)
        yield (
            f"engine.dp_size is {engine.dp_size}: the target of checkpoint {scenario.checkpoint!r} "
            f"is not driven under DP attention on {device}\n"
            f"  allowed: checkpoint {able}, or engine.dp_size 1"
        )
    if recipe is not None and spec.algorithm != recipe.algorithm:
        others = ", ".join(sorted(name for name, one in RECIPES.items() if one.algorithm == spec.algorithm))
        yield (
            f"spec.algorithm is {spec.algorithm!r}, checkpoint {scenario.checkpoint!r} is for {recipe.algorithm!r}\n"
            f"  allowed: {recipe.algorithm!r}, or checkpoint {others}"
        )
    if engine.attention_backend not in BACKENDS[device]:
        allowed = ", ".join(map(repr, BACKENDS[device]))
        yield f"engine.attention_backend {engine.attention_backend!r} does not run on {device}\n  allowed: {allowed}"
    if engine.chunked_prefill_size is not None and engine.chunked_prefill_size < engine.page_size:
        yield (
            f"engine.chunked_prefill_size {engine.chunked_prefill_size} "
            f"is smaller than engine.page_size {engine.page_size}: chunks are whole pages, so "
            f"prompts would wait forever\n  allowed: a chunk of {engine.page_size} or more, or smaller pages"
        )
    if engine.tp_size % engine.dp_size:
        yield (
            f"engine.tp_size is {engine.tp_size}, and engine.dp_size {engine.dp_size} does not divide it: each DP rank "
            f"has as many TP ranks as the others\n  allowed: a multiple of {engine.dp_size}"
        )
    elif engine.disaggregation and engine.tp_size > engine.dp_size > 1:
        yield (
            f"engine.tp_size is {engine.tp_size} with engine.disaggregation: a decode side of several TP ranks in each "
            f"DP rank is not driven\n  allowed: the value of engine.dp_size ({engine.dp_size}), or engine.dp_size 1"
        )
    elif recipe is not None and not _shared(recipe, engine.attention_tp_size, device):
        fit = [ranks * engine.dp_size for ranks in range(1, 9) if _shared(recipe, ranks, device)]
        yield (
            f"engine.tp_size is {engine.tp_size}: the {recipe.heads} heads and {recipe.kv_heads} key/value heads of "
            f"checkpoint {scenario.checkpoint!r} cannot be shared so on {device}\n"
            f"  allowed: {', '.join(str(size) for size in fit if size <= 8)}"
        )
    for token in spec.token_map or ():
        if recipe is None or not 0 <= token < recipe.vocab:
            yield "spec.token_map: token ids of a tiny pair's vocabulary\n  allowed: 0 to 511 on those of 512 tokens"
            break
    for name in engine.lora_paths:
        if recipe is None or recipe.target_architecture != Recipe.target_architecture:
            yield "engine.lora_paths: adapters are made for the tiny pairs with a Llama\n  allowed: leave it out"
        elif name not in ADAPTERS:
            yield unknown("adapter", name, ADAPTERS)
    yield from taken(engine.server_args)
    if device == "cpu" and engine.cuda_graph:
        yield "engine.cuda_graph is true, and there are no CUDA graphs on cpu\n  allowed: false"


def _shared(recipe: Recipe, ranks: int, device: str) -> bool:
    """Whether so many TP ranks can share a target's heads: kernels on a CPU have no key/value head on two of them."""
    return not recipe.heads % ranks and (
        not recipe.kv_heads % ranks or (device != "cpu" and not ranks % recipe.kv_heads)
    )


def _of_request(scenario: Scenario, request: RequestSpec, vocab: int, whose: str) -> Iterator[str]:
    if request.dp_rank >= scenario.engine.dp_size:
        yield f"dp_rank {request.dp_rank}\n  allowed: below {scenario.engine.dp_size}"
    named = (request.custom_params or {}).get(PARAMETER)
    listed = [one for one in named if type(one) is int] if isinstance(named, list) else []
    for what, tokens in (
        ("token id", request.input_ids),
        ("stop id", request.stop_token_ids),
        ("logit_bias: token id", map(int, request.logit_bias or {})),
        (f"custom_params.{PARAMETER}: token id", listed),
        ("token_ids_logprob: token id", request.token_ids_logprob),
    ):
        for token in tokens:
            if not 0 <= token < vocab:
                yield (
                    f"{what} {token} is outside the vocabulary of {whose}\n"
                    f"  allowed: 0 to {vocab - 1}; use smaller ids, or a checkpoint with a larger vocabulary"
                )
    if request.custom_logit_processor == "forbid" and len({*listed}) >= vocab:
        yield (
            f"custom_params.{PARAMETER} forbids all {vocab} tokens of {whose}\n  allowed: at most {vocab - 1} of them"
        )
    if wrong := unreadable(request):
        key = next(key for key in GRAMMARS if getattr(request, key) is not None)
        yield f"{key} cannot be read: {wrong}\n  allowed: {ALLOWED_GRAMMARS[key]}"


def _of_length(scenario: Scenario, request: RequestSpec) -> Iterator[str]:
    """What SGLang would refuse, cut short or give up, unless that is what the scenario expects."""
    spec, engine, prompt, new = scenario.spec, scenario.engine, len(request.input_ids), request.max_new_tokens
    asked = f"{prompt} prompt tokens and {new} new ones"
    why, pool = too_long(request, spec, engine), engine.max_total_tokens - reserved_slots(spec)
    if request.min_new_tokens > new:
        yield f"min_new_tokens {request.min_new_tokens}, and {new} fit\n  allowed: 0 to {new}, or a shorter prompt"
    if request.expect == "refusal":
        if not why and engine.max_queued_requests is None:
            yield (
                "expect is 'refusal', and nothing refuses it\n  allowed: a prompt above "
                f"{longest_prompt(spec, engine)} tokens, above {longest(spec, engine)} with its new ones, or "
                "engine.max_queued_requests"
            )
        return
    if why:
        both = min(longest(spec, engine), max(pool, 0))
        yield (
            f"{why}\n"
            f"  allowed: a prompt of at most {min(longest_prompt(spec, engine), both - 1)} tokens, with its new ones "
            f"at most {both}; or  {_larger(scenario, request)}; or expect 'refusal'"
        )
    if request.expect == "exhaustion":
        if prompt + new <= pool:
            yield f"expect is 'exhaustion', and {asked} fit the pool\n  allowed: together above {pool}"
        return
    if prompt + new > pool:
        yield (
            f"{asked} never fit engine.max_total_tokens {engine.max_total_tokens}\n"
            f"  allowed: together at most {max(pool, 0)}, a larger pool, or expect 'exhaustion'"
        )
    whole, held = (
        engine.max_total_tokens // engine.page_size * engine.page_size,
        -(-prompt // engine.page_size) * engine.page_size,
    )
    needed = held + new + engine.page_size  # the prompt takes whole pages, and SGLang keeps one
    if engine.page_size > 1 and needed > whole:  # else SGLang shortens the answer, or never lets the request in
        yield (
            f"{asked} never fit engine.max_total_tokens {engine.max_total_tokens} in pages of {engine.page_size}\n"
            f"  allowed: engine.max_total_tokens {-(-needed // engine.page_size) * engine.page_size} "
            f"or more, or smaller pages"
        )


def _larger(scenario: Scenario, request: RequestSpec) -> str:
    """Options with which the engine takes a request that is too long for it."""
    spec, engine, prompt = scenario.spec, scenario.engine, len(request.input_ids)
    new = 1 if request.unlimited else request.max_new_tokens
    context = max(prompt + new + reserved(spec), prompt + LEAST_ROOM + 1)
    pool = -(-(max(context, prompt + new + reserved_slots(spec)) + engine.page_size) // engine.page_size)
    options = [("--context-length", context, engine.context_length)]
    options += [("--max-total-tokens", pool * engine.page_size, engine.max_total_tokens)]
    return " ".join(f"{name} {needed}" for name, needed, has in options if needed > has)
