"""Nights that are kept in docs/evidence/nights: whole, green, and a page for everything that they showed."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from cases import known
from harness.night import store
from harness.night.records import CellResult, unaccounted

NIGHTS = Path(__file__).parents[2] / "docs" / "evidence" / "nights"
#: as the store has them
RECORDS = store.nights(NIGHTS)
#: as `--json` writes them, of nights whose store stayed on the machine
REPORTS = sorted(NIGHTS.glob("*.json"))


def check_cells(cells: Sequence[CellResult]) -> None:
    assert not [cell.key for cell in cells if cell.unknown or not cell.scenarios]
    entries = known.read()
    new = [
        f"{seen.signature} in {cell.key}"
        for cell in cells
        for seen in cell.findings
        if not any(one.covers(seen.signature, engine=cell.engine, place=f"{cell.kind}/{cell.name}") for one in entries)
    ]
    assert not new


@pytest.mark.parametrize("kept", RECORDS, ids=lambda kept: kept.plan.id)
def test_a_night_that_is_kept_is_whole_and_green_and_each_finding_has_a_page(kept):
    night = kept.night
    assert night is not None
    assert night.green
    assert unaccounted(night.plan.planned, [cell.key for cell in night.cells]) == []
    check_cells(night.cells)


@pytest.mark.parametrize("report", REPORTS, ids=lambda report: report.stem)
def test_a_report_that_is_kept_is_of_a_whole_green_night_and_each_finding_has_a_page(report):
    night = json.loads(report.read_text(encoding="utf-8"))
    cells = [CellResult.model_validate(cell) for cell in night["cells"]]
    assert (night["night"], night["green"]) == (report.stem, True)
    assert night["planned"] == night["reported"] == len({cell.key for cell in cells}) == len(cells)
    assert not night["wrong"]
    assert not night["incomplete"]
    check_cells(cells)
