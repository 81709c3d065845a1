"""The transfer backend of ours, without SGLang: bytes arrive where they were asked for, once, and as the rules say."""

from types import SimpleNamespace

import numpy as np
import pytest

from harness.engine_side.transfer_backend.classes import make_classes
from harness.engine_side.transfer_backend.files import RULES, Room, RuleError, Rules, Want, read_items, write_items

POLL = SimpleNamespace(Failed=0, Bootstrapping=1, WaitingForInput=2, Transferring=3, Success=4)
CONN = SimpleNamespace(
    KVPoll=POLL, KVArgs=object, BaseKVManager=object, BaseKVSender=object, BaseKVReceiver=object,
    BaseKVBootstrapServer=object,
)  # fmt: skip
PAGE = 8


@pytest.fixture(autouse=True)
def _no_rules():
    RULES.clear()
    yield
    RULES.clear()


def side(classes, rank=0):
    """A manager of a rank over one KV buffer of ten pages and one metadata buffer of four rows, and both as arrays."""
    kv, rows = np.zeros((10, PAGE), dtype=np.uint8), np.zeros((4, PAGE), dtype=np.uint8)
    args = SimpleNamespace(
        kv_data_ptrs=[kv.ctypes.data], kv_item_lens=[PAGE], aux_data_ptrs=[rows.ctypes.data], aux_item_lens=[PAGE]
    )
    args.engine_rank = rank
    return classes["manager"](args, "x", SimpleNamespace(tp_size=2, dp_size=1)), kv, rows


@pytest.fixture
def pair(tmp_path):
    classes = make_classes(CONN, folder=str(tmp_path))
    (left, kv, rows), (right, their_kv, their_rows) = side(classes), side(classes)
    kv[:] = np.arange(10, dtype=np.uint8)[:, None] + 1
    rows[:] = np.arange(4, dtype=np.uint8)[:, None] + 101
    return SimpleNamespace(
        sender=classes["sender"](left, "here", 7),
        receiver=classes["receiver"](right, "here", 7),
        again=lambda: classes["receiver"](right, "here", 7),
        kv=their_kv,
        rows=their_rows,
    )


def send(pair, *, pages=((2, 3), (5,)), wanted=(8, 0, 4)):
    """Decode asks, prefill sends part by part."""
    pair.receiver.init(0)
    pair.receiver.send_metadata(np.asarray(wanted), 1)
    pair.sender.init(sum(len(part) for part in pages), 3)
    for part in pages:
        pair.sender.send(np.asarray(part))


def test_items_are_read_and_written_by_address():
    held = np.arange(24, dtype=np.uint8).reshape(6, 4)
    assert read_items(held.ctypes.data, 4, [5, 1]).tolist() == [20, 21, 22, 23, 4, 5, 6, 7]
    write_items(held.ctypes.data, 4, [0], np.full(4, 9, dtype=np.uint8))
    assert held[0].tolist() == [9] * 4


def test_pages_arrive_in_order_where_they_were_asked_for_with_their_metadata(pair):
    send(pair)
    assert pair.receiver.poll() == POLL.Success
    assert pair.sender.poll() == POLL.Success
    assert pair.kv[[8, 0, 4], 0].tolist() == [3, 4, 6]
    assert pair.kv[[1, 2, 3, 5, 6, 7, 9]].sum() == 0
    assert pair.rows[1, 0] == 104


def test_each_side_waits_for_the_other_step_by_step(pair):
    assert pair.sender.poll() == POLL.Bootstrapping
    assert pair.receiver.poll() == POLL.Bootstrapping
    pair.receiver.init(0)
    assert pair.receiver.poll() == POLL.WaitingForInput
    pair.receiver.send_metadata(np.asarray([8, 0]), 1, decode_prefix_len=6)
    assert pair.sender.poll() == POLL.WaitingForInput
    assert pair.sender.pop_decode_prefix_len() == 6
    pair.sender.init(2, 3)
    pair.sender.send(np.asarray([2]))
    assert pair.receiver.poll() == POLL.Transferring
    pair.sender.send(np.asarray([3]))
    assert pair.receiver.poll() == POLL.Success


