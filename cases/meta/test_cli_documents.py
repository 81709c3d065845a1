"""What gates read: every document is what docs/json.md says, key by key, and its examples are documents."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import BaseModel, ValidationError

from cases.meta import json_models as models
from cases.meta import results
from harness.cli.documents import MATRIX_SCHEMA, RUN_SCHEMA, cell_document, matrix_document, run_document
from harness.contract.outputs import write_json
from harness.contract.types import Kind

DOCS = (Path(__file__).parents[2] / "docs" / "json.md").read_text()
REPLACED = [{**entry, "reason": "no build for a CPU"} for entry in results.REPLACED]

RUNS = {
    "pass": lambda: results.run_of(results.judged("single"), replaced=REPLACED),
    "fail": lambda: results.run_of(results.judged("pr25015", results.one_ahead), revert=25015),
    "unknown": lambda: results.run_of(results.without_engine("single", "the engine did not boot")),
    **{
        kind.lower(): lambda kind=kind: results.run_of(results.with_divergences("one", results.EVERY_KIND[kind]))
        for kind in Kind
    },
}


def through_disk(document, path):
    write_json(document, str(path))
    return path.read_text()


@pytest.mark.parametrize("name", RUNS)
def test_run_document_is_what_was_promised(name, tmp_path):
    text = through_disk(run_document(RUNS[name]()), tmp_path / "out.json")
    read = models.Run.model_validate_json(text)
    assert read.schema_ == RUN_SCHEMA
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


@pytest.mark.parametrize("name", RUNS)
def test_matrix_document_is_what_was_promised(name, tmp_path):
    run = RUNS[name]()
    cells = [cell_document(run, one, case="pr25015", expected="PASS", as_expected=None) for one in run.results]
    read = models.Matrix.model_validate_json(through_disk(matrix_document(cells), tmp_path / "out.json"))
    assert read.schema_ == MATRIX_SCHEMA
    assert len(read.cells) == len(run.results)


def test_a_cell_names_the_first_wrong_place_and_what_the_text_shows():
    run = results.run_of(results.judged("pr25015", results.one_ahead))
    cell = cell_document(run, run.results[0], case="pr25015", expected="FAIL", as_expected=True)
    assert (cell["verdict"], cell["kinds"], cell["text_identical"]) == ("FAIL", ["POSITION"], True)
    first = {"rid": "r0", "dp_rank": 0, "committed_len": 7, "round": 4, "phase": "DRAFT", "step": 0, "slot": 0}
    assert cell["first"] == {"kind": "POSITION", **first, "expected": 7, "observed": 8}


def test_infinite_values_are_text_since_json_has_none(tmp_path):
    far = replace(results.EVERY_KIND[Kind.TOKEN], margin=float("inf"))
    text = through_disk(run_document(results.run_of(results.with_divergences("one", far))), tmp_path / "out.json")
    assert models.Run.model_validate_json(text).findings[0].first.margin == "inf"


def test_a_key_too_many_or_too_few_would_be_seen():
    document = run_document(RUNS["pass"]())
    for changed in ({**document, "new": 1}, {name: document[name] for name in document if name != "cost"}):
        with pytest.raises(ValidationError):
            models.Run.model_validate_json(json.dumps(changed))


def test_a_device_or_pipe_is_written_to_and_not_replaced():
    write_json({"schema": 1}, "/dev/null")
    assert Path("/dev/null").is_char_device()


EXAMPLES = dict(re.findall(r"<!-- example: (\w+) -->\n```json\n(.*?)```", DOCS, flags=re.DOTALL))


@pytest.mark.parametrize("name", ["run", "matrix"])
def test_examples_in_the_docs_are_documents(name):
    model = models.Matrix if name == "matrix" else models.Run
    model.model_validate_json(EXAMPLES[name])


@pytest.mark.parametrize(
    "model", [one for one in vars(models).values() if isinstance(one, type) and issubclass(one, models.Strict)]
)
def test_every_key_is_described_in_the_docs(model: type[BaseModel]):
    for name, field in model.model_fields.items():
        assert f"`{field.alias or name}`" in DOCS, f"{model.__name__}.{name} is not in docs/json.md"
