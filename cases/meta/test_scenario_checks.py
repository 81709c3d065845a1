"""Requests that SGLang would refuse, give up on or read otherwise are refused before an engine boots."""

from __future__ import annotations

import json

import pytest
import typer

from cases import catalogue
from cases.catalogue import CaseError, read_scenario
from cases.meta import handmade, pretended_engine, results
from cases.meta.command_line import call
from harness.cli.main import app
from harness.cli.scenario_checks import check_scenarios
from harness.contract.usage import UsageError

TEXTS = {"skip_tokenizer_init": False, "grammar_backend": "xgrammar"}
PROCESSORS = {"enable_custom_logit_processor": True}


def processor(name, tokens):
    return {"custom_logit_processor": name, "custom_params": {"token_ids": tokens}}


def checked(folder, keys, engine, *more, script=None):
    """Reads a file of one request with these keys, and others, as `eaglecheck run` does before it boots."""
    requests = [{"rid": "a", "input_ids": [1, 2, 3]} | keys, *more]
    content = {
        "schema_version": 2,
        "name": "own",
        "engine": engine,
        "requests": requests,
        "script": script or [{"kind": "submit", "rids": [one["rid"] for one in requests]}, {"kind": "drain"}],
    }
    path = folder / "own.json"
    path.write_text(json.dumps(content))
    check_scenarios([read_scenario(path)], device="cpu", files=[path])


#: The keys of a request, what its engine has, and what the message says.
REFUSED = {
    "bias-no-id": ({"logit_bias": {"a": 1.0}}, {}, ("logit_bias: key 'a' is no token id", "allowed: token ids")),
    "bias-negative": ({"logit_bias": {"-1": 1.0}}, {}, ("key '-1' is no token id",)),
    "bias-huge": (
        {"logit_bias": {"7": 1e308}},
        {},
        ("logit_bias.7: found 1e+308", "allowed: a number from -1000000000 to 100; at 100 nothing else"),
    ),
    "params-of-a-server": (
        {"sampling_params": {"top_k": 2}},
        {},
        ("unknown key 'sampling_params'; what is in it stands in the request itself",),
    ),
    "params-misspelt": ({"sampling_parms": {}}, {}, ("unknown key 'sampling_parms'; what is in it stands",)),
    "openais-name": ({"max_tokens": 4}, {}, ("unknown key 'max_tokens'; SGLang calls it max_new_tokens",)),
    "schema-number": ({"json_schema": 5}, TEXTS, ("json_schema: found 5", "allowed: an object or text or null")),
    "least-above-the-room": (
        {"min_new_tokens": 508, "max_new_tokens": None},
        TEXTS,
        ("min_new_tokens 508, and 507 fit", "allowed: 0 to 507"),
    ),
    "no-number": (
        {"max_new_tokens": -1},
        {},
        ("max_new_tokens: found -1", "allowed: a whole number from 0 on or null"),
    ),
    "no-number-and-no-room": (
        {"input_ids": [1] * 511, "max_new_tokens": None},
        {},
        ("511 prompt tokens, of which SGLang takes 505", "allowed: a prompt of at most"),
    ),
    "bias-beyond": ({"logit_bias": {"512": 1.0}}, {}, ("logit_bias: token id 512 is outside", "allowed: 0 to 511")),
    "processor-beyond": (
        processor("force", [7, 512]),
        PROCESSORS,
        ("custom_params.token_ids: token id 512 is outside", "allowed: 0 to 511"),
    ),
    "processor-empty": (processor("force", []), PROCESSORS, ("needs custom_params.token_ids", "one token id or more")),
    "processor-no-id": (processor("force", ["7"]), PROCESSORS, ("needs custom_params.token_ids",)),
    "processor-leaves-none": (
        processor("forbid", list(range(512))),
        PROCESSORS,
        ("custom_params.token_ids forbids all 512 tokens", "allowed: at most 511"),
    ),
    "ids-beyond": (
        {"return_logprob": True, "token_ids_logprob": [512]},
        {},
        ("token_ids_logprob: token id 512 is outside", "allowed: 0 to 511"),
    ),
    "ids-negative": ({"return_logprob": True, "token_ids_logprob": [-1]}, {}, ("token_ids_logprob: token id -1",)),
    "regex-open": ({"regex": "a("}, TEXTS, ("regex cannot be read: unclosed group", "allowed: a regular expression")),
    "ebnf-no-rule": ({"ebnf": "hello"}, TEXTS, ("ebnf cannot be read: Expected ::=", "allowed: rules")),
    "ebnf-no-root": ({"ebnf": 'x ::= "a"'}, TEXTS, ("ebnf cannot be read: No 'root' rule",)),
    "schema-wrong": ({"json_schema": '{"type": "objct"}'}, TEXTS, ("json_schema cannot be read: Invalid type: objct",)),
    "schema-no-json": ({"json_schema": "{"}, TEXTS, ("json_schema: is no JSON", "allowed: a JSON schema")),
    "stop-regex-open": (
        {"stop_regex": ["a("]},
        TEXTS,
        ("stop_regex: pattern 'a(' cannot be read: missing )", "allowed"),
    ),
    **{
        f"empty-{key}": ({key: ""}, TEXTS, (f"{key}: an empty text", "allowed"))
        for key in ("regex", "ebnf", "json_schema")
    },
    **{
        f"empty-{key}": ({key: ["x", ""]}, TEXTS, (f"{key}: an empty text", "allowed"))
        for key in ("stop", "stop_regex")
    },
    "two-grammars": (
        {"regex": "a", "ebnf": 'root ::= "a"'},
        TEXTS,
        ("regex and ebnf in one request", "allowed: one of them"),
    ),
    "top-without-logprobs": ({"top_logprobs_num": 2}, {}, ("top_logprobs_num needs return_logprob true", "allowed")),
    "start-without-logprobs": ({"logprob_start_len": 1}, {}, ("logprob_start_len needs return_logprob true",)),
    "ids-without-logprobs": ({"token_ids_logprob": [1]}, {}, ("token_ids_logprob needs return_logprob true",)),
    "start-beyond-prompt": (
        {"return_logprob": True, "logprob_start_len": 4},
        {},
        ("logprob_start_len 4 is beyond the prompt of 3 tokens", "0 to 3"),
    ),
    "top-k-none": (
        {"temperature": 1.0, "top_k": 0},
        {},
        ("top_k: 0 leaves no token", "allowed: -1 (all), or 1 and above"),
    ),
    "least-without-tokenizer": ({"min_new_tokens": 2}, {}, ("min_new_tokens needs engine.skip_tokenizer_init false",)),
    "least-above-most": ({"min_new_tokens": 17}, TEXTS, ("min_new_tokens 17 is above max_new_tokens 16", "0 to 16")),
}

