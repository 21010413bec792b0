"""Independent transactions of a simulated host: random changes of arrays and tags, alone or concurrent."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np

from tstore.core.transactions.staging import Isolation
from tstore.core.transactions.transaction import Transaction
from tstore.errors import TStoreError
from tstore.lab.simulation.client import PATHS, Client
from tstore.lab.simulation.history import (
    CELLS,
    PER_CHUNK,
    Append,
    Attempt,
    Create,
    Delete,
    Listing,
    Put,
    Read,
    Resize,
    TransactionRead,
    cells_of,
    width_of,
)

__all__ = ["burst", "create", "new_transaction", "transact", "write"]

_RESIZABLE = PATHS[1:]  # not the first array, because cooperative transactions write to fixed cells of it
_LONGEST = 4 * CELLS  # the length up to which values are appended
_TAGS = ("best", "good")
_LONG_NOTE = "n" * 17_000  # makes a manifest too long to be inlined in its record
_NOT_DURABLE = 0.1  # the share of transactions with durability "none"
_EARLIER = 0.5  # the share of tags that are set on an earlier version than the transaction's own


async def transact(client: Client) -> None:
    """Run a transaction of a few operations, which may be aborted or cancelled."""
    tags: dict[str, Any] = {}
    if client.random.random() < 0.3:
        tag = client.random.choice(_TAGS)
        tags[client.random.choice(("move_tag", "move_tag", "tag", "drop_tag", "drop_tag"))] = tag
    isolation: Isolation = "serializable" if client.random.random() < 0.25 else "snapshot"
    tx, attempt = new_transaction(client, tags, isolation, durable=client.random.random() >= _NOT_DURABLE)
    began = client.loop.time()
    if client.random.random() < 0.05:
        await _interrupt(client, tx, attempt, asyncio.create_task(_edit_and_commit(client, tx, attempt, began)))
        return
    await client.conclude(tx, attempt, 0, _edit_and_commit(client, tx, attempt, began))


async def burst(client: Client) -> None:
    """Run concurrent transactions that each write a chunk and may change a tag; some share a group commit."""
    try:
        existing = sorted((await client.store.snapshot()).tags.keys() & set(_TAGS))
    except TStoreError:
        return
    durable = client.random.random() >= _NOT_DURABLE
    work = []
    for number in range(client.random.randint(3, 6)):
        tags: dict[str, Any] = {}
        if client.random.random() < 0.5:
            tag = client.random.choice(_TAGS)
            tags = {"drop_tag": tag} if tag in existing and client.random.random() < 0.6 else {"move_tag": tag}
        tx, attempt = new_transaction(client, tags, "snapshot", durable=durable)
        work.append(client.conclude(tx, attempt, 0, _write_chunk(client, tx, attempt, PATHS[2 + number % 3])))
    await asyncio.gather(*work)


def new_transaction(
    client: Client, tags: dict[str, Any], isolation: Isolation, *, durable: bool
) -> tuple[Transaction, Attempt]:
    """Begin a transaction with a unique message and unique metadata, and record it in the history."""
    value = client.history.new_value()
    message, metadata = f"work {value}", {"value": value}
    tx = client.store.transaction(
        message, isolation=isolation, durability="fsync" if durable else "none", metadata=dict(metadata), **tags
    )
    attempt = client.history.begin((tx.id,), tuple(t for key, t in tags.items() if key != "drop_tag"))
    attempt.message, attempt.metadata, attempt.durable = message, metadata, durable
    attempt.serializable = isolation == "serializable"
    attempt.created_tags = tuple(t for key, t in tags.items() if key == "tag")
    attempt.dropped_tags = tuple(t for key, t in tags.items() if key == "drop_tag")
    return tx, attempt


async def _write_chunk(client: Client, tx: Transaction, attempt: Attempt, path: str) -> int:
    """Write one chunk of a small array, if the array exists, and commit."""
    attempt.bases[0] = max(client.history.start, (await tx.staging.base()).version)
    if path in await tx.paths():
        cells = (await tx.array(path)).shape[0]
        start = PER_CHUNK * client.random.randrange(-(-cells // PER_CHUNK))
        put = Put(path, start, min(cells, start + PER_CHUNK), client.history.new_value())
        await write(tx, put)
        attempt.ops[0].append(put)
    return await tx.commit()


async def _interrupt(client: Client, tx: Transaction, attempt: Attempt, work: asyncio.Task[int | None]) -> None:
    """Cancel a transaction while it writes or commits; if it was committed all the same, record its version."""
    await asyncio.wait([work], timeout=client.random.expovariate(1))
    work.cancel()
    await asyncio.wait([work])
    if not work.cancelled() and (error := work.exception()) is not None:
        if not isinstance(error, TStoreError):
            raise error
        attempt.outcomes.append(error)
    if tx.version is not None:
        attempt.outcomes.append(tx.version)
        client.acknowledge(tx.version, attempt.transaction, durable=attempt.durable)
    await tx.abort()


async def _edit_and_commit(client: Client, tx: Transaction, attempt: Attempt, began: float) -> int | None:
    """Apply a few operations and commit; sometimes abort instead, and return None."""
    base = await tx.staging.base()
    attempt.bases[0] = base.version
    if attempt.bases[0] < client.history.start:  # stale listings or sizes hide the newest versions
        attempt.aborted = True
        await tx.abort()
        return None
    paths = frozenset(await tx.paths())
    client.history.listings.append(Listing(client.host.name, began, base.head, paths))
    attempt.transaction_reads.append(TransactionRead((), None, paths))
    if attempt.tags and client.random.random() < _EARLIER:
        attempt.target = await tx.staging.tag_version(client.random.randint(1, max(1, attempt.bases[0])))
    for _ in range(client.random.randint(1, 3)):
        await _edit_array(client, tx, attempt, base.head)
        if client.random.random() < 0.3:
            await asyncio.sleep(client.random.expovariate(1))
    if client.random.random() < 0.05:
        attempt.aborted = True
        await tx.abort()
        return None
    return await tx.commit()


async def _edit_array(client: Client, tx: Transaction, attempt: Attempt, head: int) -> None:
    """Apply one operation to a random array: create it if it does not exist, else read or change it.

    `head` is the version on which the transaction is based.
    """
    ops = attempt.ops[0]
    path = client.random.choice(PATHS)
    exists = path in await tx.paths()
    draw = client.random.random()
    if not exists:
        note = {"note": _LONG_NOTE} if client.random.random() < 0.1 else None
        await create(tx, path, note)
        ops.append(Create(path))
    elif draw < 0.1 and Create(path) not in ops:
        await tx.delete(path)
        ops.append(Delete(path))
    elif draw < (0.5 if attempt.serializable else 0.3):
        array = await tx.array(path)
        seen = {path: cells_of(path, await array.read())}
        read = Read(client.host.name, 0, head, seen, own_ops=tuple(ops), partial=True)
        client.history.reads.append(read)
        attempt.transaction_reads.append(TransactionRead(tuple(ops), path, seen[path]))
    elif draw > 0.9 and path in _RESIZABLE:
        cells = client.random.randint(PER_CHUNK + 1, CELLS + 3)
        await (await tx.array(path)).resize((cells * width_of(path),))
        ops.append(Resize(path, cells))
    elif draw > 0.82 and path in _RESIZABLE:
        array, width = await tx.array(path), width_of(path)
        if array.shape[0] < _LONGEST * width:
            append = Append(path, client.random.choice((1, PER_CHUNK, 3, 6)), client.history.new_value())
            await array.append(np.full(append.cells * width, append.value))
            ops.append(append)
    else:
        cells = (await tx.array(path)).shape[0] // width_of(path)
        if draw < 0.6:
            start = PER_CHUNK * client.random.randrange(-(-cells // PER_CHUNK))
            stop = min(cells, start + PER_CHUNK)
        else:
            start = client.random.randrange(cells)
            stop = min(cells, start + client.random.randint(1, 5))
        put = Put(path, start, stop, client.history.new_value())
        await write(tx, put)
        ops.append(put)


async def create(tx: Transaction, path: str, attributes: dict[str, Any] | None) -> None:
    """Create an array of zeros."""
    width = width_of(path)
    shape, chunks = (CELLS * width,), (PER_CHUNK * width,)
    await tx.create_array(path, shape, "int64", chunks, attributes=attributes, sparse=True)


async def write(tx: Transaction, put: Put) -> None:
    """Write the values of an operation."""
    array, width = await tx.array(put.path), width_of(put.path)
    await array[put.start * width : put.stop * width].write(put.value)
