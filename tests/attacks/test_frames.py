"""Compressed chunks that are bombs, declare false sizes or are damaged, for every compressor and chain."""

from __future__ import annotations

import functools
import gzip
import json
import random
import struct
import subprocess
import sys
import uuid
import zlib
from collections.abc import Callable
from typing import Any

import msgspec
import numcodecs.blosc
import numpy as np
import numpy.typing as npt
import pytest
from numcodecs import Zstd

import tstore
from tests.support.fuzzing import bounded_memory, fuzz, mutated
from tstore.core.format.arrays.array_metadata import ArrayMeta
from tstore.core.format.objects.chunk_refs import ChunkTable
from tstore.errors import Corrupt, InvalidArgument, TStoreError, UnsupportedFormat

PLAIN: dict[str, Any] = {"name": "bytes", "configuration": {"endian": "little"}}
EXMY: dict[str, Any] = {"name": "exmy", "configuration": {"format": "e4m3"}}
ZSTD: dict[str, Any] = {"name": "zstd", "configuration": {"level": 1, "checksum": False}}
CHECKED: dict[str, Any] = {"name": "zstd", "configuration": {"level": 1, "checksum": True}}
GZIP: dict[str, Any] = {"name": "gzip", "configuration": {"level": 1}}


def blosc(cname: str = "lz4", shuffle: str = "shuffle", typesize: int = 4, blocksize: int = 0) -> dict[str, Any]:
    settings = {"cname": cname, "clevel": 3, "shuffle": shuffle, "typesize": typesize, "blocksize": blocksize}
    return {"name": "blosc", "configuration": settings}


CHAINS: dict[str, list[dict[str, Any]]] = {
    "zstd": [PLAIN, ZSTD],
    "zstd checked": [PLAIN, CHECKED],
    "gzip": [PLAIN, GZIP],
    **{f"blosc {name}": [PLAIN, blosc(name)] for name in numcodecs.blosc.list_compressors()},
    "blosc bits": [PLAIN, blosc("zstd", "bitshuffle", 2, 256)],
    "blosc none": [PLAIN, blosc("lz4", "noshuffle", 3, 1000)],
    "exmy zstd": [EXMY, ZSTD],
    "exmy gzip": [EXMY, GZIP],
    "exmy blosc": [EXMY, blosc("lz4hc", "bitshuffle", 1)],
    "gzip zstd": [PLAIN, GZIP, ZSTD],
    "blosc gzip": [PLAIN, blosc(), GZIP],
    "zstd blosc": [PLAIN, ZSTD, blosc("blosclz", "noshuffle", 1)],
    "zstd zstd gzip": [PLAIN, ZSTD, CHECKED, GZIP],
}


