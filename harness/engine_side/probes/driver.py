"""Calls of the CUDA driver that PyTorch makes dearer than they are: copies to the host, and events that are used again.

A copy through PyTorch costs the scheduler's thread fifty microseconds and an event thirteen; called directly, four and
one. Several copies go in one call where the driver has such a call (12.8 and later). Every way is tried once on a known
pattern before it is used, so that a mistake here shows at boot and not in a trace.

Engine side: standard library and torch only.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch

#: Most copies in one call; a round has fewer places to copy from at once.
MOST_AT_ONCE = 64
#: The source is read in the stream's order, like a kernel would.
IN_STREAM_ORDER = 1
#: An event that only says whether it has happened.
WITHOUT_TIME = 2
NOT_YET = 600
DEVICE = "cuda"
#: Streams that are no handle of anybody's: the legacy default stream and its number as a handle.
LEGACY = (0, 1)

#: (to, from, bytes) of each.
Moves = Sequence[tuple[int, int, int]]


class _Attributes(ctypes.Structure):
    """How copies of a batch read; hints of places, which managed memory needs, and room for more stay zero."""

    _fields_ = (("order", ctypes.c_int), ("hints", ctypes.c_int * 15))


class Driver:
    """Copies to the host and events, of one process and the device that is current when it is made.

    batches: how copies made at one place are launched, for the handshake. RuntimeError with the driver's number where
    it refuses, or if a copy that is tried holds something else.
    """

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        self._one = self._function(
            "cuMemcpyDtoHAsync_v2", ctypes.c_void_p, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p
        )
        self._record = self._function("cuEventRecord", ctypes.c_void_p, ctypes.c_void_p)
        self._query = self._function("cuEventQuery", ctypes.c_void_p)
        self._await = self._function("cuEventSynchronize", ctypes.c_void_p)
        self._create = self._function("cuEventCreate", ctypes.POINTER(ctypes.c_void_p), ctypes.c_uint)
        self.stream = _stream_asker()
        self._many: Callable[[int, int], int] | None = None
        self._to, self._from = ((ctypes.c_uint64 * MOST_AT_ONCE)() for _ in range(2))
        self._sizes = (ctypes.c_size_t * MOST_AT_ONCE)()
        self.batches = "one by one"
        self._try_out()

    def _function(self, name: str, *kinds: Any) -> Any:
        found = getattr(self._library, name)
        found.argtypes, found.restype = kinds, ctypes.c_int
        return found

    # -- copies ------------------------------------------------------------------------------------------------

    def move(self, moves: Moves, stream: int) -> None:
        """Copy from the device to the host in a stream's order; nobody waits."""
        if len(moves) > 1 and self._many is not None and stream not in LEGACY:
            for first in range(0, len(moves), MOST_AT_ONCE):
                self._batch(self._many, moves[first : first + MOST_AT_ONCE], stream)
            return
        for to, origin, count in moves:
            if error := self._one(to, origin, count, stream):
                raise RuntimeError(f"CUDA error: the driver would not copy {count} bytes to the host ({error})")

    def _batch(self, call: Callable[[int, int], int], moves: Moves, stream: int) -> None:
        count = len(moves)
        to, origin, sizes = zip(*moves, strict=True)
        self._to[:count], self._from[:count], self._sizes[:count] = list(to), list(origin), list(sizes)
        if error := call(count, stream):
            raise RuntimeError(f"CUDA error: the driver would not copy {count} pieces to the host at once ({error})")

    def _batch_call(self) -> Callable[[int, int], int] | None:
        """(how many, stream) -> the driver's number; None where it has no such call."""
        attributes, first = _Attributes(order=IN_STREAM_ORDER), ctypes.c_size_t(0)
        pointer = ctypes.c_void_p
        before = (pointer, pointer, pointer, ctypes.c_size_t, pointer, pointer, ctypes.c_size_t)
        places = [ctypes.addressof(each) for each in (self._to, self._from, self._sizes)]
        fixed = [ctypes.addressof(each) for each in (attributes, first)]
        self._kept = attributes, first  # the driver reads them at every call
        if hasattr(self._library, "cuMemcpyBatchAsync_v2"):
            call = self._function("cuMemcpyBatchAsync_v2", *before, pointer)
            return lambda count, stream: int(call(*places, count, *fixed, 1, stream))
        if hasattr(self._library, "cuMemcpyBatchAsync"):  # 12.8 and 12.9 also say which copy failed
            failed = ctypes.c_size_t(0)
            older = self._function("cuMemcpyBatchAsync", *before, pointer, pointer)
            return lambda count, stream: int(older(*places, count, *fixed, 1, ctypes.addressof(failed), stream))
        return None

    # -- events ------------------------------------------------------------------------------------------------

    def event(self, used: Any, stream: int) -> Event:
        """An event at this place of a stream: a new one, or one whose time has passed."""
        found: Event = used if used is not None else self._new_event()
        if error := self._record(found.handle, stream):
            raise RuntimeError(f"CUDA error: the driver would not record an event ({error})")
        return found

    def _new_event(self) -> Event:
        handle = ctypes.c_void_p()
        if error := self._create(ctypes.byref(handle), WITHOUT_TIME):
            raise RuntimeError(f"CUDA error: the driver would not make an event ({error})")
        return Event(int(handle.value or 0), self._query, self._await)

    # -- trying out --------------------------------------------------------------------------------------------

    def _try_out(self) -> None:
        """Each way once; the batch call, where it is refused or wrong, is done without."""
        if found := self._wrong(self.stream()):
            raise RuntimeError(f"CUDA error: copies to the host do not work here: {found}")
        self._many = self._batch_call()
        if self._many is None:
            self.batches = "one by one: this driver has no call for many"
            return
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            found = self._wrong(self.stream())
        if found:
            self._many, self.batches = None, f"one by one: {found}"
        else:
            self.batches = "many at once"

    def _wrong(self, stream: int) -> str:
        """What is wrong with three copies of different sizes in this stream; '' if they are right."""
        device = [torch.arange(5, 5 + size, dtype=torch.uint8, device=DEVICE) for size in (1, 24, 200)]
        host = [pinned(tensor.numel()).zero_() for tensor in device]
        pairs = list(zip(host, device, strict=True))
        try:
            self.move([(to.data_ptr(), given.data_ptr(), given.numel()) for to, given in pairs], stream)
            event = self.event(None, stream)
            event.synchronize()
            there = event.query()
        except RuntimeError as error:
            return str(error)
        if not there:
            return "an event that was waited for has not happened"
        return "" if all(torch.equal(to, given.cpu()) for to, given in pairs) else "what arrives is not what was copied"


class Event:
    """One of the driver's."""

    __slots__ = ("_await", "_query", "handle")

    def __init__(self, handle: int, query: Any, await_: Any) -> None:
        self.handle, self._query, self._await = handle, query, await_

    def query(self) -> bool:
        """Whether it has happened."""
        error = self._query(self.handle)
        if error not in (0, NOT_YET):
            raise RuntimeError(f"CUDA error: the device failed before a round's bytes arrived ({error})")
        return bool(error == 0)

    def synchronize(self) -> None:
        """Wait until it has."""
        if error := self._await(self.handle):
            raise RuntimeError(f"CUDA error: the device failed before a round's bytes arrived ({error})")


def pinned(size: int) -> torch.Tensor:
    """uint8 [size] of the host that a device copies into by itself."""
    return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)


def _stream_asker() -> Callable[[], int]:
    """A function for the current stream's handle; PyTorch's own way costs eight microseconds."""
    quick = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    device = torch.cuda.current_device()
    return lambda: int(torch.cuda.current_stream().cuda_stream if quick is None else quick(device))
