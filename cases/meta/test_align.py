"""Alignment joins by meaning: order never matters, and a key on one side only is never dropped."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cases.meta import handmade
from harness.contract.align import align, unpaired
from harness.contract.rows import RowBuilder
from harness.contract.types import Kind

KEYS = st.tuples(
    st.integers(0, 1), st.sampled_from(["r0", "r1"]), st.integers(0, 1), st.integers(0, 3), st.sampled_from("AB")
)


def rows_of(keys):
    builder = RowBuilder()
    for dp_rank, rid, attempt, committed, phase in keys:
        builder.add(rid=rid, phase=phase, slot=0, committed=committed, round=0, dp_rank=dp_rank, attempt=attempt)
    return builder.build()


@given(st.lists(KEYS, max_size=25), st.lists(KEYS, max_size=25))
def test_pairs_share_their_key_and_every_row_is_accounted_for(mine, theirs):
    engine, reference = rows_of(mine), rows_of(theirs)
    aligned = align(engine, reference)
    for one, other in zip(aligned.engine, aligned.reference, strict=True):
        assert engine.key(int(one)) == reference.key(int(other))
    counted = np.concatenate([aligned.engine, aligned.engine_only, aligned.engine_repeats])
    assert sorted(counted.tolist()) == list(range(len(mine)))
    assert {mine[index] for index in aligned.engine_only} == set(mine) - set(theirs)
    assert {theirs[index] for index in aligned.reference_only} == set(theirs) - set(mine)
    assert len(aligned.engine_repeats) == len(mine) - len(set(mine))
    assert len(aligned.reference_repeats) == len(theirs) - len(set(theirs))


@given(st.permutations(range(40)))
def test_order_of_arrival_does_not_matter(order):
    engine, reference = handmade.build(handmade.scenario(prompts=(9, 4)))
    mixed = handmade.take_rows(reference.rows, [*order, *range(40, len(reference.rows))])
    aligned = align(engine.rows, mixed)
    assert len(aligned.engine) == len(engine.rows)
    assert not list(unpaired(aligned, engine.rows, mixed))
    for one, other in zip(aligned.engine, aligned.reference, strict=True):
        assert engine.rows.key(int(one)) == mixed.key(int(other))


def test_row_on_one_side_only_is_missing_or_extra():
    engine, reference = handmade.build(handmade.scenario())
    shorter = handmade.take_rows(engine.rows, range(1, len(engine.rows)))
    (found,) = unpaired(align(shorter, reference.rows), shorter, reference.rows)
    assert (found.kind, found.key) == (Kind.MISSING_ROW, engine.rows.key(0))
    (found,) = unpaired(align(engine.rows, shorter), engine.rows, shorter)
    assert (found.kind, found.key) == (Kind.EXTRA_ROW, engine.rows.key(0))


def test_repeated_key_is_extra_on_either_side():
    engine, reference = handmade.build(handmade.scenario())
    twice = handmade.take_rows(engine.rows, [0, *range(len(engine.rows))])
    (found,) = unpaired(align(twice, reference.rows), twice, reference.rows)
    assert (found.kind, found.hint) == (Kind.EXTRA_ROW, "twice")
    (found,) = unpaired(align(engine.rows, twice), engine.rows, twice)
    assert (found.kind, found.hint) == (Kind.EXTRA_ROW, "twice-in-reference")


def test_far_apart_keys_do_not_collide():
    keys = [(2**31, "r0", 2**40, 2**50, "A"), (0, "r0", 2**40, 2**50, "A"), (2**31, "r0", 2**40, 2**50, "A")]
    aligned = align(rows_of(keys), rows_of(keys[:2]))
    assert (aligned.engine.tolist(), aligned.reference.tolist()) == ([0, 1], [0, 1])
    assert aligned.engine_repeats.tolist() == [2]
