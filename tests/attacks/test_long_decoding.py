"""Metadata that takes long to decode: a cancelled read does not decode it to the end."""

from __future__ import annotations

import asyncio
import gc
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress

import msgspec
import numpy as np
import pytest

from tests.support.forging import sealed
from tstore.core.format.frame import NO_RECORD, check_of
from tstore.core.format.layout import root_key
from tstore.core.format.objects.object_ref import ObjectRef
from tstore.core.format.objects.segments import SEGMENT_ROW
from tstore.core.log.objects import MetadataObjects
from tstore.core.storage.memory import MemoryStorage

COUNT = 250_000  # segments: Python makes an object for each
MANIFEST = "txn/a/manifest"


def manifest() -> list[object]:
    """Return the fields of a manifest of one array with many segments, after its tag."""
    segments = np.zeros(COUNT, SEGMENT_ROW)
    segments["rows"] = segments["packs"] = 1
    segments["length"] = 44
    document = b'{"zarr_format":3,"node_type":"array"}'
    count = np.array([COUNT], "<u4").tobytes()
    columns = [bytes(4), b"\1", bytes(8), b"", b"", b"", b"", b"", count, segments.tobytes(), bytes(4 * COUNT), []]
    return ["manifest", ["txn/a/pack-0"], [], [document], ["x"], *columns]


async def read_root(objects: MetadataObjects) -> None:
    await objects.root(64)


async def read_whole_root(objects: MetadataObjects) -> None:
    await objects.whole_root(64)


async def read_manifest(objects: MetadataObjects) -> None:
    data = await objects.storage.get(MANIFEST)
    await objects.manifest(ObjectRef(MANIFEST, len(data), check_of(data), 44 * COUNT))


@pytest.fixture(autouse=True)
def no_collections() -> Iterator[None]:
    """Run no garbage collections: pytest would report an exception that ends a callback of theirs."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("read", [read_root, read_whole_root, read_manifest])
async def test_a_cancelled_read_ends(read: Callable[[MetadataObjects], Awaitable[None]]) -> None:
    storage = MemoryStorage(uuid.uuid4().hex)
    root = [64, NO_RECORD, {}, manifest()]
    await storage.replace(root_key(64), sealed(b"T\4", msgspec.msgpack.encode(root)))
    await storage.replace(MANIFEST, sealed(b"M\4", msgspec.msgpack.encode(manifest())))
    objects = MetadataObjects(storage)
    begin = time.process_time()
    await read(objects)
    whole = time.process_time() - begin
    begin = time.process_time()
    task = asyncio.ensure_future(read(objects))
    asyncio.get_running_loop().call_later(whole / 8, task.cancel)  # of a decoding that takes as long or longer
    with suppress(asyncio.CancelledError):
        await task
    assert task.cancelled()
    assert time.process_time() - begin < 0.75 * whole
