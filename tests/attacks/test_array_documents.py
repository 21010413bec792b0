"""Fuzzed `zarr.json` documents: each is read, or refused with the path of its array."""

from __future__ import annotations

import json
import random
import uuid
from typing import Any

import msgspec
import numpy as np
import pytest

import tstore
from tests.support.fuzzing import ABSURD, bounded_time, changed, fuzz, mutated, nested
from tstore.core.format.arrays.array_metadata import ArrayMeta
from tstore.core.format.objects.documents import Document
from tstore.errors import Corrupt, InvalidArgument, UnsupportedFormat

BLOSC = {"cname": "lz4", "clevel": 3, "shuffle": "shuffle", "typesize": 4, "blocksize": 0}
DOCUMENTS = [
    ArrayMeta.new((8, 6), "float32", (4, 6), "e4m3", attributes={"unit": "m"}, dimension_names=("x", None)),
    ArrayMeta.new((9,), "int16", (4,), "lossless", fill_value=-5, sparse=True),
    ArrayMeta.new((), "complex64", (), None, fill_value=1 - 2j),
    ArrayMeta.new((2, 0, 3), "bfloat16", (2, 1, 3), {"format": "e3m2", "axis": -1, "scale": "max"}),
    ArrayMeta.new((64,), "float64", (32,), [{"name": "exmy", "configuration": {"format": "e2m1", "block": 32}}]),
    ArrayMeta.new(
        (5, 5),
        "bool",
        (5, 5),
        [{"name": "bytes"}, {"name": "zstd", "configuration": {"level": 3, "checksum": True}}],
        attributes={"a": {"b": [1, None, "x"]}},
    ),
    ArrayMeta.new(
        (100,),
        "uint64",
        (100,),
        [
            {"name": "bytes", "configuration": {"endian": "little"}},
            {"name": "blosc", "configuration": BLOSC},
            {"name": "gzip", "configuration": {"level": 5}},
        ],
    ),
]

NAMES: list[Any] = ["bytes", "exmy", "zstd", "gzip", "blosc", "lz4", "sharding_indexed", "transpose", "crc32c"]
NAMES += ["float128", "object", "str", "datetime64[s]", "float32", "f4", ">f4", "int4", "float8_e4m3fn", "f4,f4"]
NAMES += ["e99m99", "e8m7", "e0m1", "e4m3b9", "e4m3b-600", "default", "v2", "regular", "rectangular", "0x7fc00000"]
ODD = [*ABSURD, *NAMES, {"must_understand": True}, {"must_understand": False}, {"name": "zstd"}, [1, 2]]


def document(choice: random.Random) -> bytes:
    """Return a mutated `zarr.json`."""
    good = choice.choice(DOCUMENTS).document
    match choice.randrange(12):
        case 0:
            return mutated(good, choice)
        case 1:
            fields = json.loads(good)
            deep = choice.choice(list(fields))
            return json.dumps({**fields, deep: "PLACE"}).replace('"PLACE"', nested(choice)).encode()
        case _:
            fields = json.loads(good)
            for _ in range(choice.choice((1, 1, 1, 2, 4))):
                fields = changed(fields, choice, ODD)
            return json.dumps(fields).encode("utf-8", "surrogatepass")


