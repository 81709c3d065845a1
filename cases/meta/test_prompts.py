"""Scenarios from a file of prompts: what is read, how it is tokenized, when requests arrive."""

from __future__ import annotations

import json

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from cases import prompts
from cases.boots import BY_NAME
from cases.fixed import CHAIN
from cases.generation import generate
from harness.contract.usage import UsageError

WORDS = ["<unk>", "one", "two", "three", "[user]", "[assistant]"]
TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }} {% endfor %}[assistant]"


@pytest.fixture
def folder(tmp_path):
    """folder(chat): a folder with a tokenizer of six words."""

    def make(chat=TEMPLATE):
        place = tmp_path / "checkpoint"
        made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
        made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        PreTrainedTokenizerFast(tokenizer_object=made, chat_template=chat).save_pretrained(place)
        return place

    return make


def written(tmp_path, text, name="prompts.txt"):
    file = tmp_path / name
    file.write_text(text)
    return file


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("one\ntwo three\n", ["one", "two three"]),
        ("one\ntwo\n\nthree\n", ["one\ntwo", "three"]),
        ("\n\none\n", ["one"]),
        ('{"prompt": "one"}\n\n{"text": "two"}\n', ["one", "two"]),
        ('{"messages": [{"role": "user", "content": "two"}]}', [[{"role": "user", "content": "two"}]]),
    ],
)
def test_a_prompt_a_line_a_paragraph_or_an_object(tmp_path, text, found):
    assert prompts.read_prompts(written(tmp_path, text)) == found


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("\n \n", "holds no prompt"),
        ('{"prompt": "one"}\n{"promt": "two"}', "line 2 has no prompt"),
        ('{"prompt": "one"}\n{', "line 2 is not JSON"),
        ('{"messages": []}', "line 1 has no prompt"),
        ('{"prompt": 3}', "line 1 has no prompt"),
    ],
)
def test_what_is_no_prompt_is_refused(tmp_path, text, said):
    with pytest.raises(UsageError, match=said):
        prompts.read_prompts(written(tmp_path, text))


def test_messages_go_through_the_chat_template(folder):
    encode = prompts.tokenizer(folder(), trust_remote_code=False)
    said = [{"role": "user", "content": "two"}]
    assert prompts.tokenized(["one three", said], encode) == [(1, 3), (4, 2, 5)]


def test_without_a_template_or_a_tokenizer_it_says_what_to_do(folder, tmp_path):
    encode = prompts.tokenizer(folder(chat=None), trust_remote_code=False)
    with pytest.raises(UsageError, match="no chat template"):
        encode([{"role": "user", "content": "two"}])
    with pytest.raises(UsageError, match="prompt 2 has no token"):
        prompts.tokenized(["one", ""], encode)
    with pytest.raises(UsageError, match="has no tokenizer"):
        prompts.tokenizer(tmp_path, trust_remote_code=False)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(UsageError, match="cannot be loaded"):
        prompts.tokenizer(tmp_path, trust_remote_code=False)


def scenario(count=40, rate=1.0, seed=0, length=3, **engine):
    return prompts.scenario_of(
        [(1,) * length] * count, name="p", spec=CHAIN, engine=engine, rate=rate, new_tokens=8, seed=seed
    )


def arrivals(made):
    """step -> how many arrive there."""
    step, found = 0, {}
    for op in made.script:
        step += op.count if op.kind == "step" else 0
        if op.kind == "submit":
            found[step] = len(op.rids)
    return found


def test_arrivals_are_decided_by_the_seed_and_as_many_as_asked_for():
    assert scenario().id == scenario().id
    assert arrivals(scenario(seed=1)) != arrivals(scenario())
    for rate in (0.1, 1.0, 4.0):
        came = arrivals(scenario(count=400, rate=rate))
        assert sum(came.values()) == 400
        assert 400 / max(came) == pytest.approx(rate, rel=0.2)
    assert min(arrivals(scenario())) == 0


def test_context_and_pool_are_as_large_as_the_prompts_need():
    small, large = scenario().engine, scenario(length=32000, count=3).engine
    assert (small.context_length, small.max_total_tokens) == (512, 4096)
    assert large.context_length >= 32000 + 8 + 3
    assert large.max_total_tokens >= 3 * (32000 + 8)
    assert scenario(length=32000, context_length=40000).engine.context_length == 40000


def test_generated_scenarios_over_text_keep_their_lengths_and_shared_prefixes():
    texts = [tuple(range(100, 160)), tuple(range(200, 290))]
    shared = 0
    for one in generate(BY_NAME["plain"], count=30, seed=3):
        made = prompts.with_prompts(one, texts, seed=3)
        assert [len(request.input_ids) for request in made.requests] == [len(each.input_ids) for each in one.requests]
        assert all(token >= 100 for request in made.requests for token in request.input_ids)
        for at, later in enumerate(one.requests):
            for place, before in enumerate(one.requests[:at]):
                common = prompts._shared(before.input_ids, later.input_ids)
                now = made.requests[place].input_ids, made.requests[at].input_ids
                if common > 3:
                    shared += 1
                    best = max(prompts._shared(other.input_ids, later.input_ids) for other in one.requests[:at])
                    assert prompts._shared(*now) >= common or common < best
    assert shared
    assert prompts.with_prompts(one, texts, seed=3) == prompts.with_prompts(one, texts, seed=3)


def test_json_lines_are_known_by_their_name_too(tmp_path):
    with pytest.raises(UsageError, match="line 1"):
        prompts.read_prompts(written(tmp_path, "one\n", name="prompts.jsonl"))
    assert prompts.read_prompts(written(tmp_path, json.dumps({"prompt": "a"}), name="b.jsonl")) == ["a"]
