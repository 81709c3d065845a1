"""Tokenizers of the tiny pairs: a text for each id, whole words and parts of them, and the same files every time."""

import json

import pytest
from tokenizers import Tokenizer

from cases import tokenizers
from cases.boots import Boot
from cases.tokenizers import CHARACTERS, EOS, FILE, JOINED, THINK_END, tokenizer_for
from harness.contract.requests import RequestSpec
from harness.contract.scenario import Scenario
from harness.contract.script import Op
from harness.contract.settings import EngineConfig

SPELLED = {"skip_tokenizer_init": False, "grammar_backend": "xgrammar"}

SIZES = ((512, 510, 511), (320, 256, 257))


@pytest.fixture(params=SIZES, ids=str)
def made(request, tmp_path):
    vocab, bos, eos = request.param
    return vocab, eos, tokenizers.make(vocab=vocab, bos=bos, eos=eos, root=tmp_path)


def test_every_id_has_a_text_of_its_own(made):
    vocab, eos, folder = made
    own = Tokenizer.from_file(str(folder / FILE))
    texts = [own.decode([token], skip_special_tokens=False) for token in range(vocab)]
    assert len(set(texts)) == vocab
    assert texts[eos] == EOS
    assert "" not in texts


def test_any_text_comes_back_from_the_tokens_it_is_spelled_with(made):
    own = Tokenizer.from_file(str(made[2] / FILE))
    for text in (CHARACTERS, '{"a": [true, null], "b":"12"}', "  \n\n x"):
        assert own.decode(own.encode(text).ids) == text


def test_texts_of_several_characters_are_one_token_and_have_another_spelling(made):
    own = Tokenizer.from_file(str(made[2] / FILE))
    for text in JOINED:
        assert len(own.encode(text).ids) == 1
        assert own.decode([own.token_to_id(one.replace(" ", "Ġ")) for one in text]) == text
    assert own.encode(f"a{THINK_END}b").tokens == ["a", THINK_END, "b"]


def test_it_is_made_once_and_the_same_everywhere(tmp_path):
    one, other = (tokenizers.make(vocab=512, bos=510, eos=511, root=tmp_path / name) for name in "ab")
    assert tokenizers.make(vocab=512, bos=510, eos=511, root=tmp_path / "a") == one
    for name in (FILE, "tokenizer_config.json"):
        assert (one / name).read_bytes() == (other / name).read_bytes()
        json.loads((one / name).read_text())


def test_an_engine_gets_the_targets_own_tokenizer_or_one_made_for_it_or_none(tmp_path, monkeypatch):
    monkeypatch.setenv("EAGLECHECK_HOME", str(tmp_path / "home"))
    target = tmp_path / "target"
    target.mkdir()
    (target / "config.json").write_text('{"vocab_size": 320, "bos_token_id": 256, "eos_token_id": 257}')
    plain, spelled = (Boot(name="x", why="", engine=EngineConfig(skip_tokenizer_init=one)) for one in (True, False))
    assert tokenizer_for(scenario_on(plain), target) is None
    assert tokenizer_for(scenario_on(spelled), target) == tmp_path / "home" / "checkpoints" / "tokenizer-320-256-257"
    (target / "tokenizer.model").write_text("")
    assert tokenizer_for(scenario_on(spelled), target) is None
    (target / FILE).write_text("{}")
    assert tokenizer_for(scenario_on(spelled), target) == target


def scenario_on(boot):
    return Scenario(
        name="x",
        engine=boot.engine,
        requests=(RequestSpec(rid="a", input_ids=(1,)),),
        script=(Op(kind="submit", rids=("a",)), Op(kind="drain")),
    )


@pytest.mark.parametrize(
    ("keys", "engine", "needs"),
    [
        ({"stop": ("a",)}, {}, "engine.skip_tokenizer_init false"),
        ({"regex": "a"}, {"skip_tokenizer_init": False}, "engine.grammar_backend"),
        ({"regex": "a", "require_reasoning": True}, SPELLED, "engine.reasoning_parser"),
    ],
)
def test_what_a_text_needs_of_its_engine_is_said(keys, engine, needs):
    with pytest.raises(ValueError, match=needs):
        Scenario(
            name="x",
            engine=EngineConfig(**engine),
            requests=(RequestSpec(rid="a", input_ids=(1,), **keys),),
            script=(Op(kind="submit", rids=("a",)), Op(kind="drain")),
        )
