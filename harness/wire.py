"""Frames between the control side and the engine side: a JSON header and raw arrays, over a local stream socket.

Engine side: standard library and NumPy only (this file is loaded by path inside SGLang's environment).
It must not know what the messages mean.

A frame is `>I header length | header JSON | arrays back to back`; the header's `_arrays` lists name, dtype, shape.
"""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

import numpy as np

_LENGTH = struct.Struct(">I")
_DTYPES = ("int64", "int32", "float32", "bool")


class WireClosed(ConnectionError):
    """The peer closed the connection (it ended, or was ended)."""


def encode(message: dict[str, Any], arrays: dict[str, np.ndarray] | None = None) -> bytes:
    """One frame as bytes; arrays must be C-contiguous int64, int32, float32 or bool."""
    table = []
    chunks = []
    for name, array in (arrays or {}).items():
        if array.dtype.name not in _DTYPES:
            raise TypeError(f"array {name!r} has dtype {array.dtype}; allowed: {', '.join(_DTYPES)}")
        data = np.ascontiguousarray(array)
        table.append([name, data.dtype.name, list(data.shape)])
        chunks.append(data.tobytes())
    header = json.dumps({**message, "_arrays": table}, separators=(",", ":")).encode()
    return b"".join([_LENGTH.pack(len(header)), header, *chunks])


def send(sock: socket.socket, message: dict[str, Any], arrays: dict[str, np.ndarray] | None = None) -> None:
    """Write one frame; WireClosed if the peer is gone."""
    try:
        sock.sendall(encode(message, arrays))
    except (BrokenPipeError, ConnectionResetError) as error:
        raise WireClosed("the peer closed the connection") from error


def receive(sock: socket.socket) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Read one frame; WireClosed at end of stream, TimeoutError if the socket has a timeout and it passes."""
    (length,) = _LENGTH.unpack(_read(sock, _LENGTH.size))
    message = json.loads(_read(sock, length))
    arrays = {}
    for name, dtype, shape in message.pop("_arrays"):
        count = int(np.prod(shape, dtype=np.int64))
        raw = _read(sock, count * np.dtype(dtype).itemsize)
        arrays[name] = np.frombuffer(raw, dtype=dtype).reshape(shape)
    return message, arrays


def _read(sock: socket.socket, count: int) -> bytes:
    parts = bytearray(count)
    view = memoryview(parts)
    done = 0
    while done < count:
        try:
            got = sock.recv_into(view[done:])
        except ConnectionResetError as error:
            raise WireClosed("the peer reset the connection") from error
        if got == 0:
            raise WireClosed("the peer closed the connection")
        done += got
    return bytes(parts)
