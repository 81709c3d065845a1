"""Frames between the control side and the engine side: a JSON header and raw arrays, over a local stream socket.

Engine side: standard library and NumPy only (this file is loaded by path inside SGLang's environment).
It must not know what the messages mean.

A frame is `>I header length | header JSON | arrays back to back`; the header's `_arrays` lists name, dtype and shape,
and `_size` says how many bytes of arrays follow, so that a frame is three reads whatever it holds.
"""

from __future__ import annotations

import json
import math
import socket
import struct
from typing import Any

import numpy as np

_LENGTH = struct.Struct(">I")
#: numpy's short name of a dtype -> the name in a frame. Its long one takes microseconds to ask for.
_NAMES = {"<i8": "int64", "<i4": "int32", "<f4": "float32", "|b1": "bool", "|u1": "uint8"}
_TYPES = {name: np.dtype(short) for short, name in _NAMES.items()}
_ENCODE = json.JSONEncoder(separators=(",", ":")).encode


class WireClosed(ConnectionError):
    """The peer closed the connection (it ended, or was ended)."""


def encode(message: dict[str, Any], arrays: dict[str, np.ndarray] | None = None) -> bytes:
    """One frame as bytes; arrays are int64, int32, uint8, float32 or bool."""
    return b"".join(_parts(message, arrays))


def _parts(message: dict[str, Any], arrays: dict[str, np.ndarray] | None) -> list[bytes | memoryview]:
    """A frame as what can be sent without copying the arrays."""
    table, chunks, size = [], list[bytes | memoryview](), 0
    for name, array in (arrays or {}).items():
        kind = _NAMES.get(array.dtype.str)
        if kind is None:
            raise TypeError(f"array {name!r} has dtype {array.dtype}; allowed: {', '.join(_TYPES)}")
        table.append([name, kind, array.shape])
        chunks.append(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        size += array.nbytes
    header = _ENCODE({**message, "_arrays": table, "_size": size}).encode()
    return [_LENGTH.pack(len(header)), header, *chunks]


def send(sock: socket.socket, message: dict[str, Any], arrays: dict[str, np.ndarray] | None = None) -> None:
    """Write one frame; WireClosed if the peer is gone."""
    parts = _parts(message, arrays)
    try:
        sent = sock.sendmsg(parts)
        if sent < sum(memoryview(part).nbytes for part in parts):
            sock.sendall(b"".join(parts)[sent:])
    except (BrokenPipeError, ConnectionResetError) as error:
        raise WireClosed("the peer closed the connection") from error


def receive(sock: socket.socket) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Read one frame; WireClosed at end of stream, TimeoutError if the socket has a timeout and it passes."""
    (length,) = _LENGTH.unpack(_read(sock, _LENGTH.size))
    message = json.loads(_read(sock, length))
    payload, offset, arrays = _read(sock, message.pop("_size")), 0, {}
    for name, kind, shape in message.pop("_arrays"):
        count = math.prod(shape)
        arrays[name] = np.frombuffer(payload, _TYPES[kind], count, offset).reshape(shape)
        offset += arrays[name].nbytes
    return message, arrays


def _read(sock: socket.socket, count: int) -> bytes:
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
    return bytes(parts)
