"""A store in which a newer tstore has committed: what it added is refused, and nothing takes its place."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from msgspec import msgpack

import tstore
from tstore.core.format.frame import COPYING, Link, body_of, check_of, link_of, linked, seal
from tstore.core.format.layout import commit_key
from tstore.core.storage.objects import Durability
from tstore.errors import UnsupportedFormat


async def write(store: tstore.Store) -> None:
    async with store.transaction() as tx:
        await (await tx.array("x"))[0].write(7)


OPERATIONS: dict[str, Callable[[tstore.Store], Awaitable[Any]]] = {
    "read": lambda store: store.snapshot(),
    "write": write,
    "collect": lambda store: store.collect(tstore.Keep(last=1)),
}


@pytest.mark.parametrize("operation", OPERATIONS)
async def test_rows_with_a_further_column_are_refused(operation: str, url: str) -> None:
    """As the base of a chunk that is stored as a difference: without it, its bytes would be taken for values."""
    store = await tstore.open(url)
    async with store.transaction() as tx:
        await (await tx.create_array("x", (3,), "i8", (1,))).write([1, 2, 3])
    storage = store.log.reader.storage
    first = await storage.get(commit_key(1))
    fields = msgpack.decode(body_of(first))
    [manifest] = fields[7]
    manifest += [bytes(8 * 3)]
    newer = linked(
        seal(b"R", COPYING + 1, msgpack.encode(["newer", 1, *fields[2:]])),
        Link(link_of(first).log_id, 1, check_of(first)),
    )
    await storage.create(commit_key(2), newer, Durability.FSYNC)
    other = await tstore.open(url)
    with pytest.raises(UnsupportedFormat, match=f"version {COPYING + 1}; .* install a newer one"):
        await OPERATIONS[operation](other)
    assert await storage.get(commit_key(2)) == newer
    assert set(await storage.sizes(map(commit_key, (2, 3)))) == {commit_key(2)}
