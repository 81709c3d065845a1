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

_INTEGERS = {"int64": np.int64, "int32": np.int32, "int16": np.int16, "int8": np.int8, "uint8": np.uint8}
_FLOATS = {"float32": np.float32, "float16": np.float16, "float64": np.float64}


def read(buffer: np.ndarray, pieces: Iterable[tuple[int, Sequence[Field]]]) -> Arrays:
    """uint8 [n] -> arrays by name: int64 for whole numbers and truth values, float32 for everything else.

    pieces: where fields begin in the buffer, and the fields, whose first bytes count from there. ValueError for a dtype
    that is not known.
    """
    return {
        name: _one(buffer, base + start, kind, shape) for base, fields in pieces for name, kind, start, shape in fields
    }


def _one(buffer: np.ndarray, start: int, kind: str, shape: Sequence[int]) -> np.ndarray:
    count = math.prod(shape)
    if kind in _INTEGERS:
        return np.frombuffer(buffer, _INTEGERS[kind], count, start).astype(np.int64).reshape(shape)
    if kind in _FLOATS:
        return np.frombuffer(buffer, _FLOATS[kind], count, start).astype(np.float32).reshape(shape)
    if kind == "bool":
        return np.frombuffer(buffer, np.bool_, count, start).astype(np.int64).reshape(shape)
    if kind == "bfloat16":  # the upper half of a float32
        wide = np.frombuffer(buffer, np.uint16, count, start).astype(np.uint32) << 16
        return wide.view(np.float32).reshape(shape)
    allowed = ", ".join((*_INTEGERS, *_FLOATS, "bool", "bfloat16"))
    raise ValueError(f"a tensor of dtype {kind} cannot be read back; allowed: {allowed}")
