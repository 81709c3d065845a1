"""Templates of requests that are texts: held to a grammar, thinking before it, or ended by strings and patterns."""

from __future__ import annotations

import json
from random import Random
from typing import Any

from cases.boots import Boot
from cases.builder import Builder, Opening, template
from harness.contract.requests import RequestSpec

#: Much of a tiny pair's vocabulary is two or three of these letters, or two digits.
LETTERS, DIGITS = "[a-z]", "[0-9]"


def schema_of(random: Random, depth: int = 2) -> dict[str, Any]:
    """A small JSON schema in the words that have a second opinion."""
    leaf = ({"type": "boolean"}, {"type": "number"}, {"enum": ["one", "two", None]}, {"type": "string"})
    kind = random.choice(("array", "object", "anyOf")) if depth else ""
    if kind == "array":
        least = random.randint(0, 2)
        return {"type": kind, "items": schema_of(random, depth - 1), "minItems": least, "maxItems": least + 2}
    if kind == "object":
        names = random.sample(("a", "b", "to", "1"), 2)
        own = {name: schema_of(random, depth - 1) for name in names}
        return {"type": kind, "properties": own, "required": names, "additionalProperties": False}
    if kind == "anyOf":
        return {"anyOf": [schema_of(random, 0), {"type": "null"}]}
    return dict(random.choice(leaf))


def grammar_of(key: str, random: Random) -> str:
    """A grammar that leaves the draft a chance: some allow most of the vocabulary, some end soon."""
    if key == "json_schema":
        return json.dumps(schema_of(random))
    least = random.choice((1, 3, 8))
    if key == "regex":
        letters = random.choice((LETTERS, f"({LETTERS}|{DIGITS})", "[^0-9]", "[a-z ,]", f"({DIGITS}{{2}}|[a-n])"))
        most, end = least + random.choice((2, 20, 60)), random.choice(("", "[;!]", "e?", "(ok|no)"))
        return f"{letters}{{{least},{most}}}{end}"
    inner = random.choice(("[a-z]+", "[0-9]+", '[a-z0-9]+ | "(" root ")"'))
    return f'root ::= item ("{random.choice(("+", ", ", "e"))}" item)*\nitem ::= {inner}'


def held(request: RequestSpec, key: str, random: Random) -> RequestSpec:
    more: dict[str, Any] = {key: grammar_of(key, random), "temperature": random.choice((0.0, 0.0, 0.7, 1.2))}
    return RequestSpec.model_validate(request.model_dump(exclude_defaults=True) | more)


def stopped(request: RequestSpec, random: Random) -> RequestSpec:
    """A short string soon occurs in a text of short tokens."""
    strings = random.sample(("e", "ta", "0", "1", "oe", "st", "ee", "4", "never", "},"), random.randint(1, 2))
    patterns = random.sample(("[0-9]{3}", "[aeo]{3}", "t[a-z]t", "[^a-z0-9]"), random.randint(0, 1))
    more = {"stop": strings, "stop_regex": patterns, "no_stop_trim": random.choice((True, False))}
    return RequestSpec.model_validate(request.model_dump(exclude_defaults=True) | more)


def perhaps_held(request: RequestSpec, random: Random) -> RequestSpec:
    """A third as they are, a third with a grammar, a third with stop strings; those with stop ids perhaps not soon."""
    if request.stop_token_ids:
        least = random.randint(0, min(6, request.max_new_tokens))
        return request.model_copy(update={"min_new_tokens": least})
    chosen = random.choice(("", "regex", "json_schema", "ebnf", "stop", "stop"))
    if chosen == "stop":
        return stopped(request, random)
    return held(request, chosen, random) if chosen else request


def _spelled(boot: Boot) -> bool:
    return boot.spelled


def _thinks(boot: Boot) -> bool:
    return boot.spelled and boot.engine.reasoning_parser is not None


