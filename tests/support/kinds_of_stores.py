"""Small stores of every kind, made by the public API; each function returns the constants that it overrode."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

import tstore.sync as tstore
from tstore import Keep, PerHost
from tstore.lab.simulation.scenario import override_constants

EXTENDED = [
    "bfloat16",
    "float8_e3m4",
    "float8_e4m3",
    "float8_e4m3b11fnuz",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "float6_e2m3fn",
    "float6_e3m2fn",
    "float4_e2m1fn",
    "int2",
    "int4",
    "uint2",
    "uint4",
]
STRUCT: Any = [("a", [("x", "f4"), ("y", ">i2")]), ("b", "U3"), ("c", "S3"), ("d", "M8[s]")]
DTYPES = [
    "?",
    "i1",
    "u2",
    "i4",
    ">i8",
    "u8",
    "f2",
    "f4",
    ">f8",
    "c8",
    "c16",
    "M8[25s]",
    "m8[us]",
    "M8",
    "U5",
    "S7",
    "V9",
]
ROOTS = {"ROOT_EVERY": 4, "ARCHIVE_EVERY": 8}


def codec(name: str, **configuration: Any) -> dict[str, Any]:
    return {"name": name, "configuration": configuration}


LITTLE, BIG = codec("bytes", endian="little"), codec("bytes", endian="big")
ZSTD, CRC = codec("zstd", level=3, checksum=True), codec("crc32c")
BLOSC = [
    codec("blosc", typesize=4, cname=name, clevel=5, shuffle=shuffle, blocksize=size)
    for name in ("zstd", "lz4", "zlib")
    for shuffle, size in (("noshuffle", 0), ("shuffle", 512), ("bitshuffle", 0))
]
CHAINS: list[Any] = [
    "lossless",
    [LITTLE, ZSTD],
    [LITTLE, codec("gzip", level=1)],
    [BIG, CRC],
    [codec("transpose", order=[2, 0, 1]), codec("transpose", order=[2, 1, 0]), BIG, ZSTD, CRC],
    [
        codec("transpose", order=[2, 0, 1]),
        codec(
            "sharding_indexed",
            chunk_shape=[2, 2, 3],
            codecs=[codec("transpose", order=[2, 1, 0]), BIG, ZSTD],
            index_codecs=[LITTLE, CRC],
            index_location="start",
        ),
    ],
    *([LITTLE, each] for each in BLOSC),
    [LITTLE, codec("numcodecs.zlib")],
]
SCALES: list[dict[str, Any]] = [
    {"scale": "none"},
    {"scale": "max", "axis": 0},
    {"scale": "search", "block": 64},
    {"scale": "float"},
    {"scale": "e4m3", "block": 32},
    {"scale": "6bit", "block": 16},
    {"scale": "6bit", "axis": 0},
    {"scale": 0.07},
]


class Point(NamedTuple):
    p: Any
    q: Any


@dataclasses.dataclass
class Pair:
    a: Any
    b: Any


def samples(dtype: Any, count: int) -> np.ndarray[Any, Any]:
    dtype = np.dtype(dtype)
    if dtype.kind == "U":
        return np.array(["", "a", "é", "日本語"] * count, dtype)[:count]
    data = np.random.default_rng(0).integers(0, 2 if dtype.kind == "b" else 256, count * dtype.itemsize, np.uint8)
    return data.view(dtype)


def dtypes(url: str) -> None:
    with tstore.open(url).transaction(tag="types") as tx:
        for dtype in DTYPES:
            values = samples(dtype, 35).reshape(5, 7)
            fill = values[0, 0] if values.dtype.kind not in "fc" else 0.1
            for name, codecs in (("plain", None), ("lossless", "lossless")):
                path = f"{dtype.strip('>?')}/{name}"
                tx.create_array(path, values.shape, dtype, (3, 4), codecs, fill, sparse=True)[:3].write(values[:3])
        records = np.zeros(3, STRUCT)
        records["a"]["y"], records["b"], records["c"] = 258, "é", b"x"
        tx.create_array("records", chunks=(2,), data=records)
        for name in EXTENDED:
            bits = {"float6": 6, "float4": 4, "int2": 2, "int4": 4, "uint2": 2, "uint4": 4}.get(
                name.split("_")[0], 8
            )
            codes = np.arange(1 << 16, dtype="u2") if name == "bfloat16" else np.arange(1 << bits, dtype="u1")
            dtype = np.dtype(getattr(ml_dtypes, name))
            values = codes.astype("i1").astype(dtype) if "int" in name else codes.view(dtype)
            tx.create_array(f"{name}/all", values.shape, dtype, (300,)).write(values)
            has_nan = name.startswith(("float8", "bf"))
            fills = [1, float("nan"), *([float("inf")] if "_" not in name or name[-1].isdigit() else [])]
            for i, fill in enumerate(fills if has_nan else [1]):
                tx.create_array(f"{name}/fill{i}", (3,), dtype, (2,), fill_value=fill, sparse=True)
        for i, fill in enumerate([np.nan, -np.inf, 0.1, -0.0]):
            for dtype in ("f2", "f8", "c8"):
                tx.create_array(f"fill/{dtype}{i}", (3,), dtype, (2,), fill_value=fill, sparse=True)
        texts = np.array(["a", "", "köln\0x", "日本"] * 3, object).reshape(3, 4)
        tx.create_array("text", (3, 4), "string", (2, 3), "lossless", "zz", sparse=True)[:2].write(texts[:2])
        tx.create_array("bytes", (3,), "variable_length_bytes", (2,)).write(np.array([b"x", b"", b"\0\0"], object))
        tx.create_array("empty", (0, 4), "f4", (2, 2))
        tx.create_array("scalar", (), "f8", ()).write(3.5)
        tx.create_group("group", {"a": [1, 2, {"x": None}]})


def codecs(url: str) -> None:
    x = np.random.default_rng(0).integers(0, 1000, (9, 13, 30)).astype("f4")
    x[:4, :6, :4] = 0
    with tstore.open(url).transaction() as tx:
        for i, chain in enumerate(CHAINS):
            tx.create_array(f"c/{i}", x.shape, x.dtype, (4, 6, 4), chain).write(x)
        ramp = np.arange(20000, dtype="f4")
        for i, each in enumerate(BLOSC):  # several blocks, of several streams
            tx.create_array(f"d/{i}", ramp.shape, ramp.dtype, (12001,), [LITTLE, each]).write(ramp)
        big = np.random.default_rng(0).integers(0, 255, (1 << 21) + 5).astype("u1")
        tx.create_array("big", chunks=(1_500_000,), data=big)


def low_bit(url: str) -> None:
    rng = np.random.default_rng(0)
    w = (rng.standard_normal((32, 128)) * np.exp(rng.standard_normal((32, 1)))).astype("f4")
    w[0, :5], w[1] = 0, 0
    types = ["float32", "bfloat16", "float16", "float64"]
    with tstore.open(url).transaction() as tx:
        formats = ["e4m3", "e2m1", "e3m2", "e5m2", "e1m0", "e5m10", "e8m7", "e0m7", "e3m4b5", "e4m9", "e2m6"]
        pairs = [(name, SCALES[(i + j) % len(SCALES)]) for i, name in enumerate(formats) for j in (0, 3)]
        for i, (name, scale) in enumerate(pairs):
            dtype = numpy_dtype(types[i % 4])
            values = w.astype("f8").clip(-5, 5).astype(dtype)
            tx.create_array(f"{i}", w.shape, dtype, (16, 64), {"format": name, **scale}).write(values)
        tx.create_array("odd", (7, 13), "f4", (3, 5), {"format": "e3m2"}).write(w[:7, :13])
        chain = [codec("transpose", order=[1, 0]), codec("exmy", format="e5m2", scale=0.01), ZSTD]
        tx.create_array("behind", w.shape, "f4", w.shape, chain).write(w.clip(-5, 5))


def numpy_dtype(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, name) if name == "bfloat16" else name)


def history(url: str) -> dict[str, int]:
    with override_constants(**ROOTS):
        store = tstore.open(url)
        for i in range(30):
            drop = f"t{i - 2}" if i % 9 == 5 else None  # t3, t12, t21
            with store.transaction(
                f"c{i}", f"t{i}" if i % 3 == 0 else None, move_tag="newest", drop_tag=drop
            ) as tx:
                if i == 0:
                    tx.create_array("x", (0, 3), "i8", (4, 2))
                    tx.create_array("y", (50,), "i4", (5,)).write(0)
                tx.array("x").append(np.full((i % 5 + 1, 3), i))
                if i % 7 == 3:
                    tx.create_array(f"n/{i}/a", (4,), "f4", (2,)).write(i)
                if i == 11:
                    tx.delete("n")
                if i == 13:
                    tx.array("y").resize((63,))
                    tx.array("y")[50:].write(1)
                if i == 20:
                    tx.array("y").resize((50,))
                if i == 24:
                    tx.delete("y")
                    tx.create_array("y", (50,), "i4", (7,), fill_value=3, sparse=True)
                tx.array("y")[i : i + 7].write(i)
            if i == 15:
                store.collect(Keep(tags=("t9", "t15")))
        store.collect(Keep(tags=("t15", "t18", "t24")))
        store.collect()
    return ROOTS


def default_intervals(url: str) -> None:
    store = tstore.open(url)
    for i in range(66):
        with store.transaction(durability="none") as tx:
            if i == 0:
                tx.create_array("x", (0,), "i8", (4,))
            tx.array("x").append([i])


def segments(url: str) -> None:
    store = tstore.open(url)
    with store.transaction() as tx:
        tx.create_array("a", (4200,), "i2", (1,)).write(np.arange(4200))
    with store.transaction() as tx:
        tx.array("a")[100:120].write(7)


def short_segments(url: str) -> dict[str, int]:
    with override_constants(**ROOTS, MIN_SEGMENTED=4, INLINE_BYTES=0):
        store = tstore.open(url)
        for i in range(34):
            with store.transaction() as tx:
                if i == 0:
                    tx.create_array("a", (60,), "i4", (1,)).write(0)
                at = i * 7 % 40
                tx.array("a")[at : at + (2 if i % 3 else 10 + i % 9)].write(i)
                if i % 3 == 0 and i:  # a commit between the snapshot and the commit of a merge
                    with store.transaction() as other:
                        other.array("a")[(at + 30) % 60].write(-i)
                if i in (4, 14):
                    tx.array("a").append(np.full(8, i))
    return ROOTS


def pages(url: str) -> dict[str, int]:
    with override_constants(**ROOTS, SHORT_MANIFEST=2000, PAGE_BYTES=800, INLINE_MANIFEST_BYTES=1000):
        store = tstore.open(url)
        with store.transaction() as tx:
            for i in range(40):
                tx.create_array(f"g{i % 5}/p{i:02}", (5,), "f4", (2,)).write(i)
        for k in range(1, 10):
            with store.transaction() as tx:
                for i in range(k, 40, 17):
                    if k < 6 or i % 5 != 3:
                        tx.array(f"g{i % 5}/p{i:02}")[1:3].write(k)
                if k == 5:
                    tx.delete("g3")
    return ROOTS


def parallel(work: Callable[[int], object], numbers: Iterable[int]) -> None:
    threads = [threading.Thread(target=work, args=(i,)) for i in numbers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def hosts(url: str) -> dict[str, int]:
    def save(host: int) -> None:
        rows = np.full((2, 8), host, "f4")
        tree = {
            "w": tstore.Shards((16, 8), "f4", [((slice(2 * host, 2 * host + 2), slice(0, 8)), rows)]),
            "alike": np.arange(10.0),
            "rng": PerHost(
                {"h": host, "a": np.arange(host + 2), "b": np.zeros(2, ml_dtypes.bfloat16), "t": ("x", None)}
            ),
            "n": {"k": 3, 5: np.float32(2)},
        }
        tstore.save(url, tree, step=1, host=host, hosts=8, attempt="a")

    parallel(save, range(8))
    return {"hosts": 8}


def checkpoints(url: str) -> None:
    scalars = [True, 2.5, -0.0, float("inf"), float("nan"), 1 + 2j, "é", b"\0\xff", 10**40, None]
    odd = {5: np.arange(3), "5": np.arange(4), "a/b": 1, "%": np.zeros(2), "": np.ones(1), "..": np.ones(2)}
    tree = {
        "w": np.random.default_rng(0).standard_normal((40, 40)).astype("f4"),
        "t": (1, np.float32(2), scalars),
        "odd": odd | {".": 7, "zarr.json": 3, 1.5: np.arange(2), True: np.arange(1), b"x": np.arange(6)},
        "pair": Pair(np.arange(5), {"x": 1}),
        "point": Point(np.arange(2), "s"),
        "nothing": [{}, [], ()],
        "text": np.array("text"),
        "host": PerHost([1, {"a": np.arange(3)}]),
        "user": {"%host=0": np.arange(2)},
        "bfloat16": np.arange(300).astype(ml_dtypes.bfloat16),
        "many": {f"k{i}": np.arange(2) + i for i in range(20)},
    }
    tstore.save(url, tree, step=3, metrics={"loss": 1.0}, attributes={"user": 1})
    tstore.save(url, tree["w"], step=4)
    tstore.save(url, tree, step=5, codecs={"w": "e4m3", "many/**": "lossless"})


def other_arrays(url: str) -> None:
    """Checkpoints to which another program added arrays, or of which it deleted some."""
    nested = {"b": {"x": np.arange(3), "n": 3}, "c": 4}
    mixed = [np.arange(2), 5, None, "x"]
    tstore.save(url, {"a": nested, "p": PerHost(3), "q": PerHost(4), "l": mixed}, step=7)
    store = tstore.open(url)
    with store.transaction() as tx:
        tx.delete("q")
        tx.delete("a/b/x")
        tx.create_array("r/w", (3,), "i4", (3,)).write(1)
    with store.transaction() as tx:
        tx.create_array("a/c/d", (3,), "i4", (3,)).write(1)


def quantized(url: str) -> dict[str, int]:
    rng = np.random.default_rng(0)
    with override_constants(**ROOTS):
        for i in range(3):
            w = rng.standard_normal((2, 64, 64)).astype("f4")
            tstore.save(url, {"w": w[0], "b": w[1].astype(ml_dtypes.bfloat16), "i": np.arange(100)}, step=i)
        tstore.quantize(url, "e4m3")
        tstore.quantize(url, {"**": "e2m1"}, block=32, scale="e4m3")
        tstore.quantize(url, bits=3.3, coding="entropy", at="step/1")
        tstore.quantize(url, bits=5, coding="packed")
        tstore.quantize(url, {"w": "e3m2"}, block=16, scale="6bit", tag="six")
        tstore.open(url).collect(Keep(last=2))
    return ROOTS


def one_record(url: str) -> None:
    store = tstore.open(url)
    with store.transaction() as tx:
        for i in range(6):
            tx.create_array(f"p{i}", (6,), "i4", (2,)).write(0)

    def commit(i: int) -> None:
        with store.transaction(str(i), tag=f"t{i}") as tx:
            tx.array(f"p{i}")[i].write(i)
            tx.create_array(f"q{i}", (2,), "i4", (2,)).write(i)

    parallel(commit, range(6))


def repaired(url: str) -> dict[str, int]:
    with override_constants(**ROOTS):
        store = tstore.open(url)
        for i in range(14):
            with store.transaction(tag=f"t{i}") as tx:
                if i == 0:
                    tx.create_array("x", (30,), "i8", (1,)).write(0)
                tx.array("x")[i].write(i)
        store.close()
        for version in (6, 13):
            flip(Path(url, "commits", f"{version:020}"), 40)
        tstore.open(url).repair([6, 13])
        with tstore.open(url).transaction() as tx:
            tx.array("x")[0].write(100)
    return ROOTS


def copied(url: str) -> None:
    for i in range(2):
        tstore.save(url + "-source", {"w": np.arange(50.0) + i, "k": i}, step=i)
    tstore.copy(url + "-source", url)
    with tstore.open(url).transaction() as tx:
        tx.array("w")[:3].write(1)


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


KINDS = [dtypes, codecs, low_bit, history, default_intervals, segments, short_segments, pages, hosts, checkpoints]
KINDS += [other_arrays, quantized, one_record, repaired, copied]