TAKEN = {
    "bias": ({"logit_bias": {"0": 100.0, "511": -1e9}}, {}),
    "no-number": ({"max_new_tokens": None}, {}),
    "processor": (processor("forbid", list(range(511))), PROCESSORS),
    "logprobs": (
        {"return_logprob": True, "logprob_start_len": 3, "top_logprobs_num": 2, "token_ids_logprob": [0, 511]},
        {},
    ),
    "regex": ({"regex": "[a-z]+"}, TEXTS),
    "regex-that-llguidance-has-no-code-for": ({"regex": "(?=a)a"}, TEXTS),
    "ebnf": ({"ebnf": 'root ::= "yes" | "no"'}, TEXTS),
    "schema": ({"json_schema": '{"type": "boolean"}'}, TEXTS),
    "schema-as-it-is": ({"json_schema": {"type": "boolean"}}, TEXTS),
    "schema-of-anything": ({"json_schema": "$$ANY$$"}, TEXTS),
    "schema-true": ({"json_schema": "true"}, TEXTS),
    "schema-that-llguidance-has-no-code-for": ({"json_schema": '{"type": "array", "uniqueItems": true}'}, TEXTS),
    "stops": ({"stop": ["a"], "stop_regex": ["a|b"], "min_new_tokens": 16}, TEXTS),
    "top-k": ({"temperature": 1.0, "top_k": -1}, {}),
}


@pytest.mark.parametrize(("keys", "engine", "said"), REFUSED.values(), ids=REFUSED)
def test_what_no_engine_can_do_is_refused_with_what_is_allowed(keys, engine, said, tmp_path):
    with pytest.raises((CaseError, UsageError)) as refused:
        checked(tmp_path, keys, engine)
    assert [each for each in said if each not in str(refused.value)] == [], str(refused.value)


@pytest.mark.parametrize(("keys", "engine"), TAKEN.values(), ids=TAKEN)
def test_what_lies_at_a_limit_is_taken(keys, engine, tmp_path):
    checked(tmp_path, keys, engine)


A, B, BOTH = ({"kind": "submit", "rids": rids} for rids in (["a"], ["b"], ["a", "b"]))
STEP, DRAIN, RETRACT = {"kind": "step", "count": 90}, {"kind": "drain"}, {"kind": "retract"}


@pytest.mark.parametrize("script", [[BOTH, DRAIN], [B, STEP, A, DRAIN], [B, DRAIN, RETRACT, A, DRAIN]])
def test_several_samples_are_submitted_where_nothing_else_is_alive(script, tmp_path):
    with pytest.raises(CaseError, match=r"request 'a': n above 1 .*\n  allowed: an op 'submit' with 'a' alone"):
        checked(tmp_path, {"n": 2}, {}, {"rid": "b", "input_ids": [4]}, script=script)


