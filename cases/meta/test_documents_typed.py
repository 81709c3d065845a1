"""Documents that people write are read without guessing, and what is wrong with one is said in our words."""

from __future__ import annotations

import copy
import json
import re

import pytest

from cases import catalogue, fixed, known
from harness.archive.records import FindingLine, RunManifest, RunVerdict, SpecimenManifest
from harness.archive.trace_io import _Head
from harness.cli.programs import check_scenarios
from harness.contract.strict_json import NotJSON, parsed
from harness.contract.types import POOL, EngineConfig, Op, RequestSpec, Scenario, SpecConfig
from harness.contract.usage import UsageError
from harness.contract.validation import Unfit, validated
from harness.driving.adapt import impossible
from harness.engines.launch import BOOT_CHUNK, boot_chunk
from harness.night.records import Night

WHOLE = fixed.default_scenarios()[0].model_dump(mode="json")
#: How the libraries that read documents speak.
FOREIGN = re.compile(
    r"Input should|should (be|have|match)|Field required|Extra inputs|valid (integer|number|string|boolean)|unable to|"
    r"Expecting|codec|errors\.pydantic|Invalid (JSON|statement|value)|Cannot overwrite|int_|_type|_error|BaseModel"
)


def changed(path, value):
    document = copy.deepcopy(WHOLE)
    inner = document
    for part in path[:-1]:
        inner = inner[part]
    inner[path[-1]] = value
    return document


def written(tmp_path, document):
    path = tmp_path / "own.json"
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return path


REFUSED = {
    "a number in quotes": (["spec", "k"], "2", "a whole number from 1 to 16"),
    "a number with a fraction": (["spec", "k"], 2.0, "a whole number from 1 to 16"),
    "a truth for a number": (["spec", "k"], True, "a whole number from 1 to 16"),
    "a number for a truth": (["engine", "graphs"], 1, "true or false"),
    "a text for a list": (["requests", 0, "prompt"], "1", "a list of 1 entry or more, each a whole number"),
    "a number for a list": (["wants"], 3, "a list, each a text in quotes"),
    "an empty list": (["script"], [], "an object with the keys kind"),
    "no object": (["engine"], None, "an object with the keys dp"),
    "a quoted token": (["requests", 0, "prompt", 0], "7", "a whole number"),
    "too many turns": (["script", -1], {"kind": "tick", "count": 10**9}, "1 to 10000; 512 turns end any request"),
    "a vast pool": (["engine", "pool_tokens"], 10**13, f"16 to {POOL}; {POOL} tokens are 256 requests"),
    "a vast page": (["engine", "page"], 1024, "1 to 512; engines are booted for 512 tokens"),
    "a vast chunk": (["engine", "chunk"], 10**6, "1 to 512 or null"),
    "a vast batch": (["engine", "max_running"], 10**6, "1 to 256"),
    "a vast seed": (["requests", 0, "seed"], 2**63, f"0 to {2**63 - 1} or null"),
    "hot": (["requests", 0, "temperature"], 1e300, "0.0 to 100.0"),
    "neither greedy nor sampled": (["requests", 0, "temperature"], 1e-9, "0, or 0.000001 to 100"),
    "a version that is true": (["schema_version"], True, "allowed: 1"),
    "a version in quotes": (["schema_version"], "1", "allowed: 1"),
    "an op's key that does nothing": (["script", 0, "count"], 3, "it takes: rids, name"),
    "an op without what it is about": (
        ["script"],
        [*WHOLE["script"][:-1], {"kind": "abort"}, {"kind": "drain"}],
        "op 'abort' needs 'rids'",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_scenario_file_is_read_without_guessing(name, tmp_path):
    path, value, allowed = REFUSED[name]
    with pytest.raises(catalogue.CaseError) as refused:
        catalogue.read_scenario(written(tmp_path, changed(path, value)))
    assert allowed in str(refused.value)
    assert not FOREIGN.search(str(refused.value))
    assert str(tmp_path / "own.json") in str(refused.value)


def test_the_place_and_the_nearest_word_are_named(tmp_path):
    with pytest.raises(
        catalogue.CaseError, match=r'script\.0\.kind: "submitt" cannot stand there; did you mean \'submit\''
    ):
        catalogue.read_scenario(written(tmp_path, changed(["script", 0, "kind"], "submitt")))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "it is empty"),
        (b" \n", "it is empty"),
        (b'{"a": 1, "a": 2}', "key 'a' is there twice"),
        (b'{"a": {"b": 1, "c": 2, "b": 1}}', "key 'b' is there twice in the object with the keys b, c"),
        (b'{"a": NaN}', "NaN is no number that JSON has"),
        (b'{"a": -Infinity}', "-Infinity is no number"),
        (b'{"a": 1', "line 1, column 8: a comma or a closing bracket is missing"),
        (b"{\n'a': 1}", "line 2, column 1: a key in double quotes is missing"),
        (b'{"a" 1}', "line 1, column 6: a colon is missing"),
        (b"[1] 2", "line 1, column 5: something follows"),
        (b"\xff\xfe", "byte 0 is not UTF-8 text"),
        (b"[" * 100000, "nested too deep"),
        (b'{"a": ' + b"9" * 5000 + b"}", "thousands of digits"),
    ],
)
def test_what_is_not_json_is_said_in_our_words(content, said):
    with pytest.raises(NotJSON) as refused:
        parsed(content)
    assert said in str(refused.value)
    assert not FOREIGN.search(str(refused.value))