def _beside(builder: Builder, key: str, *, new: int | None = None, **more: Any) -> Opening:
    """A request with a grammar, and a plain one that arrives with it."""
    asked = held(
        builder.request(builder.prompt(builder.length(1, 40)), new=new or builder.long_run()), key, builder.random
    )
    builder.timeline.arrive(0, asked.model_copy(update=more))
    builder.arrive(0, builder.length(1, 40), new=builder.long_run())
    return Opening(calm=4, protected=("r0", "r1"))


def _by(key: str) -> None:
    def build(builder: Builder) -> Opening:
        return _beside(builder, key)

    build.__name__ = f"verify_by_{key}"
    template(fits=_spelled, certain=False, texts=True)(build)


for _key in ("json_schema", "regex", "ebnf"):
    _by(_key)


@template(fits=_spelled, texts=True)
def first_token_by_grammar(builder: Builder) -> Opening:
    return _beside(builder, builder.random.choice(("json_schema", "regex", "ebnf")))


@template(fits=_spelled, certain=False, texts=True)
def draft_off_grammar(builder: Builder) -> Opening:
    """JSON allows little of what a draft proposes."""
    return _beside(builder, "json_schema")


@template(fits=_spelled, certain=False, texts=True)
def draft_kept_by_grammar(builder: Builder) -> Opening:
    return _beside(builder, "regex", regex="([a-z]|[0-9])+[;]", temperature=0.0)


@template(fits=_spelled, certain=False, texts=True)
def constrained_beside_free(builder: Builder) -> Opening:
    return _beside(builder, "regex", new=builder.long_run())


@template(fits=_spelled, certain=False, texts=True)
def constrained_after_retraction(builder: Builder) -> Opening:
    opening = _beside(builder, "regex", regex="([a-z]|[0-9]){40,80}")
    builder.timeline.at(opening.calm + 6, "retract")
    return opening


@template(fits=_spelled, certain=False, texts=True)
def grammar_ends_text(builder: Builder) -> Opening:
    """A text that is whole after a few tokens; then only EOS may follow."""
    return _beside(builder, "regex", regex=f"[a-z]{{1,{builder.integer(2, 8)}}}")


@template(fits=_spelled, texts=True)
def verify_by_min_new_tokens(builder: Builder) -> Opening:
    """A request that would soon stop."""
    asked = builder.request(builder.prompt(builder.length(1, 40)), new=builder.long_run())
    kept = {"stop_token_ids": builder.stop_ids(), "min_new_tokens": builder.integer(2, 12)}
    builder.timeline.arrive(0, asked.model_copy(update={**kept, "temperature": builder.random.choice((0.0, 0.8))}))
    return Opening(calm=4, protected=("r0",), events=False)


@template(fits=_thinks, certain=False, texts=True)
def grammar_after_thoughts(builder: Builder) -> Opening:
    """A prompt behind which the pair soon says that its thoughts end (see cases.tokenizers)."""
    asked = held(builder.request((33, 250), new=64), "regex", builder.random)
    builder.timeline.arrive(0, asked.model_copy(update={"require_reasoning": True, "temperature": 1.0}))
    builder.arrive(0, builder.length(1, 40), new=builder.long_run())
    return Opening(calm=4, protected=("r0", "r1"))


@template(fits=_spelled, certain=False, texts=True)
def ended_by_stop_regex(builder: Builder) -> Opening:
    """Patterns that much of the vocabulary matches, alone in their requests."""
    for pattern in builder.random.sample(("[0-9]{3}", "[aeo]{3}", "t[a-z]t", "[a-z]{6}", "[0-9][a-z][0-9]"), 2):
        asked = {"stop_regex": (pattern,), "no_stop_trim": builder.chance()}
        builder.timeline.arrive(
            0, builder.request(builder.prompt(builder.length(1, 40)), new=builder.long_run()).model_copy(update=asked)
        )
    return Opening(calm=4, protected=("r0", "r1"))


@template(fits=_spelled, certain=False, texts=True)
def stop_string_inside_run(builder: Builder) -> Opening:
    for _ in range(2):
        builder.timeline.arrive(
            0, stopped(builder.request(builder.prompt(builder.length(1, 40)), new=builder.long_run()), builder.random)
        )
    return Opening(calm=4, protected=("r0", "r1"))
