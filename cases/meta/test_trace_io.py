"""A trace survives the disk unchanged, equal traces give equal bytes, and unfit files say what is wrong."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from cases.meta import handmade
from harness.archive import event_facts, facts
from harness.archive.faults import TraceError
from harness.archive.trace_io import OLD_NAMES, plain, read_trace, trace_files, write_trace
from harness.archive.trace_table import arrow_schema
from harness.contract.json_files import VERSIONS
from harness.contract.rows import RowBuilder
from harness.contract.trace import TRACE_SCHEMA, Event, Trace

INTS = st.integers(-(2**62), 2**62)
FLOATS = st.floats(width=32)
WORDS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=6)
#: What nobody reads of headers and events; what is read is held to its type or to today's name, as other tests show.
READ = {*event_facts.KEYS_READ, *facts.KEYS_READ, *OLD_NAMES, *VERSIONS}
UNREAD = WORDS.filter(lambda key: key not in READ)


@pytest.fixture
def stored(tmp_path):
    engine, reference = handmade.build(handmade.scenario())
    write_trace(tmp_path, engine)
    write_trace(tmp_path, reference)
    return tmp_path, engine, reference


def test_both_sides_come_back_unchanged(stored):
    folder, engine, reference = stored
    handmade.assert_same(engine, read_trace(folder, "engine"))
    handmade.assert_same(reference, read_trace(folder, "reference"))


def test_reading_leaves_no_thread_behind(stored):
    """A thread of Arrow's that lets go of Python's bytes while Python ends kills the process, 1 time in some 50."""
    folder, _, _ = stored
    code = (
        "import os, sys, pathlib, harness.archive.trace_io as t\n"
        "import harness.archive.trace_table\n"  # importing pyarrow starts threads of its own
        "before = len(os.listdir('/proc/self/task'))\n"
        "assert len(t.read_trace(pathlib.Path(sys.argv[1]), sys.argv[2]).rows)\n"
        "print(len(os.listdir('/proc/self/task')) - before)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder), "engine"],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert (done.stdout.strip(), done.returncode) == ("0", 0), done.stderr


def test_equal_traces_give_equal_bytes(stored, tmp_path_factory):
    folder, engine, _ = stored
    again = tmp_path_factory.mktemp("again")
    shuffled = dict(reversed(engine.tensors.items()))
    write_trace(again, replace(handmade.copy_trace(engine), tensors=shuffled))
    for name, file in trace_files(folder, "engine").items():
        assert file.read_bytes() == trace_files(again, "engine")[name].read_bytes(), name


@st.composite
def traces(draw):
    builder = RowBuilder()
    for _ in range(draw(st.integers(0, 4))):
        builder.add(
            rid=draw(WORDS),
            phase=draw(WORDS),
            slot=draw(INTS),
            committed=draw(INTS),
            round=draw(INTS),
            lse=draw(FLOATS),
            top_ids=draw(st.lists(INTS, max_size=3)),
            top_logits=draw(st.lists(FLOATS, max_size=3)),
        )
    shape = (draw(st.integers(0, 3)), draw(st.integers(1, 4)))
    data = draw(
        st.dictionaries(UNREAD, st.one_of(INTS, WORDS, st.lists(st.floats(allow_nan=False, allow_infinity=False))))
    )
    return Trace(
        side=draw(st.sampled_from(["engine", "reference"])),
        scenario_id=draw(WORDS),
        header=data,
        rows=builder.build(),
        events=(Event(name="e", scheduler_step=1, data=data),),
        tensors={"hidden_in.DRAFT": np.full(shape, draw(FLOATS), np.float32)},
    )


@settings(deadline=None, max_examples=60)
@given(trace=traces())
def test_any_trace_comes_back_unchanged(tmp_path_factory, trace):
    folder = tmp_path_factory.mktemp("any")
    write_trace(folder, trace)
    handmade.assert_same(trace, read_trace(folder, trace.side))


def test_numbers_that_json_lacks_become_text_that_float_reads():
    made = plain({"margins": [float("inf"), np.float32("nan")], "n": np.int64(3), "t": (1, 2), "a": np.arange(2)})
    assert made == {"margins": ["inf", "nan"], "n": 3, "t": [1, 2], "a": [0, 1]}
    assert float(made["margins"][0]) == float("inf")


def refused(folder, *texts, side="engine"):
    with pytest.raises(TraceError) as caught:
        read_trace(folder, side)
    message = str(caught.value)
    for text in (*texts, "found:", "allowed:", str(folder)):
        assert text in message, message


@pytest.mark.parametrize("which", ["json", "rows", "tensors"])
def test_missing_file_is_named(stored, which):
    folder = stored[0]
    trace_files(folder, "engine")[which].unlink()
    refused(folder, "no such file", trace_files(folder, "engine")[which].name)


@pytest.mark.parametrize("which", ["json", "rows", "tensors"])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.95])
def test_truncated_file_is_damaged(stored, which, share):
    folder = stored[0]
    file = trace_files(folder, "engine")[which]
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * share)])
    refused(folder, "damaged or not ours", file.name)


@pytest.mark.parametrize("share", [0.1, 0.3, 0.5, 0.7])
def test_bytes_turned_over_inside_a_page_are_damage(stored, share):
    file = stored[0] / "engine.parquet"
    whole = bytearray(file.read_bytes())
    at = int(len(whole) * share)
    whole[at : at + 64] = bytes(255 - one for one in whole[at : at + 64])
    file.write_bytes(whole)
    refused(stored[0], "not a whole parquet file", "engine.parquet")


def edit_head(folder, **changes):
    file = trace_files(folder, "engine")["json"]
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


@pytest.mark.parametrize(("version", "advice"), [(TRACE_SCHEMA + 1, "update this one"), (0, "run again")])
def test_other_version_says_so_before_anything_else(stored, version, advice):
    edit_head(stored[0], trace_schema=version, something_new=1)
    refused(stored[0], f"trace version {version}", advice)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"foreign": 1}, "foreign"),
        ({"side": "reference"}, "'reference'"),
        ({"row_count": 7}, "7 rows"),
        ({"ends": 3}, "ends"),
    ],
)
def test_foreign_content_of_the_json_file_is_named(stored, changes, text):
    edit_head(stored[0], **changes)
    refused(stored[0], text)


def punched(table):
    """An empty cell in the first column."""
    column = pa.array([None] + [0] * (table.num_rows - 1), type=pa.int64())
    return table.set_column(0, arrow_schema().field(0), column).replace_schema_metadata(table.schema.metadata)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda table: table.replace_schema_metadata({"eaglecheck.trace": "9"}), "trace version 9"),
        (lambda table: table.append_column("mood", pa.array([1] * table.num_rows)), "unknown columns mood"),
        (lambda table: table.drop_columns(["slot"]), "missing columns slot"),
        (lambda table: table.set_column(0, "dp_rank", table.column(0).cast(pa.int8())), "other types in dp_rank"),
        (lambda table: table.replace_schema_metadata({}), "no eaglecheck version"),
        (lambda table: table.slice(1), "rows"),
        (punched, "empty cells"),
    ],
)
def test_foreign_columns_are_named(stored, change, text):
    file = trace_files(stored[0], "engine")["rows"]
    pq.write_table(change(pq.read_table(file)), file)
    refused(stored[0], text, "engine.parquet")


@pytest.mark.parametrize(
    ("tensors", "text"),
    [
        ({"hidden_in.DRAFT": np.zeros((2, 3), np.float64)}, "float64 [2, 3]"),
        ({"hidden_in.DRAFT": np.zeros(3, np.float32)}, "float32 [3]"),
        ({}, "points there"),
    ],
)
def test_foreign_tensors_are_named(stored, tensors, text):
    file = trace_files(stored[0], "engine")["tensors"]
    file.write_bytes(safetensors.numpy.save(tensors))
    refused(stored[0], text, "engine.safetensors")
