"""Frames of stored runs: as documented, the same numbers as the checks, and whole on disk. No engine."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

from cases.meta import handmade, page_runs, results
from cases.meta.recorded import GPU
from harness.archive.records import ScenarioVerdict
from harness.archive.store import RunReader, StoredScenario, read_case
from harness.checks import judge
from harness.cli.report_files import write_csv, write_parquet
from harness.contract.types import Kind, Phase
from reports.columns import ARROW, FRAMES, empty, frame
from reports.frames import accept_lengths, case_frames, read_frames, read_trends
from reports.reading import read_report

DOC = Path(__file__).parents[2] / "docs" / "frames.md"
RUNS = sorted(GPU.iterdir())


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return page_runs.store(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def frames(run):
    return read_frames(run)


@pytest.mark.parametrize("name", FRAMES)
def test_every_column_of_a_frame_is_described_once(name):
    columns = FRAMES[name]
    assert len({column.name for column in columns}) == len(columns) > 0
    assert [column.name for column in columns if column.dtype not in ARROW or not column.meaning] == []
    assert f"| `{name}` |" in DOC.read_text()


def test_frames_have_the_columns_and_dtypes_of_the_documentation(frames, run):
    for name, table in [*frames.items(), ("trends", read_trends([run]))]:
        held = {one.name: "object" if one.dtype == "list" else one.dtype for one in FRAMES[name]}
        assert {column: str(dtype) for column, dtype in table.dtypes.items()} == held, name
        assert len(table)
        assert list(empty(name).dtypes) == list(table.dtypes)


def test_a_column_that_is_not_described_cannot_be_made():
    with pytest.raises(ValueError, match=r"frame 'coverage'.*missing \['asked'.*not described \['invented'\]"):
        frame("coverage", {"invented": [1]})


def test_every_row_of_both_sides_is_there_once(frames, run):
    for case in RunReader.open(run).scenarios():
        table = frames.positions.query("scenario == @case.scenario.name")
        assert len(table) == len(case.engine.rows) == len(case.reference.rows)
        assert set(table["sides"]) == {"both"}
        assert not table.duplicated(["dp_rank", "rid", "attempt", "committed", "phase", "step", "slot"]).any()
        for name in ("position", "input_id", "cache_slot", "parent"):
            assert sorted(table[name].tolist()) == sorted(case.engine.rows.ints[name].tolist()), name


def test_rows_that_one_side_lacks_say_which():
    scenario = results.named("holes")
    engine, reference = results.traces(scenario)
    gone = handmade.find(engine, phase=Phase.EXTEND, rid="r1")
    extra = handmade.find(engine, phase=Phase.VERIFY, rid="r2")
    engine = handmade.without_rows(engine, gone)
    reference = handmade.without_rows(reference, extra)
    verdict, found = judge(scenario, engine, reference)
    table = case_frames(_stored(scenario, engine, reference, found, verdict), run="x").positions
    lacking = table[table["sides"] != "both"]
    assert lacking[["sides", "phase", "rid", "state"]].values.tolist() == [
        ["reference", "EXTEND", "r1", "wrong"],
        ["engine", "VERIFY", "r2", "wrong"],
    ]
    assert lacking["input_id"].isna().tolist() == [True, False]
    assert lacking["reference_input_id"].isna().tolist() == [False, True]


def _stored(scenario, engine, reference, found, verdict):
    return StoredScenario(
        folder=Path("x"),
        scenario=scenario,
        engine=engine,
        reference=reference,
        findings=tuple(found),
        verdict=ScenarioVerdict.of(scenario, verdict),
    )


def test_a_run_without_a_reference_has_its_engine_rows():
    scenario = results.named("alone")
    engine, _ = results.traces(scenario)
    verdict, found = judge(scenario, engine, None)
    table = case_frames(_stored(scenario, engine, None, found, verdict), run="x").positions
    assert len(table) == len(engine.rows)
    assert set(table["sides"]) == {"engine"}
    assert table["reference_position"].isna().all()
    assert table[["margin", "hidden_out_error", "logits_limit"]].isna().all(axis=None)


@pytest.mark.parametrize("folder", RUNS, ids=lambda folder: folder.name)
def test_errors_and_limits_are_those_the_checks_judged_by(folder):
    """On real runs in float16: what lies above its limit is what the checks called NUMERIC, error and limit alike."""
    case = read_case(folder)
    verdict, found = judge(case.scenario, case.engine, case.reference)
    table = case_frames(_stored(case.scenario, case.engine, case.reference, found, verdict), run="x").positions
    judged = {}
    for one in found:
        what = one.hint.split("-")[0]
        if one.kind is Kind.NUMERIC and what in ("hidden_in", "hidden_out", "logits"):
            key = one.key
            place = (key.rid, key.attempt, key.committed, str(key.phase), key.step, key.slot)
            judged[place] = (what, one.observed["greatest_abs"], one.expected["limit_abs"])
    seen = {}
    for row in table.itertuples():
        for what in ("hidden_in", "hidden_out", "logits"):  # a row is named by the first of these only
            error, limit = getattr(row, f"{what}_error"), getattr(row, f"{what}_limit")
            if error > limit:
                seen[row.rid, row.attempt, row.committed, row.phase, row.step, row.slot] = (what, error, limit)
                break
    assert seen.keys() == judged.keys()
    for place, (what, error, limit) in judged.items():
        assert seen[place][0] == what
        assert seen[place][1:] == pytest.approx((error, limit))
    compared = table["hidden_out_error"].notna().sum() + table["hidden_in_error"].notna().sum()
    assert compared == verdict.compared["hidden_rows"]


def test_the_recorded_runs_hold_both_passing_and_failing_rows():
    states = {state for folder in RUNS for state in read_frames(folder).positions["state"]}
    assert states == {"same", "wrong", "consequence"}


def test_findings_are_the_stored_ones_in_their_order(frames, run):
    for case in RunReader.open(run).scenarios():
        table = frames.findings.query("scenario == @case.scenario.name")
        assert table["signature"].tolist() == [found.signature for found in case.findings]
        assert [json.loads(text) for text in table["observed"]] == [found.observed for found in case.findings]
        assert table["first"].sum() == bool(case.findings)


def test_idle_and_empty_rounds_have_a_row_of_their_own(frames):
    table = frames.rounds.query("scenario == 'idle-rank' and dp_rank == 1")
    assert set(table["mode"]) == {"IDLE", "DECODE"}
    assert (table["batch"] == 0).all()
    assert (table["rid"] == "").all()


def test_accept_lengths_are_what_verifies_committed(frames, run):
    for case in RunReader.open(run).scenarios():
        table = frames.accept_lengths.query("scenario == @case.scenario.name")
        accepted = case.engine.rows.strings["phase"] == Phase.ACCEPT
        assert sorted(table["accept_len"]) == sorted(accept_lengths(case))
        assert table["accept_len"].sum() == accepted.sum()
        assert table["accept_len"].between(1, case.scenario.spec.num_steps + 1).all()


def test_trends_are_ordered_by_time_and_count_each_run(tmp_path):
    first = results.store(tmp_path / "a", ("single", results.sound))
    second = results.store(tmp_path / "b", ("single", results.sound), ("pr25015", results.one_ahead))
    _began(first, "2026-11-02T00:00:00+00:00")
    _began(second, "2026-11-01T00:00:00+00:00")
    table = read_trends([first, second])
    assert table["run"].tolist() == [second.name, first.name]
    assert table["verdict"].tolist() == ["FAIL", "PASS"]
    assert table["failed"].tolist() == [1, 0]
    assert table["signatures"].tolist() == [1, 0]
    assert (table["accept_mean"] > 1).all()
    assert (table["tie_rate"] == 0).all()


def _began(run, when):
    place = run / "manifest.json"
    place.write_text(json.dumps({**json.loads(place.read_text()), "created": when}))
    results.reseal(run)


def test_parquet_comes_back_as_it_was_with_units(run, frames, tmp_path):
    write_parquet(read_report(run), tmp_path)
    assert {path.stem for path in tmp_path.iterdir()} == set(FRAMES)
    for name, table in frames.items():
        read = pq.read_table(tmp_path / f"{name}.parquet")
        for column in FRAMES[name]:
            assert read.schema.field(column.name).metadata[b"unit"].decode() == column.unit
            ours, theirs = table[column.name], read.column(column.name).to_pylist()
            for one, other in zip(ours.tolist(), theirs, strict=True):
                assert _same(one, other), (name, column.name, one, other)


def _same(one, other):
    if isinstance(one, tuple):
        return list(one) == other
    return (pd.isna(one) and (other is None or np.isnan(other))) or one == other


def test_csv_comes_back_with_lists_as_numbers_between_blanks(run, frames, tmp_path):
    write_csv(read_report(run), tmp_path / "new")
    table = pd.read_csv(tmp_path / "new" / "positions.csv", keep_default_na=False, dtype={"chosen": str})
    assert list(table.columns) == [column.name for column in FRAMES["positions"]]
    assert len(table) == len(frames.positions)
    chosen = [tuple(map(int, text.split())) for text in table["chosen"]]
    assert chosen == frames.positions["chosen"].tolist()
    assert any(len(many) > 1 for many in chosen)
