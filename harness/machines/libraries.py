"""Shared libraries made smaller: symbols that nobody looks up, and device code of other cards than the bundle's.

What the loader maps stays where it is, byte for byte, but for device images, which are blanked in their place. So no
offset moves, and nothing is needed beside this file. 64-bit ELF only.

This module must not know which library is worth it (see `harness.machines.bundle_contents`).
"""

from __future__ import annotations

import fnmatch
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

#: Of 64 bits, little-endian.
ELF = b"\x7fELF\x02\x01"
#: Where nvcc puts device code: of whole programs, and of those that are linked on the device.
DEVICE_SECTIONS = (".nv_fatbin", "__nv_relfatbin")
#: Of a container with the images of one source file for several cards.
CONTAINER = struct.Struct("<IHHQ")  # magic, version, bytes of this header, bytes of the images
MAGIC = 0xBA55ED50
#: Of one image: kind, version, bytes of this header, bytes of the image; 28 bytes in, its architecture (90).
IMAGE = struct.Struct("<HHIQ12xI")
PTX = 1
#: Of an ELF section: name, type, flags, address, offset, size, and three fields and one that stay as they are.
SECTION = struct.Struct("<IIQQQQIIQQ")
UNUSED, NO_BITS, IS_MAPPED = 0, 8, 2
#: Of an ELF symbol: name, binding and type, visibility, section, value, size.
SYMBOL = struct.Struct("<IBBHQQ")
GLOBAL, WEAK = 1, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One section of an ELF file: where it lies in it, in bytes."""

    name: str
    offset: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """Device code for one architecture (90 is sm_90), as machine code or as PTX; bytes in the file."""

    architecture: int
    ptx: bool
    offset: int
    size: int


def is_library(content: bytes) -> bool:
    return content.startswith(ELF)


def strip(library: bytes, *, architecture: str, weak: str = "") -> bytes:
    """The library for cards of that architecture ('sm_90') alone.

    weak: undefined symbols of these names (as in fnmatch) may stay undefined when the library is loaded; a call of one
    that is not there is then a call of address 0.
    """
    image = bytearray(library)
    found = {section.name: section for section in _sections(image)}
    wanted = int(architecture.removeprefix("sm_"))
    for name in DEVICE_SECTIONS:
        for images in _containers(image, found[name]) if name in found else ():
            for other in _useless(images, wanted):
                image[other.offset : other.offset + other.size] = bytes(other.size)
    if weak and ".dynsym" in found:
        _weaken(image, found[".dynsym"], found[".dynstr"], weak)
    _strip(image)
    return bytes(image)


def _useless(images: Sequence[Image], wanted: int) -> list[Image]:
    """What the card never takes: everything beside its own machine code, else what is no PTX that it could compile."""
    own = [one for one in images if one.architecture == wanted and not one.ptx]
    fitting = own or [one for one in images if one.ptx and one.architecture <= wanted]
    return [one for one in images if one not in fitting]


def _strip(image: bytearray) -> None:
    """Takes out every section that the loader does not map, and cuts off what that leaves at the end."""
    rows, names = _table(image)
    texts = bytes(image[rows[names][4] : rows[names][4] + rows[names][5]])
    end = 0
    for number, (_name, kind, flags, _address, offset, size, *_) in enumerate(rows):
        if flags & IS_MAPPED:
            end = max(end, offset + (0 if kind == NO_BITS else size))
        elif kind not in (UNUSED, NO_BITS):
            image[offset : offset + size] = bytes(size)
            rows[number] = [0] * len(rows[number]) if number != names else rows[number]
    end += -end % 8
    del image[end:]
    rows[names][4] = end
    image += texts + bytes(-len(texts) % 8)
    struct.pack_into("<Q", image, 0x28, len(image))
    for row in rows:
        image += SECTION.pack(*row)


def _table(image: bytearray) -> tuple[list[list[int]], int]:
    """The rows of SECTION, and which of them is of the sections' names."""
    (table,) = struct.unpack_from("<Q", image, 0x28)
    _size, count, names = struct.unpack_from("<HHH", image, 0x3A)
    return [list(SECTION.unpack_from(image, table + number * SECTION.size)) for number in range(count)], names


def _sections(image: bytearray) -> Iterator[Section]:
    rows, names = _table(image)
    for name, kind, _flags, _address, offset, length, *_ in rows:
        size = 0 if kind == NO_BITS else length
        yield Section(name=_text(image, rows[names][4] + name), offset=offset, size=size)


def _text(image: bytearray, offset: int) -> str:
    return image[offset : image.index(b"\0", offset)].decode()


def _containers(image: bytearray, section: Section) -> Iterator[list[Image]]:
    """The images of each container in a section; containers are 8 bytes aligned, with padding between them."""
    at, end = section.offset, section.offset + section.size
    while at + CONTAINER.size <= end:
        magic, _version, header, size = CONTAINER.unpack_from(image, at)
        if magic == MAGIC:
            yield list(_images(image, at + header, at + header + size))
            at += header + size
        else:
            at += 8


def _images(image: bytearray, at: int, end: int) -> Iterator[Image]:
    while at + IMAGE.size <= end:
        kind, _version, header, size, architecture = IMAGE.unpack_from(image, at)
        yield Image(architecture=architecture, ptx=kind == PTX, offset=at + header, size=size)
        at += header + size


def _weaken(image: bytearray, symbols: Section, names: Section, pattern: str) -> None:
    for at in range(symbols.offset, symbols.offset + symbols.size, SYMBOL.size):
        name, info, _visibility, section, _value, _size = SYMBOL.unpack_from(image, at)
        undefined = section == 0 and info >> 4 == GLOBAL
        if undefined and fnmatch.fnmatchcase(_text(image, names.offset + name), pattern):
            image[at + 4] = WEAK << 4 | info & 0xF
