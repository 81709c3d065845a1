"""The driver's calls, on a pretended library that copies on a host: many at once, one by one, and what is wrong."""

import ctypes
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from harness.engine_side.probes import driver
from harness.engine_side.probes.driver import MOST_AT_ONCE, Driver
from harness.engine_side.probes.staging import StagingBuffer

SIDE, DEFAULT = 77, 0


class Library:
    """Every function as the driver's headers declare it; calls keeps (name, pieces, stream)."""

    def __init__(self, *, batch="cuMemcpyBatchAsync_v2", refuses=0, spoils=False):
        self.calls, self.events = [], []

        def at(address, kind, i):
            return ctypes.cast(address, ctypes.POINTER(kind))[i]

        def many(to, origin, sizes, count, attributes, firsts, kinds, *rest):
            failed, stream = rest if len(rest) == 2 else (None, rest[0])
            self.calls.append((batch, count, stream))
            assert (at(attributes, ctypes.c_int, 0), at(firsts, ctypes.c_size_t, 0), kinds) == (1, 0, 1)
            assert (failed is None) == (batch == "cuMemcpyBatchAsync_v2")
            for i in range(0 if refuses else count - spoils):
                ctypes.memmove(
                    at(to, ctypes.c_uint64, i), at(origin, ctypes.c_uint64, i), at(sizes, ctypes.c_size_t, i)
                )
            return refuses

        def one(to, origin, count, stream):
            self.calls.append(("one", 1, stream))
            ctypes.memmove(to, origin, count)
            return 0

        def create(place, flags):
            self.events.append(flags)
            place._obj.value = len(self.events)
            return 0

        self.cuMemcpyDtoHAsync_v2 = one
        self.cuEventRecord = lambda _event, _stream: 0
        self.cuEventQuery = lambda _event: 0
        self.cuEventSynchronize = lambda _event: 0
        self.cuEventCreate = create
        if batch:
            setattr(self, batch, many)


@pytest.fixture
def made(monkeypatch):
    """Makes a Driver of a library; stream: what the current one is, after it was tried."""
    now = SimpleNamespace(stream=DEFAULT)

    def stream(_side):
        now.stream = SIDE
        return nullcontext()

    monkeypatch.setattr(driver, "DEVICE", "cpu")
    monkeypatch.setattr(driver, "pinned", lambda size: torch.empty(size, dtype=torch.uint8))
    monkeypatch.setattr(driver, "_stream_asker", lambda: lambda: now.stream)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: SimpleNamespace(wait_stream=lambda _other: None))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "stream", stream)

    def make(library):
        monkeypatch.setattr(driver.ctypes, "CDLL", lambda _name: library)
        found = Driver()
        library.calls.clear()
        return found

    return make


def moved(one, count, *, stream):
    """Whether `count` pieces arrive."""
    given = [torch.full((3,), i, dtype=torch.uint8) for i in range(count)]
    host = [torch.zeros(3, dtype=torch.uint8) for _ in range(count)]
    one.move([(to.data_ptr(), origin.data_ptr(), 3) for to, origin in zip(host, given, strict=True)], stream)
    return all(torch.equal(to, origin) for to, origin in zip(host, given, strict=True))


@pytest.mark.parametrize("batch", ["cuMemcpyBatchAsync_v2", "cuMemcpyBatchAsync"])
def test_copies_of_one_place_go_in_one_call_where_the_driver_has_it(made, batch):
    library = Library(batch=batch)
    one = made(library)
    assert one.batches == "many at once"
    assert moved(one, 3, stream=SIDE)
    assert moved(one, MOST_AT_ONCE + 2, stream=SIDE)
    assert moved(one, 1, stream=SIDE)
    assert library.calls == [(batch, 3, SIDE), (batch, MOST_AT_ONCE, SIDE), (batch, 2, SIDE), ("one", 1, SIDE)]


def test_the_legacy_default_stream_takes_them_one_by_one(made):
    library = Library()
    assert moved(made(library), 2, stream=DEFAULT)
    assert library.calls == [("one", 1, DEFAULT)] * 2