def values(size: int) -> npt.NDArray[np.float32]:
    chunk = np.random.default_rng(size).normal(size=size).astype(np.float32)
    chunk[size // 3 : 2 * size // 3] = 1
    return chunk


def meta_of(codecs: list[dict[str, Any]], size: int) -> ArrayMeta:
    return ArrayMeta.new((size,), "float32", (size,), codecs)


def encoded(meta: ArrayMeta, chunk: npt.NDArray[Any]) -> bytes:
    return bytes(meta.chain.encode(chunk, np.empty(meta.encoded_size, np.uint8)))


@pytest.mark.parametrize("name", CHAINS)
def test_damaged_frames(name: str) -> None:
    """Any bytes decode to a chunk of the right size or are refused."""
    metas = [meta_of(CHAINS[name], size) for size in (2, 500, 4000)]
    chunks = [encoded(meta, values(meta.chunk_size)) for meta in metas]
    if name.startswith("blosc"):
        crafted = tuple(
            struct.pack("<BBBBIII", 2, 1, flags, 4, 2000, 2000, 57) for flags in (0, 1, 2, 4, 33, 0x94)
        )
    else:
        crafted = (Zstd().encode(bytes(2000)), gzip.compress(bytes(2000)), b"\x50\x2a\x4d\x18\x04\0\0\0abcd")

    def attack(choice: random.Random) -> bool:
        at = choice.randrange(len(metas))
        meta, data = metas[at], mutated(chunks[at], choice, (*chunks, *crafted))
        if name.startswith("blosc") and len(data) >= 16 and choice.random() < 0.7:
            data = data[:12] + len(data).to_bytes(4, "little") + data[16:]  # pass the first check
        out = np.full(meta.chunks, 7, np.float32)
        try:
            meta.chain.decode(memoryview(data), out)
        except (Corrupt, UnsupportedFormat):
            return False
        return True

    fuzz(f"frames of {name}", attack, 150)


@pytest.mark.parametrize("name", CHAINS)
def test_honest_chunks_decode(name: str) -> None:
    for size in (1, 2, 100, 5000, 300_000):
        meta, chunk = meta_of(CHAINS[name], size), values(size)
        data, out = encoded(meta, chunk), np.zeros(size, np.float32)
        meta.chain.decode(memoryview(data), out)
        if meta.chain.lossless:
            assert out.tobytes() == chunk.tobytes()
        apart = np.zeros((size, 2), np.float32)[:, 0]  # not contiguous
        meta.chain.decode(memoryview(data), apart)
        assert apart.tobytes() == out.tobytes()


def frames(first: bytes, *more: bytes) -> bytes:
    return b"".join((first, *more))


def unsized(data: bytes) -> bytes:
    """Return a zstd frame that does not declare the size of its content: one raw block."""
    return b"\x28\xb5\x2f\xfd\x00\x58" + ((len(data) << 3) | 1).to_bytes(3, "little") + data


SKIPPED = b"\x53\x2a\x4d\x18\x03\0\0\0abc"
HALVES = b"a" * 20, b"b" * 20


@pytest.mark.parametrize(
    ("codec", "data"),
    [
        (ZSTD, frames(*map(Zstd().encode, HALVES))),
        (ZSTD, frames(SKIPPED, Zstd().encode(b"".join(HALVES)), SKIPPED)),
        (ZSTD, unsized(b"".join(HALVES))),
        (ZSTD, frames(unsized(HALVES[0]), Zstd(1, True).encode(HALVES[1]))),
        (GZIP, frames(*map(gzip.compress, HALVES))),
        (GZIP, frames(gzip.compress(HALVES[0]), b"\0" * 1000, gzip.compress(HALVES[1]), b"\0" * 1000)),
        (GZIP, frames(*[gzip.compress(b"")] * 100, gzip.compress(b"".join(HALVES)))),
    ],
    ids=range(7),  # ids of the bytes would contain the time of day
)
def test_several_frames_can_make_one_chunk(codec: dict[str, Any], data: bytes) -> None:
    meta, out = meta_of([PLAIN, codec], 10), np.zeros(10, np.float32)
    meta.chain.decode(memoryview(data), out)
    assert out.tobytes() == b"".join(HALVES)


@functools.cache
def zeros(size: int) -> bytes:
    """Return gzip of `size` zeros, compressed in pieces."""
    made = zlib.compressobj(9, wbits=31)
    parts = [made.compress(bytes(1 << 24)) for _ in range(size >> 24)]
    return b"".join([*parts, made.flush()])


def zstd_of(blocks: int, declared: int | None) -> bytes:
    """Return a zstd frame of blocks of 128 KiB, of four bytes each."""
    head = b"\x28\xb5\x2f\xfd"
    head += b"\x00\x58" if declared is None else b"\xe0" + declared.to_bytes(8, "little")
    body = b"".join(
        ((128 << 10 << 3) | 2 | (i == blocks - 1)).to_bytes(3, "little") + b"\0" for i in range(blocks)
    )
    return head + body


def header(declared: int, block: int, flags: int = 0x21) -> bytes:
    """Return a blosc frame of 57 bytes that declares this content size."""
    return struct.pack("<BBBBIII", 2, 1, flags, 4, declared, block, 57) + bytes(41)


BOMBS: dict[str, tuple[list[dict[str, Any]], int, Callable[[], bytes]]] = {
    "zstd that declares 125 MiB": ([PLAIN, ZSTD], 2, lambda: zstd_of(1000, 125 << 20)),
    "zstd that declares nothing": ([PLAIN, ZSTD], 2, lambda: zstd_of(1000, None)),
    "zstd that declares 8": ([PLAIN, ZSTD], 2, lambda: zstd_of(1000, 8)),
    "zstd of zstd that declares 8": ([PLAIN, ZSTD, ZSTD], 2, lambda: Zstd().encode(zstd_of(1000, 8))),
    "zstd that declares 125 MiB of zstd": ([PLAIN, ZSTD, ZSTD], 2, lambda: zstd_of(1000, 125 << 20)),
    "zstd that declares no size, of zstd": ([PLAIN, ZSTD, ZSTD], 2, lambda: zstd_of(1000, None)),
    "zstd behind an empty frame": ([PLAIN, ZSTD], 2, lambda: zstd_of(1, 0) + zstd_of(1000, None)),
    "zstd whose sizes overflow": ([PLAIN, ZSTD], 2, lambda: zstd_of(1, 1 << 63) + zstd_of(1000, (1 << 63) + 8)),
    "zstd that declares 2^63": ([PLAIN, ZSTD], 2, lambda: zstd_of(1, 1 << 63)),
    "gzip of 256 MiB": ([PLAIN, GZIP], 1 << 18, lambda: zeros(1 << 28)),
    "gzip of 256 MiB in many members": ([PLAIN, GZIP], 1 << 18, lambda: zeros(1 << 24) * 16),
    "gzip of gzip of 256 MiB": ([PLAIN, GZIP, GZIP], 1 << 18, lambda: gzip.compress(zeros(1 << 28))),
    "gzip of 256 MiB of gzip": ([PLAIN, GZIP, GZIP], 1 << 18, lambda: zeros(1 << 28)),
    "gzip of zstd of 125 MiB": ([PLAIN, ZSTD, GZIP], 2, lambda: gzip.compress(zstd_of(1000, 125 << 20))),
    "blosc that declares 1 GiB": ([PLAIN, blosc()], 2, lambda: header(1 << 30, 1 << 30)),
    "blosc in a block of 1 GiB": ([PLAIN, blosc()], 2, lambda: header(8, 1 << 30)),
    "blosc of blosc": ([PLAIN, blosc(), blosc()], 2, lambda: header(1 << 30, 1 << 30)),
    "blosc of 1 GiB in 57 bytes": ([PLAIN, blosc()], 1 << 28, lambda: header(1 << 30, 1 << 30)),
    "zstd of 1 GiB in 16 bytes": ([PLAIN, ZSTD], 1 << 28, lambda: zstd_of(1, 1 << 30)),
}
"""Encoded chunks with far more data than the expected float32 values, or with too little."""

BOMB = """
import os, pathlib, resource, sys
import numpy as np
import tstore
from tstore.core.format.arrays.array_metadata import ArrayMeta
from tstore.errors import Corrupt, UnsupportedFormat
def peak():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])
for folder in sorted(pathlib.Path(sys.argv[1]).iterdir()):
    meta, data = ArrayMeta.parse((folder / "zarr.json").read_bytes()), (folder / "chunk").read_bytes()
    sys.stdout.flush()
    if os.fork():
        print(folder.name, "status", os.wait()[1])
        continue
    out = np.empty(meta.shape, np.float32)
    size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + (48 << 20), -1))
    open("/proc/self/clear_refs", "w").write("5")
    before = peak()
    try:
        meta.chain.decode(memoryview(data), out)
    except (Corrupt, UnsupportedFormat) as error:
        print(folder.name, "took", peak() - before, error)
    sys.stdout.flush()
    os._exit(0)
"""


def test_the_declared_size_is_checked_before_anything_is_decoded() -> None:
    plain = {"name": "bytes", "configuration": {"endian": "little"}}
    zstd = {"name": "zstd", "configuration": {"level": 1, "checksum": False}}
    meta = meta_of([plain, zstd, zstd], 8)
    with pytest.raises(Corrupt, match="at most"):
        meta.chain.decode(memoryview(Zstd().encode(bytes(1 << 20))), np.empty(8, "f4"))


def test_bombs_are_refused_in_little_memory(tmp_path: Any) -> None:
    for number, (codecs, size, make) in enumerate(BOMBS.values()):
        (folder := tmp_path / f"{number:02}").mkdir()
        (folder / "zarr.json").write_bytes(meta_of(codecs, size).document)
        (folder / "chunk").write_bytes(make())
    done = subprocess.run(
        [sys.executable, "-c", BOMB, tmp_path], capture_output=True, text=True, timeout=250, check=True
    )
    for number, (name, (_, size, _)) in enumerate(BOMBS.items()):
        lines = [line for line in done.stdout.splitlines() if line.startswith(f"{number:02} ")]
        assert lines[-1] == f"{number:02} status 0", (name, lines, done.stderr)
        _, took, kilobytes, message = lines[0].split(" ", 3)
        print(f"{name}: {kilobytes} KiB, {message}")
        assert took == "took", (name, lines)
        most = 16 * size if size < 1 << 20 else 0
        assert int(kilobytes) << 10 <= most + (2 << 20), (name, lines)


def test_a_large_blosc_block_without_memory_is_an_error() -> None:
    """c-blosc would write to a failed allocation."""
    code = """
import resource
import numpy as np
import tstore
from tstore.core.format.arrays.array_metadata import ArrayMeta
codec = {"cname": "zstd", "clevel": 1, "shuffle": "shuffle", "typesize": 4, "blocksize": 1 << 26}
codecs = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "blosc", "configuration": codec}]
meta = ArrayMeta.new((1 << 24,), "float32", (1 << 24,), codecs)
out = np.zeros(1 << 24, np.float32)
data = bytes(meta.chain.encode(out, np.empty(meta.encoded_size, np.uint8)))
size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + (1 << 26), -1))
try:
    meta.chain.decode(memoryview(data), out)
except MemoryError:
    print("refused")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=250, check=False)
    assert (done.returncode, done.stdout) == (0, "refused\n"), done.stderr


@pytest.mark.parametrize(
    "settings",
    [
        {"name": "zstd", "configuration": {"level": "1"}},
        {"name": "zstd", "configuration": {"level": 10**30}},
        {"name": "zstd", "configuration": {"level": True}},
        {"name": "zstd", "configuration": {"checksum": 5}},
        {"name": "gzip", "configuration": {"level": 10}},
        {"name": "gzip", "configuration": {"level": None}},
        {"name": "gzip", "configuration": {"wbits": 31}},
        blosc(blocksize=1 << 31),
        blosc(blocksize=-1),
        blosc(typesize=0),
        blosc(shuffle="sideways"),
        blosc(cname="lzma"),
        {"name": "lz4", "configuration": {}},
        {"name": "numcodecs.unknown", "configuration": {"level": 1}},
        {"name": "numcodecs.pickle", "configuration": {}},
    ],
    ids=str,
)
def test_unknown_compressors_are_refused_before_a_chunk_is_read(settings: dict[str, Any]) -> None:
    fields = json.loads(meta_of([PLAIN], 2).document)
    fields["codecs"].append(settings)
    with pytest.raises(UnsupportedFormat, match=settings["name"]):
        ArrayMeta.parse(json.dumps(fields).encode())


def test_too_many_compressors_are_refused() -> None:
    with pytest.raises(TStoreError, match="at most 8"):
        meta_of([PLAIN, *[ZSTD] * 9], 2)
    with pytest.raises(InvalidArgument, match="too long for blosc"):
        meta_of([PLAIN, blosc(), *[ZSTD] * 3, blosc()], 500_000_000)


@pytest.mark.parametrize("codecs", [None, "lossless", "e4m3", [PLAIN, GZIP, ZSTD]], ids=str)
async def test_a_reference_of_an_absurd_length_is_corrupt(codecs: Any) -> None:
    """A manifest with valid checksums declares a chunk of 2^40 bytes."""
    store = await tstore.open(f"memory://{uuid.uuid4()}")
    async with store.transaction() as tx:
        await (await tx.create_array("g/w", (8, 6), "float32", (4, 6), codecs)).write(np.ones((8, 6)))
    snapshot = await store.snapshot()
    node = snapshot.tree.nodes["g/w"]
    rows = list(node.chunks.rows)
    for length in (0, 1, 1 << 20, 1 << 40, 1 << 61):
        node.tables = (ChunkTable.from_rows([msgspec.structs.replace(row, length=length) for row in rows]),)
        for wanted in (np.s_[:], np.s_[1:2, 3]):
            array = await snapshot.array("g/w")
            with bounded_memory(1 << 28), pytest.raises(Corrupt, match=r"^g/w, chunk .0, 0.: "):
                await array[wanted].read()
