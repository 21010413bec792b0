"""Forged chunks that decode to too much data or not at all, and arrays with an invalid `zarr.json`."""

from __future__ import annotations

import gzip
import random
import struct
from typing import Any

import numcodecs
import numpy as np
import xxhash

from tests.attacks.forgeries import Forgery, Known, array, manifest, record_of

__all__ = ["BOMBS", "DOCUMENTS", "documented"]


def chunk_of(data: bytes, codecs: list[dict[str, Any]], dtype: str = "float32", size: int = 2) -> Forgery:
    """Return the forgery of a record whose array has one chunk, with these bytes in a pack."""

    def forge(known: Known) -> tuple[str, bytes]:
        key = f"txn/forged{known.newest}/pack-0-0"
        (known.folder / key).parent.mkdir()
        (known.folder / key).write_bytes(data)
        grid = {"name": "regular", "configuration": {"chunk_shape": [size]}}
        fields = array(shape=[size], chunk_grid=grid, codecs=codecs, data_type=dtype)
        blocks = [xxhash.xxh3_128_digest(data[i : i + (1 << 20)]) for i in range(0, max(1, len(data)), 1 << 20)]
        where = manifest(
            packs=[key],
            inline=[],
            documents=fields[3],
            length=struct.pack("<Q", len(data)),
            checks=b"".join(blocks),
        )
        changes = {"manifests": [where], "tags": ["step/12"], "replaces": True}
        return record_of(lambda k: changes)(known)

    return forge


PLAIN = {"name": "bytes", "configuration": {"endian": "little"}}
ZSTD = [PLAIN, {"name": "zstd", "configuration": {"level": 1, "checksum": False}}]
GZIP = [PLAIN, {"name": "gzip", "configuration": {"level": 1}}]
BLOSC = [
    PLAIN,
    {
        "name": "blosc",
        "configuration": {"cname": "zstd", "clevel": 1, "shuffle": "noshuffle", "typesize": 4, "blocksize": 0},
    },
]


def zstd_bomb(declared: bytes, blocks: int) -> bytes:
    """Return a zstd frame of runs of 128 KiB with this declared content size."""
    run = lambda last: struct.pack("<I", (1 << 17) << 3 | 1 << 1 | last)[:3] + b"\0"  # noqa: E731
    return b"\x28\xb5\x2f\xfd" + declared + run(0) * (blocks - 1) + run(1)


def blosc_chunk(seed: int) -> bytes:
    """Return a blosc chunk with some bytes of its header changed."""
    choice = random.Random(seed)
    data = bytearray(numcodecs.Blosc(cname="zstd", clevel=1, shuffle=0).encode(np.arange(2, dtype="f4")))
    if seed == 0:
        data[4:8] = struct.pack("<I", 1 << 30)
    elif seed == 1:
        data[4:8] = struct.pack("<I", (1 << 31) - 1)
    else:
        at = choice.randrange(1, 16)
        data[at] = choice.randrange(256)
        if choice.random() < 0.5:
            data[choice.choice((4, 8, 12)) :][:4] = struct.pack(
                "<I", choice.choice((0, 1, 1 << 30, (1 << 32) - 1))
            )
    return bytes(data)


_MEMBER = gzip.compress(bytes(16 << 20), 9)
BOMBS: dict[str, Forgery] = {
    "zstd, 1 GiB declared": chunk_of(zstd_bomb(b"\xa0" + struct.pack("<I", 1 << 30), 1 << 13), ZSTD),
    "zstd, 1 GiB undeclared": chunk_of(zstd_bomb(b"\x00\x58", 1 << 13), ZSTD),
    "zstd, 8 bytes declared": chunk_of(zstd_bomb(b"\x20\x08", 1 << 13), ZSTD),
    "zstd, 2^62 declared": chunk_of(zstd_bomb(b"\xe0" + struct.pack("<Q", 1 << 62), 60), ZSTD),
    "zstd, many frames": chunk_of(zstd_bomb(b"\xa0" + struct.pack("<I", 1 << 24), 1 << 7) * 64, ZSTD),
    "zstd, no frame": chunk_of(b"\0" * 252, ZSTD),
    "zstd, skippable frames": chunk_of(b"\x50\x2a\x4d\x18\xff\xff\xff\xff" * 1000, ZSTD),
    "gzip, 1 GiB": chunk_of(_MEMBER * 64, GZIP),
    "gzip, half a member": chunk_of(_MEMBER[:100], GZIP),
    "gzip, a tail": chunk_of(gzip.compress(bytes(8)) + b"tail", GZIP),
    "gzip, a long name": chunk_of(b"\x1f\x8b\x08\x08" + bytes(6) + b"a" * (1 << 20), GZIP),
    **{f"blosc, seed {seed}": chunk_of(blosc_chunk(seed), BLOSC) for seed in range(12)},
    "blosc, empty": chunk_of(b"", BLOSC),
    "blosc, half a header": chunk_of(b"\2\1\0\4\0\0\0", BLOSC),
    "bytes, too many": chunk_of(bytes(1 << 20), [PLAIN]),
    "bytes, too few": chunk_of(b"\0", [PLAIN]),
    "twice compressed": chunk_of(gzip.compress(zstd_bomb(b"\x00\x58", 1 << 13)), [*ZSTD, GZIP[1]]),
    **{
        f"exmy, {name}": chunk_of(data, [{"name": "exmy", "configuration": {"format": "e4m3"}}])
        for name, data in (
            ("empty", b""),
            ("zeros", bytes(3)),
            ("too many", bytes(1 << 16)),
            ("ones", b"\xff" * 40),
        )
    },
}

