"""What travels between the control side and the engine side: frames over a local stream socket, and a round's bytes.

Both sides: standard library and NumPy only (this file is loaded by path inside SGLang's environment).
It must not know what the messages mean.

A frame is `>I header length | header | arrays back to back`; the header's `_arrays` lists name, dtype and shape, and
`_size` says how many bytes of arrays follow, so that a frame is three reads whatever it holds. The header is JSON, or,
where the first bit of its length says so, marshalled: that takes a quarter of the time, and is for what is sent while a
scheduler waits. A round of the engine is one array of bytes with all its tensors, and the fields that find each again.
"""

from __future__ import annotations

import json
import marshal
import math
import socket
import struct
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

_LENGTH = struct.Struct(">I")
#: Of a length: its header is marshalled, in a format that every Python of either side reads.
_MARSHALLED = 1 << 31
MARSHAL = 4
#: numpy's short name of a dtype -> the name in a frame. Its long one takes microseconds to ask for.
_NAMES = {"<i8": "int64", "<i4": "int32", "<f4": "float32", "|b1": "bool", "|u1": "uint8"}
_TYPES = {name: np.dtype(short) for short, name in _NAMES.items()}
_ENCODE = json.JSONEncoder(separators=(",", ":")).encode


class WireClosed(ConnectionError):
    """The peer closed the connection (it ended, or was ended)."""


Held = dict[str, np.ndarray] | dict[str, np.ndarray | bytes]


def encode(message: dict[str, Any]) -> bytes:
    """One frame without arrays, as bytes."""
    return b"".join(_parts(message, None, quick=False)[0])


def _parts(message: dict[str, Any], arrays: Held | None, *, quick: bool) -> tuple[list[bytes | memoryview], int]:
    """A frame as what can be sent without copying the arrays, and how long it is."""
    table, chunks, size = [], list[bytes | memoryview](), 0
    for name, array in (arrays or {}).items():
        if isinstance(array, bytes):
            table.append((name, "uint8", (len(array),)))
            chunks.append(array)
            size += len(array)
            continue
        kind = _NAMES.get(array.dtype.str)
        if kind is None:
            raise TypeError(f"array {name!r} has dtype {array.dtype}; allowed: {', '.join(_TYPES)}")
        table.append((name, kind, array.shape))
        plain = kind == "uint8" and array.ndim == 1 and array.flags.c_contiguous  # a round's bytes
        chunks.append(array.data if plain else np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        size += array.nbytes
    whole = {**message, "_arrays": table, "_size": size}
    header = marshal.dumps(whole, MARSHAL) if quick else _ENCODE(whole).encode()
    length = _LENGTH.pack(len(header) | _MARSHALLED if quick else len(header))
    return [length, header, *chunks], len(length) + len(header) + size


def send(sock: socket.socket, message: dict[str, Any], arrays: Held | None = None, *, quick: bool = False) -> None:
    """Write one frame; WireClosed if the peer is gone. Arrays are int64, int32, uint8, float32 or bool, or bytes.

    quick: marshalled. The message then holds None, bool, int, float, str, bytes, lists, tuples and dicts of these,
    and comes back as it is; as JSON, tuples come back as lists.
    """
    parts, size = _parts(message, arrays, quick=quick)
    try:
        sent = sock.sendmsg(parts)
        if sent < size:
            sock.sendall(b"".join(parts)[sent:])
    except (BrokenPipeError, ConnectionResetError) as error:
        raise WireClosed("the peer closed the connection") from error


def receive(sock: socket.socket) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Read one frame; WireClosed at end of stream, TimeoutError if the socket has a timeout and it passes."""
    (length,) = _LENGTH.unpack(_read(sock, _LENGTH.size))
    header = _read(sock, length & ~_MARSHALLED)
    message = marshal.loads(header) if length & _MARSHALLED else json.loads(header)
    payload, offset, arrays = _read(sock, message.pop("_size")), 0, {}
    for name, kind, shape in message.pop("_arrays"):
        count = math.prod(shape)
        arrays[name] = np.frombuffer(payload, _TYPES[kind], count, offset).reshape(shape)
        offset += arrays[name].nbytes
    return message, arrays


def _read(sock: socket.socket, count: int) -> bytearray:
    parts = bytearray(count)
    view = memoryview(parts)
    done = 0
    while done < count:
        try:
            got = sock.recv_into(view[done:], 0, socket.MSG_WAITALL)
        except ConnectionResetError as error:
            raise WireClosed("the peer reset the connection") from error
        if got == 0:
            raise WireClosed("the peer closed the connection")
        done += got
    return parts


# -- a round's bytes --

Arrays = dict[str, np.ndarray]
#: name, dtype (torch's short name), first byte, shape
Field = Sequence[Any]

#: What a rank says of a round besides its bytes, in the order in which it travels: names once here, values each time.
ROUND = (
    "scheduler_step",
    "index",
    "mode",
    "rids",
    "starts",
    "pieces",
    "layouts",
    "tables",
    "lens",
    "final",
    "attempts",
    "forwards",
    "graphs",
    "events",
    "num_steps",
)


def named(message: Any) -> dict[str, Any]:
    """A round as it travels, with its names; a message that has them stays as it is."""
    return message if isinstance(message, dict) else {"ev": "packed", **dict(zip(ROUND, message, strict=True))}


#: dtype -> the one its bytes have, the one they are read as.
_PLAIN: dict[str, tuple[np.dtype[Any], np.dtype[Any]]] = {
    name: (np.dtype(name), np.dtype(np.float32 if name.startswith("float") else np.int64))
    for name in ("int64", "int32", "int16", "int8", "uint8", "bool", "float32", "float16", "float64")
}


def read(buffer: np.ndarray, pieces: Iterable[tuple[int, Sequence[Field]]]) -> Arrays:
    """uint8 [n] -> arrays by name: int64 for whole numbers and truth values, float32 for everything else.

    pieces: where fields begin in the buffer, and the fields, whose first bytes count from there. ValueError for a dtype
    that is not known.
    """
    return {
        name: _one(buffer, base + start, kind, shape) for base, fields in pieces for name, kind, start, shape in fields
    }


def _one(buffer: np.ndarray, start: int, kind: str, shape: Sequence[int]) -> np.ndarray:
    known = _PLAIN.get(kind)
    count = math.prod(shape)
    if known is not None:
        found = np.frombuffer(buffer, known[0], count, start).astype(known[1])
        return found if len(shape) == 1 else found.reshape(shape)
    if kind == "bfloat16":  # the upper half of a float32
        wide = np.frombuffer(buffer, np.uint16, count, start).astype(np.uint32) << 16
        return wide.view(np.float32).reshape(shape)
    raise ValueError(f"a tensor of dtype {kind} cannot be read back; allowed: {', '.join(_PLAIN)}, bfloat16")
