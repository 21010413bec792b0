"""Records whose form costs more than it may, or whose manifests lie where another object does."""

from __future__ import annotations

import struct
import time
import tracemalloc
import uuid
from pathlib import Path

import msgspec
import numpy as np
import pytest

import tstore
from tests.support.forging import forged, sealed
from tests.support.served import WRITE, client_of, everybody
from tstore.errors import Corrupt
from tstore.format.encoding import decode, decode_record, encode
from tstore.format.layout import commit_key
from tstore.format.records import Record
from tstore.format.references import Manifest, reference
from tstore.format.tree import Changes, NodeChange, Tree
from tstore.server import Server
from tstore.storage.objects import Durability


async def test_no_record_names_the_manifest_of_another_transaction(tmp_path: Path) -> None:
    """The ledger does not know that it is needed: a gc would remove it with the transaction that wrote it."""
    url = str(tmp_path / "store")
    await tstore.save(url, {"w": np.arange(10)}, step=0)
    async with Server(url, access=everybody()) as server, client_of(server, WRITE) as client:
        data = encode(Manifest.of([]))
        assert (await client.create("/txn/other/manifest-1", data)).status == 201
        record = Record("forged", 1, 0.0, manifests=(reference("txn/other/manifest-1", data),))
        answer = await client.create("/" + commit_key(2), forged(record))
        assert answer.status == 422
        assert b"another transaction" in answer.body


@pytest.mark.parametrize("name", ["readme.sh", "roots/00000000000000000064", "txn/other/manifest-1"])
async def test_a_copy_makes_no_object_that_a_forged_reference_names(name: str) -> None:
    source = await tstore.open(f"memory://{uuid.uuid4()}")
    await tstore.save(source, {"w": np.arange(10)}, step=0)
    backend = source.log.backend
    data = encode(Manifest.of([]))
    await backend.create(name, data, Durability.NONE)
    forgery = Record("forged", 1, 0.0, manifests=(reference(name, data),))
    await backend.create(commit_key(2), forged(forgery), Durability.NONE)
    await backend.create(commit_key(3), forged(Record("behind", 2, 0.0)), Durability.NONE)
    destination = f"memory://{uuid.uuid4()}"
    with pytest.raises(Corrupt, match="00000000000000000002"):
        await tstore.copy(source.url, destination)
    found = await (await tstore.open(destination, "a")).log.backend.list("")
    assert name not in found
    with pytest.raises(Corrupt, match="00000000000000000002"):
        await (await tstore.open(source.url, "r")).snapshot()


def test_parts_are_counted_before_any_is_made() -> None:
    fields = [msgspec.msgpack.encode(value) for value in msgspec.structs.astuple(Record("t", 0, 0.0))[:15]]
    parts = b"\xdd" + struct.pack(">I", 1 << 20) + b"\x90" * (1 << 20)
    data = sealed(b"R\1", b"\xdc\x00\x10" + b"".join(fields) + parts)
    for read in (decode_record, lambda data: decode(data, Record)):
        tracemalloc.start()
        try:
            with pytest.raises(Corrupt, match="1024"):
                read(data)
            assert tracemalloc.get_traced_memory()[1] < 16 << 20
        finally:
            tracemalloc.stop()


def test_many_tags_are_dropped_from_many() -> None:
    count = 30_000
    tree = Tree(1, {}, {f"a{i:05}": 1 for i in range(count)})
    began = time.process_time()
    after = tree.after(2, Record("t", 1, 0.0, dropped=tuple(f"b{i:05}" for i in range(count))), [])
    assert len(after.tags) == count
    assert time.process_time() - began < 1


def test_many_paths_are_deleted_where_many_are_written() -> None:
    """Each transaction that meets such a commit compares itself with it, in its event loop."""
    nodes = {f"x/{i}": NodeChange(True, np.empty(0, np.uint64)) for i in range(200)}
    deleted = tuple(f"y/{i}" for i in range(100_000))
    began = time.process_time()
    for mine, other in ((Changes(nodes), Changes({}, deleted)), (Changes({}, deleted), Changes(nodes))):
        assert mine.overlap(other).fatal == []
    assert Changes(nodes).overlap(Changes({}, ("x/7", "x/99"))).fatal == ["x/7", "x/99"]
    assert sorted(Changes(nodes).overlap(Changes({}, ("x",))).fatal) == sorted(nodes)
    assert time.process_time() - began < 2