MODELS = [
    *(Scenario, SpecConfig, EngineConfig, RequestSpec, Op, catalogue.Case, known.Entry, known._File),
    *(Night, RunManifest, RunVerdict, SpecimenManifest, FindingLine, _Head),
]
JUNK = [None, True, -1, 10**30, 1.5, 1e300, "", "x", "\ud800", [], [[]], {}, {"x": 1}]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_no_word_of_the_library_reaches_whoever_wrote_a_document(model):
    """Every field of every document, with every kind of value that does not belong there."""
    said = []
    for name, field in model.model_fields.items():
        for value in JUNK:
            try:
                validated({field.alias or name: value}, model)
            except Unfit as error:
                said.append(str(error))
    said += [str(_refused([], model)), str(_refused(3, model)), str(_refused({"no-such-key": 1}, model))]
    assert len(said) > len(model.model_fields)
    assert not [text for text in said if FOREIGN.search(text)]


def _refused(content, model):
    with pytest.raises(Unfit) as refused:
        validated(content, model)
    return refused.value


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("schema_version = 1", "unknown key 'schema_version'\n  allowed keys: schema, known"),
        ("", "schema: is missing"),
        ('schema = "1"', 'schema is "1", which is no whole number'),
        ("schema = 2", "schema: 2 cannot stand there\n  allowed: 1"),
        ("schema = 1\nschema = 1", "Cannot overwrite a value"),
        ("schema = ", "Invalid value (at end of document)"),
        ("schema = 1\n[[known]\n", "line 2, column"),
        ("schema = 1\nknown = 3", "known: 3 cannot stand there"),
    ],
)
def test_known_findings_are_read_so_too(text, said, tmp_path):
    (tmp_path / "known.toml").write_text(text)
    with pytest.raises(catalogue.CaseError) as refused:
        known.read(tmp_path / "known.toml")
    assert said in str(refused.value)


def test_known_findings_that_are_not_text_are_refused(tmp_path):
    (tmp_path / "known.toml").write_bytes(b"\xff")
    with pytest.raises(catalogue.CaseError, match="can't decode byte 0xff in position 0"):
        known.read(tmp_path / "known.toml")


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (["requests", 0, "stop_ids"], [1, 512], "stop id 512 is outside the vocabulary"),
        (["requests", 0, "stop_ids"], [-1], "stop id -1 is outside the vocabulary"),
        (["engine"], {"page": 64, "chunk": 16}, "chunks are whole pages"),
        # seen on 0.5.23: no token is generated, and with a pool of 100 the request waits for ever
        (["engine"], {"page": 512, "pool_tokens": 1024}, "allowed: engine.pool_tokens 1536 or more"),
        (["engine"], {"page": 64, "pool_tokens": 100}, "never fit engine.pool_tokens 100 in pages of 64"),
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
    why = impossible(SpecConfig(), EngineConfig(page=page), version=version, device=device)
    assert bool(why) is refused
    assert not why or "allowed: 1, 2, 4, 8, 16, 32, 64, 128, 256, 512" in why


@pytest.mark.parametrize(("page", "chunk"), [(1, BOOT_CHUNK), (7, 70), (64, 64), (100, 100), (512, 512)])
def test_a_chunk_at_boot_is_whole_pages_so_that_every_page_size_boots(page, chunk):
    """SGLang's own check, in every release: chunked_prefill_size % page_size == 0."""
    assert boot_chunk(page) == chunk
    assert chunk % page == 0
