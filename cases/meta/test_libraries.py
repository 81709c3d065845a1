"""Stripping shared libraries: what stays to the byte, what goes, and that the loader still takes the result."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from cases.meta.pretended_library import PTX, Image, container, library
from harness.machines import libraries

H100, A100, B200 = (Image(architecture=number, content=bytes([number]) * 400) for number in (90, 80, 100))
OLD_PTX, NEW_PTX = (Image(architecture=number, content=b"ptx%d" % number * 99, kind=PTX) for number in (80, 120))


def strip(content: bytes, *, weak: str = "") -> bytes:
    return libraries.strip(content, architecture="sm_90", weak=weak)


def test_device_code_of_other_cards_is_blanked_where_it_lies():
    padding = bytes(24)
    device = container(A100, H100, B200, OLD_PTX) + padding + container(H100, A100)
    whole = library(device)
    made = strip(whole)
    start = whole.index(device)
    gone = (A100.content, B200.content, OLD_PTX.content)
    expected = device
    for content in gone:
        expected = expected.replace(content, bytes(len(content)))
    assert made[start : start + len(device)] == expected
    assert expected.count(H100.content) == 2


def test_without_machine_code_for_the_card_what_it_can_compile_stays():
    made = strip(library(container(A100, OLD_PTX, NEW_PTX) + container(B200)))
    assert OLD_PTX.content in made
    assert not any(one.content in made for one in (A100, NEW_PTX, B200))


def test_what_the_loader_maps_stays_and_what_it_does_not_goes():
    device = container(H100)
    whole = library(device, names=(("ncclNew", False),))
    made = strip(whole)
    end = whole.index(b"for linkers!")  # what follows it is not mapped
    before, after = whole[:end].split(b"for debuggers" * 99)
    assert made[64:].startswith(before[64:] + bytes(len(b"for debuggers" * 99)) + after)
    assert b"for linkers!" not in made
    assert len(made) < len(whole) - len(b"for linkers!" * 99)


def test_only_undefined_functions_of_that_name_become_weak():
    whole = library(b"", names=(("ncclNew", False), ("ncclOwn", True), ("cudaMalloc", False)))
    left, weakened = strip(whole), strip(whole, weak="nccl*")
    at = whole.index(bytes(24) + b"\1\0\0\0\x12") + 24 + 4  # the null symbol, then the first one's name and binding
    assert (left[at], weakened[at]) == (0x12, 0x22)
    assert left[:at] + weakened[at : at + 1] + left[at + 1 :] == weakened


@pytest.mark.parametrize("content", [b"\x7fELF", b"\x7fELF\1\1" + bytes(90), b"#!/bin/sh\n"])
def test_nothing_else_is_taken_for_a_library(content):
    assert not libraries.is_library(content)
    assert libraries.is_library(library(b""))


#: A library that every machine with this project has, of one file and written in another language.
REAL = Path(str(importlib.util.find_spec("pydantic_core._pydantic_core").origin))  # type: ignore[union-attr]
IMPORTED = b"\0PyFrozenSet_New\0"


def imported(folder: Path, content: bytes) -> subprocess.CompletedProcess[str]:
    """The library as Python would load it in a process of its own."""
    place = folder / REAL.name
    place.write_bytes(content)
    code = f"""
import importlib.util
spec = importlib.util.spec_from_file_location("pydantic_core._pydantic_core", {str(place)!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
print(module.from_json("[1]"))
"""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


def test_a_real_library_is_smaller_and_works(tmp_path):
    content = REAL.read_bytes()
    made = strip(content)
    assert len(made) < len(content)
    assert imported(tmp_path, made).stdout == "[1]\n"


def test_a_function_that_the_machine_lacks_stops_the_loader_unless_it_is_weak(tmp_path):
    content = REAL.read_bytes()
    assert content.count(IMPORTED) == 1
    renamed = content.replace(IMPORTED, b"\0PyFrozenSet_Nil\0")
    strict = imported(tmp_path, strip(renamed))
    assert "undefined symbol: PyFrozenSet_Nil" in strict.stderr
    assert imported(tmp_path, strip(renamed, weak="PyFrozenSet_N*")).stdout == "[1]\n"
