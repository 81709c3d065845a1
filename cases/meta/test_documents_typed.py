"""Documents that people write are read without guessing; a message names the file, the place and what is allowed."""

from __future__ import annotations

import copy
import json

import pytest

from cases import catalogue, fixed, known
from harness.archive.records import FindingLine, ReproducerManifest, RunManifest, RunVerdict
from harness.archive.trace_io import _Head
from harness.cli.scenario_checks import check_scenarios
from harness.contract.json_files import BadDocument, NotJSON, parsed, validated
from harness.contract.requests import RequestSpec
from harness.contract.scenario import Scenario
from harness.contract.script import Op
from harness.contract.settings import POOL, EngineConfig, SpecConfig
from harness.contract.usage import UsageError
from harness.driving.refusals import impossible
from harness.engines.launch import BOOT_CHUNK, boot_chunk
from harness.night.records import Night

WHOLE = fixed.default_scenarios()[0].model_dump(mode="json")


def changed(path, value):
    document = copy.deepcopy(WHOLE)
    inner = document
    for part in path[:-1]:
        inner = inner[part]
    inner[path[-1]] = value
    return document


REFUSED = {
    "a number in quotes": (["spec", "num_steps"], "2", 'spec.num_steps: found "2"'),
    "a number with a fraction": (["spec", "num_steps"], 2.0, "spec.num_steps: "),
    "a truth for a number": (["spec", "num_steps"], True, "spec.num_steps: "),
    "a number for a truth": (["engine", "cuda_graph"], 1, "engine.cuda_graph: "),
    "a text for a list": (["requests", 0, "input_ids"], "1", "requests.0.input_ids: "),
    "an empty list": (["script"], [], "script: "),
    "no object": (["engine"], None, "engine: "),
    "too many steps": (
        ["script", -1],
        {"kind": "step", "count": 10**9},
        "found 1000000000\n  allowed: a whole number from 1 to 10000; 512 ",
    ),
    "a vast pool": (
        ["engine", "max_total_tokens"],
        10**13,
        f"found 10000000000000\n  allowed: a whole number from 16 to {POOL}; {POOL} tokens",
    ),
    "a vast page": (["engine", "page_size"], 1024, "from 1 to 512; SGLang's backends have no larger"),
    "a vast chunk": (["engine", "chunked_prefill_size"], 10**7, "engine.chunked_prefill_size: "),
    "a vast batch": (["engine", "max_running_requests"], 10**6, "engine.max_running_requests: "),
    "a vast seed": (["requests", 0, "sampling_seed"], 2**63, "requests.0.sampling_seed: "),
    "a vast temperature": (["requests", 0, "temperature"], 1e300, "temperature: "),
    "neither greedy nor sampled": (["requests", 0, "temperature"], 1e-9, "allowed: 0, or 0.000001 to 100"),
    "a version that is true": (["schema_version"], True, "schema_version true"),
    "a version in quotes": (["schema_version"], "1", 'schema_version "1"'),
    "an unknown word": (["script", 0, "kind"], "submitt", "found \"submitt\"; did you mean 'submit'?"),
    "an op's key that does nothing": (["script", 0, "count"], 3, "it takes: rids, name"),
    "an op without what it is about": (
        ["script"],
        [*WHOLE["script"][:-1], {"kind": "abort"}, {"kind": "drain"}],
        "op 'abort' needs 'rids'",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_scenario_file_is_read_without_guessing(name, tmp_path):
    path, value, said = REFUSED[name]
    file = tmp_path / "own.json"
    file.write_text(json.dumps(changed(path, value)))
    with pytest.raises(catalogue.CaseError) as refused:
        catalogue.read_scenario(file)
    assert said in str(refused.value)
    assert str(file) in str(refused.value)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b" \n", "line 2 column 1"),
        (b'{"a": {"b": 1, "c": 2, "b": 1}}', "'b' in the object with the keys b, c"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": 1', "line 1 column 8"),
        (b"[1] 2", "Extra data"),
        (b"\xff\xfe", "position 0"),
        (b"[" * 100000, "nested too deep"),
        (b'["\\ud800"]', r"half of a character, \\ud800"),
        (b'{"a": ' + b"9" * 5000 + b"}", "digits"),
    ],
)
def test_what_is_not_one_json_document_is_refused_with_its_place(content, said):
    with pytest.raises(NotJSON, match=said):
        parsed(content)


