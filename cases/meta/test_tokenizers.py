"""Tokenizers of the tiny pairs: a text for each id, whole words and parts of them, and the same files every time."""

import json

import pytest
from tokenizers import Tokenizer

from cases import tokenizers
from cases.tokenizers import CHARACTERS, EOS, FILE, JOINED, THINK_END

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
