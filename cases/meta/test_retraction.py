"""Retraction of some of the requests that run, on a pretended SGLang: who is asked for, who goes, and what is told."""

import types

import pytest

from harness.engine_side.hooks import HookRegistry
from harness.engine_side.host.retraction import Retraction, forget_retractions


class Req:
    def __init__(self, rid):
        self.rid = f"{rid}@1"


def releases(*, with_order, asked_to_sort=False):
    """(scheduler module, batch module) with as much of SGLang as retraction needs; memory: what the pool says.

    asked_to_sort: 0.5.16, which names the order whether it may sort, and says no under speculation.
    """

    class ScheduleBatch:
        memory = True

        def __init__(self, *rids):
            self.reqs = [Req(rid) for rid in rids]

        def check_decode_mem(self, selected_indices=None):
            return self.memory

        if with_order:

            @staticmethod
            def _get_decode_retraction_order(reqs, *, allow_policy_sort=True):
                return list(range(len(reqs)))[:: -1 if allow_policy_sort else 1]

        def retract_decode(self):
            told = {"allow_policy_sort": False} if asked_to_sort else {}
            kept = self._get_decode_retraction_order(self.reqs, **told) if with_order else list(range(len(self.reqs)))
            gone, first = [], True
            while len(kept) > 1 and (first or not self.check_decode_mem(selected_indices=kept)):
                first = False
                gone.append(self.reqs[kept.pop()])
            self.reqs = [self.reqs[i] for i in kept]
            return gone, 0.5, []

    class Scheduler:
        waits = False

        def update_running_batch(self, batch):
            if self.waits:
                return None
            if not batch.check_decode_mem() or module.TEST_RETRACT:
                batch.retract_decode()
            return batch

    module = types.SimpleNamespace(
        __name__="scheduler", Scheduler=Scheduler, TEST_RETRACT=False, TEST_RETRACT_INTERVAL=3
    )
    return module, types.SimpleNamespace(__name__="batch", ScheduleBatch=ScheduleBatch)


def driven(asked, *rids, with_order=True, asked_to_sort=False, memory=True):
    """What is left of a batch after the next decode, and what was told of it."""
    module, batches = releases(with_order=with_order, asked_to_sort=asked_to_sort)
    made = Retraction()
    made.install(HookRegistry(), module, batches)
    made.ask(asked)
    batch = batches.ScheduleBatch(*rids)
    batch.memory = memory
    module.Scheduler().update_running_batch(batch)
    assert (module.TEST_RETRACT, module.TEST_RETRACT_INTERVAL) == (False, 3)
    return [req.rid for req in batch.reqs], made.take()


def test_nothing_is_taken_back_where_nothing_was_asked():
    assert driven(None, "a", "b", "c") == (["a@1", "b@1", "c@1"], [])


def test_the_named_go_and_the_others_stay_in_the_order_of_the_release():
    left, told = driven(["b"], "a", "b", "c")
    assert left == ["c@1", "a@1"]
    assert told == [{"rids": ["b"], "kept": [2, 0], "reason": "asked"}]


@pytest.mark.parametrize("release", [{"with_order": False}, {"asked_to_sort": True}], ids=["no order", "must not sort"])
def test_a_release_that_takes_from_the_end_takes_those_behind_too(release):
    left, told = driven(["b"], "a", "b", "c", **release)
    assert left == ["a@1"]
    assert told == [{"rids": ["c", "b"], "kept": [0], "reason": "asked"}]


def test_the_switch_takes_whom_sglang_would_take_first():
    assert driven([], "a", "b", "c") == (["c@1", "b@1"], [{"rids": ["a"], "kept": [2, 1], "reason": "test"}])


@pytest.mark.parametrize("rids", [("a",), ("a", "b")])
def test_the_last_one_is_never_taken(rids):
    left, _ = driven(list(rids), *rids)
    assert len(left) == 1


def test_a_pool_that_runs_out_is_told_of_as_that():
    left, told = driven(None, "a", "b", "c", memory=False)
    assert (left, told[0]["reason"]) == (["c@1"], "pool")


def test_what_was_asked_waits_for_a_batch_that_decodes_and_holds_for_one():
    module, batches = releases(with_order=True)
    made = Retraction()
    made.install(HookRegistry(), module, batches)
    made.ask(["a"])
    scheduler, batch = module.Scheduler(), batches.ScheduleBatch("a", "b", "c")
    scheduler.waits = True
    scheduler.update_running_batch(batch)
    assert made.take() == []
    scheduler.waits = False
    scheduler.update_running_batch(batch)
    batch.reqs.append(Req("a"))
    scheduler.update_running_batch(batch)
    assert [one["rids"] for one in made.take()] == [["a"]]
    assert made.take() == []


def test_what_is_kept_free_after_a_retraction_is_forgotten_before_the_next_scenario():
    old = types.SimpleNamespace(new_token_ratio=1.0, init_new_token_ratio=0.07)
    forget_retractions(old)
    assert old.new_token_ratio == 0.07
    tracker = types.SimpleNamespace(current=1.0)
    tracker.reset = lambda: vars(tracker).update(current=0.07)
    forget_retractions(types.SimpleNamespace(new_token_ratio_tracker=tracker))
    assert tracker.current == 0.07