@pytest.mark.parametrize(
    ("library", "said"),
    [
        (Library(batch=""), "one by one: this driver has no call for many"),
        (Library(refuses=801), "would not copy 3 pieces to the host at once (801)"),
        (Library(spoils=True), "one by one: what arrives is not what was copied"),
    ],
    ids=["old", "refused", "wrong"],
)
def test_where_that_call_is_not_there_or_does_not_work_it_is_done_without(made, library, said):
    one = made(library)
    assert said in one.batches
    assert moved(one, 3, stream=SIDE)
    assert {name for name, _, _ in library.calls} == {"one"}


def test_copies_that_do_not_work_at_all_are_an_error_at_boot(made):
    library = Library()
    library.cuMemcpyDtoHAsync_v2 = lambda *_given: 201
    with pytest.raises(RuntimeError, match=r"copies to the host do not work here: .*\(201\)"):
        made(library)


def test_an_event_is_made_once_and_recorded_again(made):
    library = Library()
    one = made(library)
    before = len(library.events)
    event = one.event(None, SIDE)
    assert one.event(event, SIDE) is event
    assert len(library.events) == before + 1
    assert set(library.events) == {2}  # CU_EVENT_DISABLE_TIMING
    library.cuEventQuery = None
    event._query = lambda _handle: driver.NOT_YET
    assert not event.query()
    event._query = lambda _handle: 700
    with pytest.raises(RuntimeError, match="700"):
        event.query()


class OnDevice:
    """Stands for a contiguous tensor of a device; address: for whoever copies."""

    is_cuda, dtype, shape, nbytes, _version = True, torch.int64, torch.Size([2]), 16, 0

    def __init__(self, address):
        self.address = address

    def data_ptr(self):
        return self.address

    def is_contiguous(self):
        return True


@pytest.fixture
def buffered():
    """A staging buffer, what it launched (origins, stream), the current stream, and how often it waited for all."""
    now = SimpleNamespace(stream=SIDE, launched=[], waits=0)

    def wait():
        now.waits += 1

    now.staging = StagingBuffer(
        move=lambda moves, stream: now.launched.append(([origin for _, origin, _ in moves], stream)),
        event=lambda used, stream: used or SimpleNamespace(stream=stream, query=lambda: True, synchronize=lambda: None),
        new=lambda size: torch.empty(size, dtype=torch.uint8),
        wait=wait,
        stream=lambda: now.stream,
    )
    return now


def test_what_waits_for_the_end_of_a_round_is_launched_in_one_go(buffered):
    buffered.staging.held({"a": OnDevice(1)})
    buffered.staging.stage_later(OnDevice(2))
    buffered.staging.copied({"b": OnDevice(3), "c": OnDevice(4)})
    buffered.staging.held({"d": OnDevice(5), "none": None})
    buffered.staging.stage_later(OnDevice(6))
    assert buffered.launched == [([3, 4], SIDE)]
    buffered.staging.close_round()
    assert buffered.launched == [([3, 4], SIDE), ([2, 6, 1, 5], SIDE)]
    buffered.staging.close_round()
    assert len(buffered.launched) == 2


def test_where_the_stream_changed_meanwhile_the_device_is_waited_for(buffered):
    buffered.staging.held({"a": OnDevice(1)})
    buffered.stream = 5
    buffered.staging.close_round()
    assert (buffered.launched, buffered.waits) == ([([1], 5)], 1)


def test_a_round_has_arrived_when_every_stream_it_used_has(buffered):
    buffered.staging.stage(OnDevice(1))
    buffered.stream = 5
    buffered.staging.stage(OnDevice(2))
    arrival = buffered.staging.close_round()
    assert [event.stream for event in arrival.events] == [SIDE, 5]
    arrival.events[1].query = lambda: False
    assert not arrival.ready()
    arrival.events[1].query = lambda: True
    assert arrival.ready()


def test_an_event_comes_back_once_its_round_was_read(buffered):
    buffered.staging.stage(OnDevice(1))
    first = buffered.staging.close_round()
    buffered.staging.stage(OnDevice(1))
    second = buffered.staging.close_round()
    assert second.events != first.events
    first.bytes()
    buffered.staging.stage(OnDevice(1))
    assert buffered.staging.close_round().events == first.events
