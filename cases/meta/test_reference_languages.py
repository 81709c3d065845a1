"""Second opinions on grammars against what decides the same question by another way, and what has none."""

import json
import random

import numpy as np
import pytest
import regex

from cases import tokenizers
from harness.contract.requests import RequestSpec
from reference.languages import Language, NoLanguageError
from reference.spelling import Spelling

VOCAB, BOS, EOS = 512, 510, 511
NUMBER = r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?"
STRING = r'"([^"\\\x00-\x1f]|\\(["\\/bfnrt]|u[0-9a-fA-F]{4}))*"'
SPACE = r"[ \n]*"


@pytest.fixture(scope="module")
def spelling(tmp_path_factory):
    return Spelling(tokenizers.make(vocab=VOCAB, bos=BOS, eos=EOS, root=tmp_path_factory.mktemp("tokenizers")))


def asked(**keys):
    return RequestSpec(rid="a", input_ids=(1,), **keys)


def language(spelling, **keys):
    return Language(asked(**keys), spelling, vocab=VOCAB, ends=(EOS,))


#: What is asked, and the same language as a pattern of Python's `regex`.
SAME = {
    "letters": ({"regex": "[a-z]{2,5}"}, "[a-z]{2,5}"),
    "groups": ({"regex": "(ab|a[0-9]{1,3})+x"}, "(ab|a[0-9]{1,3})+x"),
    "classes": ({"regex": r"\d{3}-\d{2}"}, "[0-9]{3}-[0-9]{2}"),
    "negated": ({"regex": "[^0-9]{3,12}"}, r"[^0-9]{3,12}"),
    "array": (
        {"json_schema": json.dumps({"type": "array", "items": {"enum": ["one", None]}, "minItems": 1, "maxItems": 2})},
        rf'\[{SPACE}("one"|null)({SPACE},{SPACE}("one"|null))?{SPACE}\]',
    ),
    "boolean": ({"json_schema": '{"type": "boolean"}'}, "true|false"),
    "number": ({"json_schema": '{"type": "number"}'}, NUMBER),
    "string": ({"json_schema": '{"type": "string"}'}, STRING),
    "ebnf": ({"ebnf": 'root ::= term (("+" | "-") term)*\nterm ::= [0-9]+ | "x"'}, r"([0-9]+|x)([+-]([0-9]+|x))*"),
}


@pytest.mark.parametrize(("keys", "pattern"), SAME.values(), ids=SAME)
def test_allowed_are_the_tokens_with_which_a_text_still_begins_one_of_the_language(spelling, keys, pattern):
    own, rng = language(spelling, **keys), random.Random(5)
    texts, plain = [spelling.text([token]) for token in range(VOCAB)], set(range(VOCAB)) - {*own.unspelled, EOS}
    for _ in range(12):
        output: list[int] = []
        for _ in range(12):
            text = spelling.text(output)
            expected = {one for one in plain if regex.fullmatch(pattern, text + texts[one], partial=True)}
            found = own.allowed(output)
            assert set(np.flatnonzero(found)) - {EOS} == expected, text
            assert found[EOS] == bool(regex.fullmatch(pattern, text)), text
            if not expected:
                break
            output.append(rng.choice(sorted(expected)))


@pytest.mark.parametrize("text", ['"a\\', '"\\\\', '"a\\/', '"\\/\\', '"\\u', '"\\u1', '"\\u12af', "", '"'])
def test_a_slash_may_be_escaped_in_json_and_special_tokens_are_their_text(spelling, text):
    own = language(spelling, json_schema='{"type": "string"}')
    assert own.unspelled == ()
    texts = [spelling.text([token]) for token in range(VOCAB - 1)]
    found = own.allowed([spelling.one(character) for character in text])
    assert [bool(one) for one in found[:-1]] == [
        bool(regex.fullmatch(STRING, text + one, partial=True)) for one in texts
    ]


def test_it_says_nothing_outside_the_language_behind_its_end_and_before_thoughts_end(spelling):
    own = language(spelling, regex="[0-9]")
    digit, letter = (spelling.one(text) for text in "3a")
    assert own.allowed([letter]) is None
    assert own.allowed([digit, EOS]) is None
    assert np.flatnonzero(own.allowed([digit])).tolist() == [EOS]
    end = spelling.one("</think>")
    behind = Language(asked(regex="[0-9]"), spelling, vocab=VOCAB, ends=(EOS,), begins=end)
    assert behind.allowed([letter]) is None
    assert (behind.allowed([letter, end]) == own.allowed([])).all()


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"regex": "a.b"}, "line break"),
        ({"json_schema": '{"type": "object"}'}, "additionalProperties"),
        ({"json_schema": '{"type": "integer"}'}, "-0"),
        ({"json_schema": '{"type": "string", "maxLength": 3}'}, "maxLength"),
        ({"json_schema": '{"anyOf": [{"type": "array", "items": {}}]}'}, "no type"),
        ({"json_schema": "$$ANY$$"}, "no JSON"),
        ({"regex": "(a"}, "does not read"),
    ],
)
def test_what_libraries_read_differently_has_no_second_opinion(spelling, keys, why):
    with pytest.raises(NoLanguageError, match=why):
        language(spelling, **keys)


def test_a_text_stops_with_the_first_token_after_which_it_holds_a_string_or_matches(spelling):
    tokens = [spelling.one(text) for text in ("ea", "t", "0", "12", "}", "0")]
    assert spelling.text(tokens) == "eat012}0"
    found = spelling.stop(asked(stop=("t01", "}")), tokens)
    assert (found.length, found.matched, found.at) == (4, ("t01",), (2, 5))
    assert spelling.stop(asked(stop_regex=("[0-9]{3}$",)), tokens).length == 4
    assert spelling.stop(asked(stop=("te",)), tokens) is None
    assert spelling.stop(asked(), tokens) is None


@pytest.mark.parametrize(("kept", "text"), [(False, "eat0"), (True, "eat012")])
def test_a_stop_token_is_cut_off_the_answer_unless_it_is_to_stay(spelling, kept, text):
    output = [spelling.one(one) for one in ("ea", "t", "0", "12")]
    assert spelling.answered(asked(no_stop_trim=kept), output, None, ends=(output[-1],)) == text


@pytest.mark.parametrize(("kept", "text"), [(False, "ea"), (True, "eat01")])
def test_a_stop_string_is_cut_off_the_answer_unless_it_is_to_stay(spelling, kept, text):
    request = asked(stop=("t01",), no_stop_trim=kept)
    output = [spelling.one(one) for one in ("ea", "t", "0", "12")]
    assert spelling.answered(request, output, spelling.stop(request, output)) == text
