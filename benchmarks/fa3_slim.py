"""Flash attention 3 small enough to travel: blanks every kernel in `flash_ops` that one kind of head does not need.

    python -m benchmarks.fa3_slim sglang_kernel-0.4.3-….whl flash_ops.abi3.so [--head 64]
    xz -5 flash_ops.abi3.so

The library holds its kernels three times (sm_80, sm_86, sm_90a) for every head width and number type. Blanked ones stay
where they are, as zeros, so that nothing else moves: the file is as large as before, and packs to almost nothing. A
call that needs a blanked kernel fails to load it. The code that is left is byte for byte that of the wheel.
"""

from __future__ import annotations

import argparse
import re
import struct
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

MEMBER = "sgl_kernel/flash_ops.abi3.so"
ARCH, MAGIC = 90, 0xBA55ED50
#: Mangled kernels of a CUDA library built on CUTLASS; the one that adds up partial results serves every head width.
KERNEL = re.compile(rb"_ZN7cutlass13device_kernelI[A-Za-z0-9_]+")
COMBINE, HOPPER = b"FlashAttnFwdCombine", b"enable_sm90_or_later"


def section(image: bytes | bytearray, name: str) -> tuple[int, int]:
    """First byte and length of a section of a 64-bit ELF file; LookupError if it has none of that name."""
    (table,) = struct.unpack_from("<Q", image, 0x28)
    size, count, names = struct.unpack_from("<HHH", image, 0x3A)
    rows = [struct.unpack_from("<IIQQQQ", image, table + i * size) for i in range(count)]
    for at, _kind, _flags, _address, offset, length in rows:
        start = rows[names][4] + at
        if image[start : image.index(b"\0", start)].decode() == name:
            return offset, length
    raise LookupError(f"no section {name}")


def kernels(image: bytes | bytearray) -> Iterator[tuple[int, int, int]]:
    """First byte, length and architecture of every device image in the library's fat binaries."""
    at, length = section(image, ".nv_fatbin")
    end = at + length
    while at < end - 16:
        magic, _version, header, size = struct.unpack_from("<IHHQ", image, at)
        if magic != MAGIC:
            at += 8
            continue
        inner, at = at + header, at + header + size
        while inner < at:
            _kind, _unknown, own, body = struct.unpack_from("<HHIQ", image, inner)
            (arch,) = struct.unpack_from("<I", image, inner + 28)
            yield inner + own, body, arch
            inner += own + body


def needed(body: bytes | bytearray, *, head: int) -> bool:
    """Whether an image for Hopper holds half-precision kernels of this head width, or what all widths need."""
    names = set(KERNEL.findall(body))
    own = re.compile(rb"ELi%dENS_(10bfloat16_t|6half_t)E" % head)
    return not names or any(COMBINE in name or (HOPPER in name and own.search(name)) for name in names)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--head", type=int, default=64)
    given = parser.parse_args()
    image = bytearray(zipfile.ZipFile(given.wheel).read(MEMBER))
    kept = 0
    for start, length, arch in list(kernels(image)):
        if arch == ARCH and needed(image[start : start + length], head=given.head):
            kept += length
        else:
            image[start : start + length] = bytes(length)
    given.out.write_bytes(image)
    print(f"{given.out}: {len(image) / 2**20:.0f} MiB, {kept / 2**20:.0f} MiB of kernels kept")
    return 0


if __name__ == "__main__":
    sys.exit(main())
