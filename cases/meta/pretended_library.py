"""A shared library as nvcc and a linker would leave it, made by hand, for the tests of stripping."""

from __future__ import annotations

import struct
from dataclasses import dataclass

MAPPED = 2
PROGBITS, SYMTAB, STRTAB, DYNSYM = 1, 2, 3, 11
PTX, MACHINE_CODE = 1, 2
FUNCTION, GLOBAL = 2, 1


@dataclass(frozen=True, kw_only=True)
class Image:
    """Device code for one card, of recognisable bytes."""

    architecture: int
    content: bytes
    kind: int = MACHINE_CODE


def container(*images: Image) -> bytes:
    """The images of one source file, as in the section .nv_fatbin."""
    body = b""
    for one in images:
        header = struct.pack("<HHIQ12xI", one.kind, 0x101, 64, len(one.content), one.architecture)
        body += header.ljust(64, b"\1") + one.content
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def symbol(name: int, *, defined: bool) -> bytes:
    """A global function; name: its place among the names."""
    return struct.pack("<IBBHQQ", name, GLOBAL << 4 | FUNCTION, 0, 7 if defined else 0, 0x1234, 8)


def library(device: bytes, *, names: tuple[tuple[str, bool], ...] = ()) -> bytes:
    """An ELF file with mapped sections, and unmapped ones in the middle and at the end.

    names: dynamic symbols, each with whether it is defined here.
    """
    texts, symbols = b"\0", bytes(24)
    for name, defined in names:
        symbols += symbol(len(texts), defined=defined)
        texts += name.encode() + b"\0"
    sections = [
        (".text", PROGBITS, MAPPED, b"host code" * 20),
        (".nv_fatbin", PROGBITS, MAPPED, device),
        (".debug_info", PROGBITS, 0, b"for debuggers" * 99),
        (".dynsym", DYNSYM, MAPPED, symbols),
        (".dynstr", STRTAB, MAPPED, texts),
        (".symtab", SYMTAB, 0, b"for linkers!" * 99),
    ]
    titles = b"\0" + b"".join(f"{name}\0".encode() for name, *_ in sections) + b".shstrtab\0"
    sections.append((".shstrtab", STRTAB, 0, titles))
    content, rows = bytearray(64), [bytes(64)]
    for name, kind, flags, body in sections:
        content += bytes(-len(content) % 16)
        place = titles.index(f"\0{name}\0".encode()) + 1
        rows.append(struct.pack("<IIQQQQIIQQ", place, kind, flags, 0, len(content), len(body), 0, 0, 16, 0))
        content += body
    content += bytes(-len(content) % 8)
    struct.pack_into("<6s10xHHIQQQIHHHHHH", content, 0, b"\x7fELF\2\1", 3, 62, 1, 0, 0, len(content), 0, 64, 0, 0, 64,
                     len(rows), len(rows) - 1)  # fmt: skip
    return bytes(content + b"".join(rows))
