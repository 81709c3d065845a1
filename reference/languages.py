"""Which tokens a grammar allows after a text: a second opinion on a request's regex, json_schema or ebnf.

By llguidance, which shares no code with the engine's library. A token is allowed where the text and it begin some text
of the language; a token that ends the request, only where the text is whole. Where the two libraries read a source
differently by design there is no second opinion (`why_not`). This module must not know what an engine allows.

Shapes: V vocabulary.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.contract.requests import ANY_JSON, GRAMMARS, RequestSpec
from reference.spelling import Spelling

if TYPE_CHECKING:
    from llguidance import LLMatcher

#: Words of JSON Schema that both libraries take for the same texts (compared over random texts, see docs/grammar.md).
SCHEMA_WORDS = frozenset(("properties", "required", "items", "minItems", "maxItems", "enum", "const", "anyOf", "type"))
TYPES = ("object", "array", "string", "number", "boolean", "null")


class NoLanguageError(Exception):
    """There is no second opinion on a grammar; says why."""


class Language:
    """The language of one request's output, over a tokenizer. ends: the tokens that end the request.

    begins: the token behind which the language begins, for a request that reasons first; None: at once.
    """

    def __init__(
        self, request: RequestSpec, spelling: Spelling, *, vocab: int, ends: Sequence[int], begins: int | None = None
    ) -> None:
        if why := why_not(request):
            raise NoLanguageError(why)
        try:  # a machine that drives no grammar need not have it
            from llguidance import LLMatcher, LLTokenizer
        except ImportError as error:
            raise NoLanguageError("llguidance is not installed") from error
        content = spelling.plain(ends)
        tokens = LLTokenizer(content, n_vocab=vocab, eos_token=list(ends), slices=[])
        self._start = LLMatcher(tokens, _grammar(request))
        if wrong := self._start.get_error():
            raise NoLanguageError(f"llguidance does not read its grammar: {wrong.splitlines()[0]}")
        self._vocab, self._ends, self._begins = vocab, frozenset(ends), begins
        self._escapes = _Escapes(spelling, vocab) if request.json_schema is not None else None
        self.unspelled = tuple(sorted({*spelling.added} - self._ends)) if content == spelling.content else ()

    def allowed(self, output: Sequence[int]) -> np.ndarray | None:
        """bool [V] behind an output; None where it says nothing: no text of the language, a whole one, or none yet."""
        if self._begins is not None:
            if self._begins not in output:
                return None
            output = output[list(output).index(self._begins) + 1 :]
        if self._ends & set(output):
            return None
        matcher, read = self._start.deep_copy(), list(output) if self._escapes is None else self._escapes.read(output)
        if read and matcher.try_consume_tokens(read) < len(read):
            return None
        if matcher.compute_ff_bytes():  # its mask would leave one token of those that spell what must follow
            found = np.array([matcher.validate_tokens([token]) == 1 for token in range(self._vocab)])
        else:
            found = self._mask(matcher)
        if self._escapes is not None:
            self._escapes.correct(found, output, start=self._start, behind=matcher)
        found[list(self._ends)] = matcher.is_accepting()
        return found

    def _mask(self, matcher: LLMatcher) -> np.ndarray:
        from llguidance import numpy as bitmasks

        bits = bitmasks.allocate_token_bitmask(1, self._vocab)
        bitmasks.fill_next_token_bitmask(matcher, bits, 0)
        found: np.ndarray = np.unpackbits(bits.view(np.uint8), bitorder="little")[: self._vocab].astype(bool)
        return found


#: Of a JSON string: an escape that llguidance does not know, one that is only begun, and any other.
ESCAPE = re.compile(r"\\(?:/|u[0-9a-fA-F]{4}|(?:u[0-9a-fA-F]{0,3})?$|(.))", re.DOTALL)
BEGUN = re.compile(r"(?<!\\)(?:\\\\)*\\(?:u[0-9a-fA-F]{0,3})?$")


class _Escapes:
    r"""JSON allows `\/` and every `\u` with four digits (RFC 8259, section 7), and llguidance does not.

    `\b` stands for each, whole or begun, in what it is asked.
    """

    def __init__(self, spelling: Spelling, vocab: int) -> None:
        self._spelling, self._texts = spelling, [spelling.text([token]) for token in range(vocab)]
        self._escaping = [token for token, text in enumerate(self._texts) if "\\" in text]

    def read(self, output: Sequence[int]) -> list[int]:
        text = self._spelling.text(output)
        return self._spelling.ids(_known(text)) if "\\" in text else list(output)

    def correct(self, found: np.ndarray, output: Sequence[int], *, start: LLMatcher, behind: LLMatcher) -> None:
        """found [V]: what is allowed behind an output; start and behind: before and after it."""
        text = self._spelling.text(output)
        begun = BEGUN.search(text) is not None
        matcher, before = (start, text) if begun else (behind, "")
        for token in range(len(self._texts)) if begun else self._escaping:
            asked = self._spelling.ids(_known(before + self._texts[token]))
            found[token] = matcher.validate_tokens(asked) == len(asked)


def _known(text: str) -> str:
    return ESCAPE.sub(lambda found: found[0] if found[1] else r"\b", text)


def _grammar(request: RequestSpec) -> str:
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import gbnf_to_lark

    if request.regex is not None:
        return LLMatcher.grammar_from_regex(request.regex)
    if request.json_schema is not None:
        return LLMatcher.grammar_from_json_schema(request.json_schema, overrides={"whitespace_flexible": True})
    assert request.ebnf is not None
    return LLMatcher.grammar_from_lark(gbnf_to_lark(request.ebnf))


#: Schemas without a word that llguidance could read.
ANYTHING = (ANY_JSON, "true", "false")
#: What llguidance says of a grammar that it understands and has no code for: another library may have some.
NOT_ITS_OWN = re.compile(r"not supported|unimplemented|unknown format", re.IGNORECASE)


def unreadable(request: RequestSpec) -> str:
    """Why llguidance cannot read a request's grammar, in its own words; empty where it can, or only lacks code."""
    if all(getattr(request, key) is None for key in GRAMMARS) or request.json_schema in ANYTHING:
        return ""
    try:
        from llguidance import LLMatcher

        said = LLMatcher.validate_grammar(_grammar(request))
    except ImportError:
        return ""
    except Exception as error:  # the parser of ebnf raises plain ones
        said = str(error)
    lines = said.strip().splitlines()
    wrong = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), "".join(lines[:1]))
    return "" if NOT_ITS_OWN.search(wrong) else wrong