def test_what_is_held_arrives_when_it_is_released(pair):
    RULES.apply("hold", [7])
    send(pair)
    assert (pair.sender.poll(), pair.receiver.poll()) == (POLL.Transferring, POLL.Transferring)
    assert pair.kv.sum() == 0
    RULES.apply("release", [7])
    assert (pair.sender.poll(), pair.receiver.poll()) == (POLL.Success, POLL.Success)


@pytest.mark.parametrize(
    ("rule", "room", "sender", "receiver"),
    [("fail", 8, "Success", "Success"), ("fail", 7, "Failed", "Failed"), ("drop", 7, "Success", "Transferring")],
)
def test_what_fails_fails_on_both_sides_what_is_dropped_on_one_and_other_rooms_do_not(
    pair, rule, room, sender, receiver
):
    RULES.apply(rule, [room])
    send(pair)
    assert (pair.sender.poll(), pair.receiver.poll()) == (getattr(POLL, sender), getattr(POLL, receiver))
    assert bool(pair.kv.sum()) is (room == 8)


def test_an_abort_on_one_side_fails_the_other(pair):
    send(pair)
    pair.receiver.abort()
    assert (pair.receiver.poll(), pair.sender.poll()) == (POLL.Failed, POLL.Failed)


@pytest.mark.parametrize("sent", [((2, 3), (5,)), ((2, 3),)])
def test_what_is_late_lands_where_it_was_asked_for_though_its_request_is_gone(pair, sent):
    RULES.apply("late", [7])
    pair.receiver.init(0)
    pair.receiver.send_metadata(np.asarray((8, 0, 4)), 1)
    pair.sender.init(3, 3)
    for part in sent:
        pair.sender.send(np.asarray(part))
    assert (pair.sender.poll(), pair.receiver.poll()) == (
        POLL.Transferring if len(sent) == 2 else POLL.WaitingForInput,
        POLL.Transferring,
    )
    pair.receiver.abort()
    assert (pair.sender.poll(), pair.receiver.poll()) == (POLL.Failed, POLL.Failed)
    manager = pair.receiver.kv_mgr
    assert pair.receiver.abort_notified
    assert not manager.is_abort_release_safe(7, 1)
    assert pair.kv.sum() == 0
    RULES.apply("land", [7])
    assert pair.kv[[8, 0, 4], 0].tolist() == [3, 4, 6 * (len(sent) == 2)]
    assert pair.rows[1, 0] == 104 * (len(sent) == 2)
    assert not pair.receiver.abort_notified
    assert manager.is_abort_release_safe(7, 1)


def test_nothing_is_handed_over_twice(pair):
    send(pair)
    assert pair.receiver.poll() == POLL.Success
    second = pair.again()
    second.init(0)
    second.send_metadata(np.asarray([1, 2, 3]), 0)
    assert second.poll() == POLL.Transferring


def test_an_unknown_rule_is_refused_with_the_known_ones():
    with pytest.raises(RuleError, match="allowed: hold, release, fail, drop, late, land"):
        Rules().apply("lose", [1])


def test_a_room_knows_what_was_asked(tmp_path):
    room = Room(str(tmp_path), 3, 0)
    assert room.asked() is None
    room.ask(Want([4, 1], 2, 0))
    assert room.asked() == Want([4, 1], 2, 0)


def test_ranks_meet_the_rank_of_their_number(tmp_path):
    classes = make_classes(CONN, folder=str(tmp_path))
    ranks = [(side(classes, rank), side(classes, rank)) for rank in (0, 1)]
    pairs = [(classes["sender"](left[0], "", 7), classes["receiver"](right[0], "", 7)) for left, right in ranks]
    for rank, (sender, receiver) in enumerate(pairs):
        ranks[rank][0][1][:] = rank + 1
        receiver.init(0)
        receiver.send_metadata(np.asarray([4]), 1)
        sender.init(1, 3)
    pairs[1][0].send(np.asarray([2]))
    assert [receiver.poll() for _, receiver in pairs] == [POLL.Transferring, POLL.Success]
    pairs[0][0].send(np.asarray([2]))
    assert pairs[0][1].poll() == POLL.Success
    assert [int(ranks[rank][1][1][4, 0]) for rank in (0, 1)] == [1, 2]
