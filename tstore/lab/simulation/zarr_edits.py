"""Transactions of a simulated host through `ZarrStore`: writes of fill values, and queries for chunks.

zarr-python deletes a chunk instead of writing fill values to all of it, and asks whether chunks exist. So these
are a write and a read like any other.
"""

from __future__ import annotations

import asyncio

import numpy as np
from zarr.core.buffer.cpu import Buffer

from tstore.core.transactions.staging import Isolation
from tstore.core.transactions.transaction import Transaction
from tstore.lab.simulation.client import PATHS, Client
from tstore.lab.simulation.edits import create, new_transaction
from tstore.lab.simulation.history import PER_CHUNK, Attempt, Create, Look, Put, width_of
from tstore.zarr import ZarrStore

__all__ = ["write_with_zarr"]


async def write_with_zarr(client: Client) -> None:
    """Run a transaction that looks at chunks and writes them, mostly with fill values."""
    isolation: Isolation = "serializable" if client.random.random() < 0.6 else "snapshot"
    tx, attempt = new_transaction(client, {}, isolation, durable=True)
    await client.conclude(tx, attempt, 0, _edit_and_commit(client, tx, attempt))


async def _edit_and_commit(client: Client, tx: Transaction, attempt: Attempt) -> int | None:
    base = await tx.staging.base()
    attempt.bases[0] = base.version
    if base.version < client.history.start:  # stale listings or sizes hide the newest versions
        attempt.aborted = True
        await tx.abort()
        return None
    store, ops = ZarrStore(tx), attempt.ops[0]
    for _ in range(client.random.randint(1, 4)):
        path = client.random.choice(PATHS)
        if client.random.random() < 0.5:
            await asyncio.sleep(client.random.expovariate(1))
        if not await store.exists(f"{path}/zarr.json"):
            _note_look(client, attempt, base.head, path, None)
            if client.random.random() < 0.5:
                await create(tx, path, None)
                ops.append(Create(path))
            continue
        width = width_of(path)
        cells = (await tx.array(path)).shape[0] // width
        count = -(-cells // PER_CHUNK)
        number = client.random.randrange(count)
        work = client.random.choice(("fill", "values", "exists", "list", "list"))
        if work == "exists":
            absent = set() if await store.exists(f"{path}/c/{number}") else {number}
            _note_look(client, attempt, base.head, path, absent)
        elif work == "list":
            listed = {int(key.rpartition("/")[2]) async for key in store.list_prefix(f"{path}/c/")}
            absent = set(range(count)) - listed
            _note_look(client, attempt, base.head, path, absent)
            if absent and client.random.random() < 0.5:  # it will be written anyway
                number, work = min(absent), "fill"
        if work in ("fill", "values"):
            value = 0 if work == "fill" else client.history.new_value()
            await _write(store, f"{path}/c/{number}", value, (cells - number * PER_CHUNK) * width, width)
            start = number * PER_CHUNK
            ops.append(Put(path, start, min(cells, start + PER_CHUNK), value))
    return await tx.commit()


async def _write(store: ZarrStore, key: str, value: int, size: int, width: int) -> None:
    """Write `size` values of a chunk, or delete it, as zarr-python does if all are zeros."""
    if value:
        values = np.zeros(PER_CHUNK * width, np.int64)
        values[:size] = value
        await store.set(key, Buffer.from_bytes(values.tobytes()))
    else:
        await store.delete(key)


def _note_look(client: Client, attempt: Attempt, head: int, path: str, absent: set[int] | None) -> None:
    look = Look(tuple(attempt.ops[0]), path, None if absent is None else frozenset(absent))
    attempt.looks.append(look)
    client.history.looks.append((client.host.name, head, look))