MODELS = [
    *(Scenario, SpecConfig, EngineConfig, RequestSpec, Op, catalogue.Case, known.Entry, known._File),
    *(Night, RunManifest, RunVerdict, ReproducerManifest, FindingLine, _Head),
]
JUNK = [None, True, -1, 10**30, 1.5, 1e300, "", "x", "\ud800", [], [[]], {}, {"x": 1}]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_every_field_of_every_document_refuses_what_does_not_belong_there_and_is_named(model):
    for name, field in model.model_fields.items():
        key = field.alias or name
        refused = [text for value in JUNK if (text := said_of({key: value}, model))]
        assert len(refused) >= 8
        assert any(text.startswith((key, "the document: Invalid JSON")) for text in refused)
        assert all(len(text) < 2000 for text in refused)
    assert said_of({"no-such-key": 1}, model).startswith("no-such-key: unknown key 'no-such-key'")
    assert said_of([], model)
    assert said_of(3, model)


def said_of(content, model):
    try:
        validated(content, model)
    except BadDocument as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"schema_version = 1", "unknown key 'schema_version'"),
        (b"", "schema: it is missing"),
        (b'schema = "1"', 'found "1"'),
        (b"schema = 2", "found 2"),
        (b"schema = 1\n[[known]\n", "line 2, column"),
        (b"schema = 1\nknown = 3", "known: "),
        (b"\xff", "known.toml"),
    ],
)
def test_known_findings_are_read_so_too(text, said, tmp_path):
    (tmp_path / "known.toml").write_bytes(text)
    with pytest.raises(catalogue.CaseError) as refused:
        known.read(tmp_path / "known.toml")
    assert said in str(refused.value)
    assert str(tmp_path / "known.toml") in str(refused.value)


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (["requests", 0, "stop_token_ids"], [1, 512], "stop id 512 is outside the vocabulary"),
        (["requests", 0, "stop_token_ids"], [-1], "stop id -1 is outside the vocabulary"),
        (["engine"], {"page_size": 64, "chunked_prefill_size": 16}, "chunks are whole pages"),
        # seen on 0.5.23: no token is generated, and with a pool of 100 the request waits for ever
        (["engine"], {"page_size": 512, "max_total_tokens": 1024}, "allowed: engine.max_total_tokens 1536 or more"),
        (
            ["engine"],
            {"page_size": 64, "max_total_tokens": 100},
            "never fit engine.max_total_tokens 100 in pages of 64",
        ),
    ],
)
def test_what_no_engine_takes_is_refused_before_one_boots(path, value, said):
    scenario = Scenario.model_validate(changed(path, value))
    with pytest.raises(UsageError, match=said):
        check_scenarios([scenario], device="cpu")


@pytest.mark.parametrize(
    ("page", "version", "device", "refused"),
    [
        (7, "0.5.11", "cpu", True),
        (7, "0.5.17", "cpu", True),
        (7, "0.5.23", "cpu", False),
        (7, "0.5.23", "cuda", True),
        (8, "0.5.11", "cpu", False),
        (512, "0.5.17", "cuda", False),
    ],
)
def test_a_page_is_a_power_of_two_where_the_kernel_that_lays_pages_out_says_so(page, version, device, refused):
    """Seen on 0.5.11 and 0.5.17 as a crash in alloc_extend: arange's range must be a power of 2."""
    why = impossible(SpecConfig(), EngineConfig(page_size=page), version=version, device=device)
    assert bool(why) is refused
    assert not why or "allowed: 1, 2, 4, 8, 16, 32, 64, 128, 256, 512" in why


@pytest.mark.parametrize(("page", "chunk"), [(1, BOOT_CHUNK), (7, 70), (64, 64), (100, 100), (512, 512)])
def test_a_chunk_at_boot_is_whole_pages_so_that_every_page_size_boots(page, chunk):
    """SGLang's own check, in every release: chunked_prefill_size % page_size == 0."""
    assert boot_chunk(page) == boot_chunk(page, 512) == chunk
    assert 2048 <= boot_chunk(page, 2048) < 2048 + page
    assert chunk % page == 0
