"""Bytes of many tensors in one buffer, and how to find each again: what a round of the engine travels as.

Both sides: standard library and NumPy only (the engine side loads it by path).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

Arrays = dict[str, np.ndarray]
#: name, dtype (torch's short name), first byte, shape
Field = Sequence[Any]

#: What a rank says of a round besides its bytes, in the order in which it travels: names once here, values each time.
ROUND = (
    "turn",
    "index",
    "mode",
    "rids",
    "starts",
    "pieces",
    "layouts",
    "tables",
    "lens",
    "final",
    "epochs",
    "forwards",
    "graphs",
    "events",
)


def named(message: Any) -> dict[str, Any]:
    """A round as it travels, with its names; a message that has them stays as it is."""
    return message if isinstance(message, dict) else {"ev": "packed", **dict(zip(ROUND, message, strict=True))}


_INTEGERS = {"int64": np.int64, "int32": np.int32, "int16": np.int16, "int8": np.int8, "uint8": np.uint8}
_FLOATS = {"float32": np.float32, "float16": np.float16, "float64": np.float64}


#: dtype -> as it lies there, as it is told.
_PLAIN: dict[str, tuple[np.dtype[Any], np.dtype[Any]]] = {
    **{name: (np.dtype(kind), np.dtype(np.int64)) for name, kind in {**_INTEGERS, "bool": np.bool_}.items()},
    **{name: (np.dtype(kind), np.dtype(np.float32)) for name, kind in _FLOATS.items()},
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
    allowed = ", ".join((*_INTEGERS, *_FLOATS, "bool", "bfloat16"))
    raise ValueError(f"a tensor of dtype {kind} cannot be read back; allowed: {allowed}")