@pytest.mark.parametrize("kind", ["abort", "retract"])
def test_samples_are_not_aborted_or_retracted_by_the_name_of_their_request(kind, tmp_path):
    with pytest.raises(CaseError, match=rf"op '{kind}' names request 'a', .*\n  allowed: requests with n 1"):
        checked(tmp_path, {"n": 2}, {}, script=[A, STEP, {"kind": kind, "rids": ["a"]}, DRAIN])


def test_samples_are_not_to_be_refused(tmp_path):
    with pytest.raises(CaseError, match=r"request 'a': expect 'refusal' with n above 1\n  allowed: n 1"):
        checked(tmp_path, {"n": 2, "expect": "refusal"}, {}, script=[A, DRAIN])


@pytest.mark.parametrize("script", [[A, B, DRAIN], [STEP, A, DRAIN, B, DRAIN], [B, DRAIN, STEP, A, DRAIN]])
def test_several_samples_alone_or_before_others_are_taken(script, tmp_path):
    checked(tmp_path, {"n": 2}, {}, {"rid": "b", "input_ids": [4]}, script=script)


STREAM = "--enable-overlap-plan-stream"
NO_STREAMS = (
    "engine.enable_overlap_plan_stream is on, and there are no streams on a CPU\n"
    "  allowed: --disable-overlap-plan-stream, or add  --device cuda\n"
)
NO_KERNELS = (
    "engine.server_args has enable_hierarchical_cache with hicache_io_backend 'kernel', whose kernels no CPU has\n"
    "  allowed: hicache_io_backend direct\n"
)
ENDS = ("--bad", "0.5.11", "--good", "0.5.13")
#: What brings a scenario that no release runs on a CPU to a command, which scenario it is, and why it is refused.
IMPOSSIBLE = {
    ("run", STREAM): ("'single'", NO_STREAMS),
    ("run", "--scenario-file", "streams.json"): ("'pr25015' of streams.json", NO_STREAMS),
    ("run", "--scenario-file", "plain.json", STREAM): ("'pr25015' of plain.json", NO_STREAMS),
    ("fuzz", "--examples", "1", STREAM): ("'", NO_STREAMS),
    ("matrix", "--engines", "0.5.13", "--cases", "pr25015", STREAM): ("'pr25015'", NO_STREAMS),
    ("matrix", "--nights", "n", "--engines", "0.5.13", "--cases", "pr25015", STREAM): ("'pr25015'", NO_STREAMS),
    ("matrix", "--nights", "n", "--families", "paged", STREAM): ("'page4-", NO_STREAMS),
    ("mutants", "--server-arg", "enable_hierarchical_cache=true"): ("'", NO_KERNELS),
    ("mutate", STREAM): ("'", NO_STREAMS),
    ("bisect", "--case", "pr25015", *ENDS, STREAM): ("'pr25015'", NO_STREAMS),
    ("bisect", "--scenario-file", "streams.json", *ENDS): ("'pr25015' of streams.json", NO_STREAMS),
    ("bisect", "--case", "reproducer", *ENDS): ("'streams'", NO_STREAMS),
    ("replay", "reproducer"): ("'streams'", NO_STREAMS),
}


@pytest.mark.parametrize("typed", IMPOSSIBLE, ids=" ".join)
def test_what_no_release_runs_on_a_device_is_refused_by_every_command_in_the_same_words(typed, work):
    pretended_engine.furnish(work / "home", published=("0.5.11", "0.5.13", "0.5.23"))
    plain, streams = catalogue.load("pr25015").scenario, {"enable_overlap_plan_stream": True}
    (work / "plain.json").write_text(plain.model_dump_json())
    (work / "streams.json").write_text(handmade.set_on(plain, **streams).model_dump_json())
    run = results.store(work / "stored", ("streams", results.one_ahead), scenario=streams)
    next(run.glob("reproducers/*")).rename(work / "reproducer")
    named, why = IMPOSSIBLE[typed]
    done = call(*typed, code=2)
    assert done.stderr.startswith(f"eaglecheck: scenario {named}")
    assert done.stderr.partition(": engine.")[2] == why.removeprefix("engine.")
    assert done.stdout == ""


def test_no_command_that_drives_scenarios_is_left_out():
    """Whoever drives leases a GPU for it."""
    commands = typer.main.get_command(app).commands.items()
    driving = {name for name, one in commands if "gpu_share" in {param.name for param in one.params}}
    assert driving == {command for command, *_ in IMPOSSIBLE}
