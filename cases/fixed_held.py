"""Fixed scenarios of requests that are texts: grammars, thoughts before them, stop strings and patterns.

Prompts and strings were chosen by what the tiny pairs go on with, each of CPUs and of cards its own: strings lie inside
accepted runs and over the ends of tokens. Pure data; it must not import torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from cases.boots import BY_NAME, Boot
from cases.fixed import DRAIN, submit
from harness.contract.requests import RequestSpec
from harness.contract.scenario import Scenario

_ARRAY = {"type": "array", "items": {"enum": ["one", "two", None]}, "minItems": 2, "maxItems": 4}
_OBJECT = {
    "type": "object",
    "properties": {"a": {"type": "string"}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
_SUMS = 'root ::= expr\nexpr ::= term (("+" | "-") term)*\nterm ::= [0-9]+ | "(" expr ")"'
#: rid -> (prompt, most tokens, what it asks for).
Asked = dict[str, tuple[tuple[int, ...], int, dict[str, Any]]]

GRAMMARS: Asked = {
    "regex": ((5, 17, 130, 42, 9, 77), 24, {"regex": "([a-z]|[0-9])+[.;]"}),
    "array": ((301, 12, 8), 40, {"json_schema": json.dumps(_ARRAY)}),
    "object": ((33, 250), 32, {"json_schema": json.dumps(_OBJECT)}),
    "ebnf": ((44, 45, 46, 47), 24, {"ebnf": _SUMS}),
    "drawn": ((7, 7, 7, 7), 24, {"regex": "[a-z0-9]{6,40}!", "temperature": 0.9}),
    "free": ((80, 81, 82), 16, {}),
}
STRINGS: Asked = {
    "one": ((1, 2, 3, 4), 24, {"stop": ["0"]}),
    "kept": ((1, 2, 3, 4), 24, {"stop": ["404"], "no_stop_trim": True}),
    "pattern": ((80, 81, 82), 24, {"stop_regex": ["[0-9]{4}", "[0-9]M[0-9]"]}),
    "inside": ((7, 7, 7, 7), 24, {"stop": ["76", "[]", "never"]}),
    "never": ((33, 250), 12, {"stop": ["zzz"]}),
    "last": ((1, 2, 3, 4), 8, {"stop": ["ert"]}),
}
#: Behind the first prompt the pair of CPUs says soon that its thoughts end, behind the second that of cards.
THOUGHTS: Asked = {
    "thinks": ((33, 250), 40, {"regex": "[a-z]{4,30}", "require_reasoning": True}),
    "thinks-too": ((498, 110), 40, {"regex": "[a-z]{4,30}", "require_reasoning": True}),
    "at-once": ((33, 250), 24, {"regex": "[a-z0-9]{4,30}"}),
    "free": ((80, 81, 82), 24, {}),
}


def _together(name: str, boot: Boot, asked: Asked, *wants: str) -> Scenario:
    requests = tuple(
        RequestSpec(rid=rid, input_ids=prompt, max_new_tokens=new, **keys) for rid, (prompt, new, keys) in asked.items()
    )
    return Scenario(name=name, **boot.given, requests=requests, script=(submit(*asked), DRAIN), wants=wants)


def held_texts() -> Iterator[Scenario]:
    """Every kind of grammar and of stop string, over chains and trees; thoughts over the chain."""
    for name, prefix in (("texts", ""), ("texts-tree", "tree-")):
        boot = BY_NAME[name]
        wants = ("first_token_by_grammar", "draft_off_grammar", "constrained_beside_free", "grammar_ends_text")
        yield _together(f"{prefix}grammars", boot, GRAMMARS, *wants)
        ended = () if prefix else ("stop_string_inside_run", "ended_by_stop_regex")
        yield _together(f"{prefix}strings", boot, STRINGS, *ended)
    yield _together("thoughts", BY_NAME["texts-thoughts"], THOUGHTS, "grammar_after_thoughts")