def why_not(request: RequestSpec) -> str:
    """Why there is no second opinion on a request's grammar; empty where there is one."""
    if request.regex is not None:
        dot = re.search(r"(?<!\\)\.", re.sub(r"\\.|\[[^]]*\]", "", request.regex))
        return "a dot of a regex means a line break too, or does not" if dot else ""
    if request.json_schema is None:
        return ""
    try:
        return next(_differs(json.loads(request.json_schema)), "")
    except ValueError:
        return "its JSON schema is no JSON"


def _differs(schema: Any) -> Iterator[str]:
    """What of a schema implementations read differently."""
    if not isinstance(schema, Mapping):
        yield "a part of its JSON schema is no object"
        return
    kind, words = schema.get("type"), set(schema)
    if kind == "object" and schema.get("additionalProperties") is not False:
        yield "its JSON schema does not say additionalProperties false"
    if kind == "integer" and not schema.get("minimum", -1) >= 0:
        yield "of -0 it is not agreed whether it is an integer"
    if kind not in (*TYPES, "integer", None):
        yield f"its JSON schema says type {kind!r}"
    further = {"object": {"additionalProperties"}, "integer": {"minimum", "maximum"}}.get(str(kind), set())
    for word in sorted(words - SCHEMA_WORDS - further):
        yield f"its JSON schema says {word}"
    if not words & {"type", "enum", "const", "anyOf"}:
        yield "a part of its JSON schema says no type"
    inner = [*schema.get("properties", {}).values(), *schema.get("anyOf", ())]
    for one in [*inner, schema["items"]] if "items" in schema else inner:
        yield from _differs(one)
