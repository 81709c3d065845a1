"""Copies of a prefix's tail: which slots they are, how a lost one is seen, and what the check makes of it."""

from types import SimpleNamespace

import torch

import harness.checks.judge  # noqa: F401  registers the checks
from cases.meta.batches import event, trace
from cases.meta.handmade import asking
from harness.checks.evidence import gather
from harness.checks.registry import CHECKS, run_check
from harness.contract.requests import RequestSpec
from harness.engine_side.probes.verify_probe import holes, wrong_copies

#: Two requests, pages of four, two branches: 6 tokens are one page and two more, 8 are two pages and nothing.
ROWS = torch.arange(2 * 24).view(2, 24) + 100
BASE, TAIL, PAGES = torch.tensor([4, 8]), torch.tensor([2, 0]), torch.tensor([2, 1])
FOUND = holes(ROWS, BASE, TAIL, PAGES, topk=2, page=4)
SCENARIO = asking(*(RequestSpec(rid=rid, input_ids=(1,)) for rid in "ab"))


def pool(copied):
    """A pool whose layer 0 holds a number of its own in every slot, or the tail's where that was copied."""
    keys = torch.arange(200.0).view(200, 1, 1).repeat(1, 2, 3)
    values = keys + 0.5
    for source, copy in copied:
        keys[copy], values[copy] = keys[source].clone(), values[source].clone()
    return SimpleNamespace(start_layer=0, get_key_buffer=lambda _layer: keys, get_value_buffer=lambda _layer: values)


def judged(wrong):
    batch = {"round": 3, "rids": ["a", "b"], "attempts": [0, 0], "committed": [6, 8]}
    told = event("tails", 4, **batch, holes=[2, 0], wrong=[wrong, 0])
    return run_check(CHECKS["tails"], gather(SCENARIO, trace(events=[told]), None))


def test_holes_are_the_first_slots_of_every_branch_but_the_first():
    # the second branch begins two pages behind the first one's first page, at position 12
    assert FOUND == [(0, 104, 112), (0, 105, 113)]
    assert [copy for _, _, copy in holes(ROWS, BASE, TAIL, PAGES, topk=3, page=4)] == [112, 113, 120, 121]
    assert holes(ROWS, BASE, TAIL, PAGES, topk=1, page=4) == []


def test_a_copy_that_was_not_made_is_seen():
    copies = [(source, copy) for _, source, copy in FOUND]
    assert wrong_copies(pool(copies), FOUND) == []
    assert wrong_copies(pool(copies[1:]), FOUND) == [0]
    assert wrong_copies(pool([]), FOUND) == [0, 0]
    assert wrong_copies(pool([]), []) == []


def test_copies_that_hold_are_counted_and_lost_ones_are_a_finding():
    sound = judged(0)
    assert (sound.divergences, sound.compared) == ([], {"cache_slots": 2})
    (found,) = judged(1).divergences
    assert found.signature == "CACHE_SLOT:tails:DRAFT:prefix-tail-not-copied"
    assert (found.key.rid, found.key.committed, found.round) == ("a", 6, 3)
