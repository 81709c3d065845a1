"""Nights whose record is kept in docs/evidence/nights: whole, green, and a page for everything that they showed."""

from pathlib import Path

import pytest

from cases import known
from harness.night import store
from harness.night.records import unaccounted

KEPT = store.nights(Path(__file__).parents[2] / "docs" / "evidence" / "nights")


@pytest.mark.parametrize("kept", KEPT, ids=lambda kept: kept.plan.id)
def test_a_night_that_is_kept_is_whole_and_green_and_each_finding_has_a_page(kept):
    night = kept.night
    assert night is not None
    assert night.green
    assert unaccounted(night.plan.planned, [cell.key for cell in night.cells]) == []
    assert not [cell.key for cell in night.cells if cell.unknown or not cell.scenarios]
    entries = known.read()
    new = [
        f"{seen.signature} in {cell.key}"
        for cell in night.cells
        for seen in cell.findings
        if not any(one.covers(seen.signature, engine=cell.engine, place=f"{cell.kind}/{cell.name}") for one in entries)
    ]
    assert not new