DOCUMENTS: dict[str, dict[str, Any]] = {
    "2^40 values": {"shape": [1 << 40]},
    "2^40 values, sparse": {"shape": [1 << 40], "tstore": {"must_understand": False, "sparse": True}},
    "a chunk of 2^40": {"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [1 << 40]}}},
    "2^60 chunks": {"shape": [1 << 60], "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [1]}}},
    "no values": {"shape": [0]},
    "a chunk of zero": {"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [0]}}},
    "64 dimensions": {
        "shape": [1] * 64,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [1] * 64}},
    },
    "a shape of booleans": {"shape": [True]},
    "a shape of floats": {"shape": [8.0]},
    "a shape of null": {"shape": None},
    "a grid of text": {"chunk_grid": "regular"},
    "a grid of null": {"chunk_grid": None},
    "a grid without chunks": {"chunk_grid": {"name": "regular", "configuration": {}}},
    "another grid": {"chunk_grid": {"name": "rectilinear", "configuration": {}}},
    "a dtype of lists": {"data_type": [["x", "f4"]]},
    "a dtype of a record": {"data_type": {"name": "struct"}},
    "a dtype of null": {"data_type": None},
    "a dtype of dates": {"data_type": "datetime64[ns]"},
    "float128": {"data_type": "float128"},
    "a comma as dtype": {"data_type": "f4,f4"},
    "codecs of text": {"codecs": "bytes"},
    "codecs of numbers": {"codecs": [5]},
    "a codec of null": {"codecs": [None]},
    "codecs a thousand times": {"codecs": [PLAIN] + [GZIP[1]] * 1000},
    "a codec configured by text": {"codecs": [{"name": "bytes", "configuration": "x"}]},
    "gzip of level 10^9": {"codecs": [PLAIN, {"name": "gzip", "configuration": {"level": 10**9}}]},
    "zstd of level x": {"codecs": [PLAIN, {"name": "zstd", "configuration": {"level": "x"}}]},
    "blosc of 2^40": {"codecs": [PLAIN, {"name": "blosc", "configuration": {"typesize": 1 << 40}}]},
    "exmy of e99m99": {"codecs": [{"name": "exmy", "configuration": {"format": "e99m99"}}]},
    "exmy of 5": {"codecs": [{"name": "exmy", "configuration": {"format": 5}}]},
    "exmy of blocks of 0": {"codecs": [{"name": "exmy", "configuration": {"format": "e4m3", "block": 0}}]},
    "exmy of more": {"codecs": [{"name": "exmy", "configuration": {"format": "e4m3", "x": [1]}}]},
    "a fill value of null": {"fill_value": None},
    "a fill value of hex": {"fill_value": "0x7fc00000"},
    "a fill value of 10^999": {"fill_value": "1" + "0" * 999},
    "a fill value of an object": {"fill_value": {}},
    "names of numbers": {"dimension_names": [5]},
    "names of text": {"dimension_names": "x"},
    "one name too many": {"dimension_names": ["x", "y"]},
    "attributes of a list": {"attributes": [1]},
    "attributes of null": {"attributes": None},
    "transformers": {"storage_transformers": [{"name": "x"}]},
    "what must be understood": {"future": {"must_understand": True}},
    "tstore of text": {"tstore": "sparse"},
    "sparse of text": {"tstore": {"must_understand": False, "sparse": "no"}},
    "zarr_format 2": {"zarr_format": 2},
    "zarr_format of text": {"zarr_format": "3"},
    "a node of another kind": {"node_type": "table"},
    "a group": {"node_type": "group"},
}


def documented(changes: dict[str, Any]) -> Forgery:
    """Return the forgery of a record of one array whose document has these changes."""
    return record_of(lambda known: {"manifests": [array(**changes)], "tags": ["step/13"], "replaces": True})
