"""Which KV slots attention reads: worked out of a plan, written down row by row, kept on disk and read again."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from harness.archive.trace_table import read_rows, rows_bytes
from harness.contract.rows import ADDED, Block, Ragged, joined, slots_read
from harness.driving.read_slots import Plan
from harness.engine_side.probes.cached_rows import CachedRows


def ints(*values):
    return np.asarray(values, dtype=np.int64)


def lists(plan, rows, owners):
    """What each row reads, in full, after it was written down and read again."""
    found = plan.read_by(ints(*rows), ints(*owners))
    block = Block.of("EXTEND", np.asarray(["x"] * len(rows), dtype=object), slots_shared=found["read_shared"])
    block.lists["slots_read"] = Ragged(found["read_slots"], found["read_offsets"])
    kept = joined([block])
    shares = [np.flatnonzero(ints(*owners) == owner).tolist() for owner in dict.fromkeys(owners)]
    return [read.tolist() for share in shares for read in slots_read(kept, share)], found


def test_a_draft_step_reads_what_its_sequence_lists_and_a_row_without_one_nothing():
    plan = Plan(starts=ints(0, 3, 5), cached=ints(7, 8, 40, 9, 41), slots=ints(40, 41, 42))
    assert lists(plan, (0, 1, 2), (0, 1, 2))[0] == [[7, 8, 40], [9, 41], []]


def test_beams_of_one_request_write_down_what_they_add():
    plan = Plan(starts=ints(0, 3, 6), cached=ints(7, 8, 40, 7, 8, 41), slots=ints(40, 41))
    read, found = lists(plan, (0, 1), (0, 0))
    assert read == [[7, 8, 40], [7, 8, 41]]
    assert (found["read_shared"].tolist(), found["read_slots"].tolist()) == ([0, 2], [7, 8, 40, 41])


def test_rows_of_an_extend_read_the_prefix_and_the_rows_before_them():
    plan = Plan(starts=ints(0, 2, 2), cached=ints(7, 8), slots=ints(9, 10, 11, 20, 21), rows=ints(0, 3, 5))
    read, found = lists(plan, (0, 1, 3), (0, 0, 1))
    assert read == [[7, 8, 9], [7, 8, 9, 10], [20]]
    assert found["read_shared"].tolist() == [0, 3, 0]


def test_blocks_of_another_plan_cut_through_requests_and_rows_behind_them_read_nothing():
    plan = Plan(starts=ints(0, 1, 3), cached=ints(5, 6, 7), slots=ints(9, 10, 11, 12, 13), rows=ints(0, 3, 4))
    assert lists(plan, (0, 1, 2, 3, 4), (0, 0, 1, 1, 1))[0] == [[5, 9], [5, 9, 10], [5, 9, 10, 11], [6, 7, 12], []]


def test_a_mask_says_which_nodes_a_node_sees_and_no_more_than_it_holds():
    mask = ints(1, 1, 0, 0, 1, 1, 1, 0, 1, 1, 0, 1)  # two cached slots would be columns 0 .. 0: one is
    plan = Plan(starts=ints(0, 1), cached=ints(5), slots=ints(9, 10, 11), rows=ints(0, 3), mask=mask, masks=ints(0, 12))
    assert lists(plan, (0, 1, 2), (0, 0, 0))[0] == [[5, 9], [5, 9, 10], [5, 9, 11]]
    short = Plan(starts=ints(0, 1), cached=ints(5), slots=ints(9), rows=ints(0, 1), mask=ints(1), masks=ints(0, 1))
    assert lists(short, (0,), (0,))[0] == [[]]
    hidden = Plan(
        starts=ints(0, 1),
        cached=ints(5),
        slots=ints(9),
        rows=ints(0, 1),
        mask=ints(0, 1),
        masks=ints(0, 2),
        prefix_masked=True,
    )
    assert lists(hidden, (0,), (0,))[0] == [[9]]


def test_changed_slots_belong_to_the_requests_that_read_them():
    plan = Plan(starts=ints(0, 2, 4), cached=ints(7, 8, 9, 10), slots=ints(20, 21), changed=ints(0, 1, 0, 0))
    assert plan.changed_for(ints(0, 1), ints(0, 1), 2) == [[8], []]
    sound = Plan(starts=ints(0, 2), cached=ints(7, 8), slots=ints(20), changed=ints(0, 0))
    assert sound.changed_for(ints(0), ints(0), 1) == []


def test_traces_of_before_have_no_record_and_are_read(tmp_path):
    rows = joined([Block.of("DRAFT", np.asarray(["a", "a"], dtype=object), slots_shared=0)])
    table = pq.read_table(pa.BufferReader(rows_bytes(rows)))
    assert set(ADDED) < set(table.column_names)
    old = table.drop_columns(list(ADDED)).replace_schema_metadata({b"eaglecheck.trace": b"2"})
    file = tmp_path / "engine.parquet"
    pq.write_table(old, file, write_page_checksum=True)
    again = read_rows(file, file.read_bytes(), 2)
    assert next(iter(slots_read(rows, [0]))).tolist() == []
    assert list(slots_read(again, [0, 1])) == [None, None]


def test_a_cached_row_that_changes_is_said_once_and_what_others_may_write_is_not():
    keys = torch.arange(24.0).view(8, 1, 3)
    buffers, rows, some = (keys, keys + 0.5), CachedRows(), torch.tensor([1, 2])
    assert rows.changed(buffers, some, torch.tensor([1, 2, 3])).tolist() == [False, False, False]
    keys[2] = 0
    assert rows.changed(buffers, torch.tensor([4]), torch.tensor([1, 2, 4])).tolist() == [False, True, False]
    assert rows.changed(buffers, torch.tensor([5]), torch.tensor([1, 2, 4])).tolist() == [False, False, False]
    rows.lost(buffers, some)
    keys[1] = 0
    assert not rows.changed(buffers, torch.tensor([5]), some).any()
    outside = torch.tensor([-1, 8, 1 << 30])
    assert not rows.changed(buffers, torch.tensor([5]), outside).any(), "whoever judges what is read finds them"
    rows.forget()
    keys[4] = 0
    assert not rows.changed(buffers, torch.tensor([5]), torch.tensor([4])).any()