def use(meta: ArrayMeta) -> None:
    """Use metadata as an array does."""
    assert all(type(n) is int for n in (*meta.shape, *meta.chunks))
    assert isinstance(meta.attributes, dict)
    assert np.ndim(meta.fill_value) == 0
    repr((meta.attributes, meta.fill_value, meta.dimension_names, meta.sparse, meta.nbytes, meta.chunk_count))
    msgspec.json.encode(meta.attributes)
    assert meta.with_shape([n // 2 for n in meta.shape]).chunks == meta.chunks
    if meta.chunk_size * meta.dtype.itemsize <= 1 << 20:
        chunk = np.full(meta.chunks, meta.fill_value, meta.dtype)
        try:
            encoded = meta.chain.encode(chunk, np.empty(meta.encoded_size, np.uint8))
        except InvalidArgument:  # a value beyond the format
            return
        meta.chain.decode(encoded, np.empty(meta.chunks, meta.dtype))


def test_odd_documents() -> None:
    def attack(choice: random.Random) -> bool:
        data = document(choice)
        try:
            meta = ArrayMeta.parse(data)
        except (Corrupt, UnsupportedFormat) as error:
            said = str(error)
        else:
            use(meta)
            return True
        assert len(said) < 2000
        return False

    fuzz("array documents", attack, 1500)


def with_field(*place: Any, value: Any) -> dict[str, Any]:
    fields = json.loads(DOCUMENTS[0].document)
    inner = fields
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    return fields  # type: ignore[no-any-return]


BYTES = {"name": "bytes", "configuration": {"endian": "little"}}
LEVEL = {"name": "zstd", "configuration": {"level": "x"}}
CASES: dict[str, tuple[type[Exception], dict[str, Any]]] = {
    "a codec's level is text": (UnsupportedFormat, with_field("codecs", value=[BYTES, LEVEL])),
    "codecs are text": (Corrupt, with_field("codecs", value="exmy")),
    "no codecs": (Corrupt, with_field("codecs", value=[])),
    "a configuration is a number": (Corrupt, with_field("codecs", 0, "configuration", value=5)),
    "a format is a list": (UnsupportedFormat, with_field("codecs", 0, "configuration", "format", value=[])),
    "a block of 33": (UnsupportedFormat, with_field("codecs", 0, "configuration", "block", value=33)),
    "an axis beyond": (Corrupt, with_field("codecs", 0, "configuration", "axis", value=10**30)),
    "attributes are a list": (Corrupt, with_field("attributes", value=[["a", 1]])),
    "dimension names are text": (Corrupt, with_field("dimension_names", value="xy")),
    "dimension names are numbers": (Corrupt, with_field("dimension_names", value=[1, 2])),
    "too few dimension names": (Corrupt, with_field("dimension_names", value=["x"])),
    "a shape is an object": (Corrupt, with_field("shape", value={})),
    "a shape of booleans": (Corrupt, with_field("shape", value=[True, True])),
    "a shape of 2^63": (Corrupt, with_field("shape", value=[1 << 63, 1])),
    "a shape that a zero hides": (Corrupt, with_field("shape", value=[1 << 61, 0])),
    "a shape of 33 dimensions": (UnsupportedFormat, with_field("shape", value=[1] * 33)),
    "another dtype": (UnsupportedFormat, with_field("data_type", value="int3")),
    "an extension dtype": (UnsupportedFormat, with_field("data_type", value={"name": "numpy.datetime64"})),
    "a dtype by another name": (UnsupportedFormat, with_field("data_type", value="f4")),
    "a fill value of many": (Corrupt, with_field("fill_value", value=[1, 2])),
    "a fill value of text": (Corrupt, with_field("fill_value", value="1e5")),
    "no fill value": (Corrupt, with_field("fill_value", value=None)),
    "a key that must be understood": (UnsupportedFormat, with_field("variable_chunks", value={"a": 1})),
    "storage transformers": (UnsupportedFormat, with_field("storage_transformers", value=[{"name": "x"}])),
    "sparse is text": (Corrupt, with_field("tstore", value={"sparse": "no"})),
    "our own field is a list": (Corrupt, with_field("tstore", value=[])),
    "another node type": (UnsupportedFormat, with_field("zarr_format", value=4)),
    "chunk grid by a list": (UnsupportedFormat, with_field("chunk_grid", "name", value=["regular"])),
}


async def store_with(document: bytes) -> tstore.Store:
    """Return a store with this document, as another program could have written it."""
    store = await tstore.open(f"memory://{uuid.uuid4()}")
    async with store.transaction() as tx:
        array = await tx.create_array("group/w", (8, 6), "float32", (4, 6), "e4m3")
        await array.write(np.ones((8, 6)))
    node = (await store.snapshot()).tree.nodes["group/w"]
    node.metadata = Document(document)
    return store


@pytest.mark.parametrize("name", CASES)
async def test_the_error_of_an_invalid_document_names_its_path(name: str) -> None:
    kind, fields = CASES[name]
    store = await store_with(json.dumps(fields).encode())
    snapshot = await store.snapshot()
    with pytest.raises(kind, match=r"^group/w: "):
        await snapshot.array("group/w")
    with pytest.raises(kind, match=r"group/w: "):
        await tstore.restore(store, at=1)


@pytest.mark.parametrize("levels", [200, 900, 5000, 100_000])
@pytest.mark.parametrize("field", ["attributes", "shape", "fill_value", "codecs", "tstore", "other"])
async def test_deep_documents_are_corrupt(field: str, levels: int) -> None:
    fields = json.dumps(with_field(field, value="PLACE"))
    for deep in ("[" * levels + "]" * levels, '{"a":' * levels + "1" + "}" * levels):
        store = await store_with(fields.replace('"PLACE"', deep).encode())
        with pytest.raises((Corrupt, UnsupportedFormat), match=r"^group/w: "):
            await (await store.snapshot()).array("group/w")


async def test_an_empty_array_of_2_to_the_60_rows_is_read_at_once() -> None:
    store = await tstore.open(f"memory://{uuid.uuid4()}")
    async with store.transaction() as tx:
        array = await tx.create_array("a", (1 << 57, 0), "float32", (1, 1))
        with bounded_time(5):
            await array.write(np.empty((1 << 57, 0), np.float32))
    with bounded_time(5):
        assert (await (await store.snapshot()).array("a")).shape == (1 << 57, 0)
        assert (await (await (await store.snapshot()).array("a")).read()).shape == (1 << 57, 0)


async def test_an_array_beyond_memory_is_an_error_that_names_it() -> None:
    store = await tstore.open(f"memory://{uuid.uuid4()}")
    async with store.transaction() as tx:
        await tx.create_array("a", (1 << 55,), "float32", (1 << 55,), None, sparse=True)
    array = await (await store.snapshot()).array("a")
    with pytest.raises(InvalidArgument, match="a does not fit in memory"):
        await array.read()
    with pytest.raises(InvalidArgument, match="a does not fit in memory"):
        await tstore.restore(store, at=1)
