"""docs/scenarios.md against the format: every field and op is in it, its example is a file that is valid."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest

from cases import catalogue
from cases.catalogue import read_scenario
from cases.families import FAMILIES
from harness.contract.requests import RequestSpec
from harness.contract.scenario import Scenario
from harness.contract.script import Op
from harness.contract.settings import EngineConfig, SpecConfig
from harness.coverage import POINTS

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "scenarios.md").read_text()
TABLES = {"The scenario": Scenario, "spec": SpecConfig, "engine": EngineConfig, "requests": RequestSpec}


def section(title):
    """The part of the page under this heading."""
    found = re.search(rf"^##+ {re.escape(title)}$(.*?)(?=^##|\Z)", TEXT, re.MULTILINE | re.DOTALL)
    assert found, title
    return found[1]


def first_cells(text):
    """Words in backticks in the first column of every table row."""
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    return [word for row in rows for word in re.findall(r"`([^`]+)`", row.split("|")[1])]


@pytest.mark.parametrize("title", TABLES)
def test_every_field_has_a_row_and_no_row_is_of_no_field(title):
    assert sorted(first_cells(section(title))) == sorted(TABLES[title].model_json_schema()["properties"])


@pytest.mark.parametrize("title", TABLES)
def test_defaults_are_those_of_the_format(title):
    plain = {True: "true", False: "false", None: "null", (): "none"}
    rows = [line for line in section(title).splitlines() if line.startswith("| `")]
    assert rows
    for row in rows:
        said = row.strip("|").split("|")[2].strip()
        for name in first_cells(row):
            field = TABLES[title].model_fields[name]
            value = field.default
            if name in ("spec", "engine"):
                assert said == "all defaults"
            elif field.is_required():
                assert said == "needed", name
            elif value == {}:
                assert said == "none", name
            elif isinstance(value, bool | tuple | None):
                assert said.strip("`") == plain[value], name
            else:
                assert said.strip("`") == (value if isinstance(value, str) else f"{value:g}"), name


def test_every_op_has_a_row():
    assert sorted(first_cells(section("script"))) == sorted(get_args(Op.model_fields["kind"].annotation))
    assert set(Op.model_fields) == {"kind", "rids", "count", "name", "source", "selector", "mode"}, (
        "and what each of them takes"
    )


def test_the_example_is_the_file_and_valid():
    path = ROOT / "cases" / "scenarios" / "abort-and-retract.json"
    (example,) = re.findall(r"<!-- example -->\n```json\n(.*?)```", TEXT, re.DOTALL)
    assert example == path.read_text()
    assert {op.kind for op in read_scenario(path).script} >= {"submit", "step", "retract", "abort", "drain"}


def test_coverage_points_that_are_named_exist():
    named = set(re.findall(r"`([a-z]+(?:_[a-z0-9]+)+)`", TEXT))
    for model in (EngineConfig, RequestSpec, SpecConfig):
        named -= set(model.model_fields)
    assert named & set(POINTS)
    assert named - set(POINTS) <= {"schema_version"}


def test_every_scenario_of_every_family_is_listed_by_name_and_so_is_the_corpus():
    listed = section("Those that are there")
    names = {family: {one.name for one in each.scenarios} for family, each in FAMILIES.items()}
    told = {
        family: set(re.findall(r"`([^`]+)`", line.split("|")[3]))
        for line in listed.splitlines()
        for family in re.findall(r"^\| `([^`]+)` \|", line)
    }
    assert told == names
    assert catalogue.names()
    assert [name for name in catalogue.names() if f"`{name}`" not in listed] == []
