"""The fuzzer's transactions and reads: single, concurrent, and misused."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

import tstore
from tests.fuzz.journal import Attempt, Create, Group, Read, Resize, Write, sample
from tests.fuzz.timeline import reading
from tests.fuzz.worker import EXPECTED, TAGS, OpenTransaction, Worker
from tests.support.store_model import is_at_or_below
from tstore.errors import (
    AlreadyExists,
    CommitOutcomeUnknown,
    Conflict,
    InvalidArgument,
    Misuse,
    NotFound,
    TStoreError,
)

__all__ = [
    "begin",
    "commit",
    "commit_beside_write",
    "commit_together",
    "read",
    "stale_handles",
    "work",
]

PATHS = ("a", "b", "g/x", "g/y", "g/h/z")
_MAX_OPEN = 4


async def begin(worker: Worker) -> None:
    """Begin a transaction with a few operations, and commit it or leave it open."""
    if len(worker.open) >= _MAX_OPEN:
        await commit(worker)
        return
    choice, store = worker.choice, await worker.store()
    options: dict[str, Any] = {}
    if choice.random() < 0.3:
        options[choice.choice(("tag", "move_tag", "drop_tag"))] = choice.choice(TAGS)
    if choice.random() < 0.25:
        options["isolation"] = "serializable"
    if choice.random() < 0.2:
        options["durability"] = "none"
    message, metadata = worker.message(), {"n": choice.randrange(1000), "list": [1, "ä", None, {"x": 0.5}]}
    tx = store.transaction(message, metadata=metadata, **options)
    tags = tuple(options[key] for key in ("tag", "move_tag") if key in options)
    dropped = (options["drop_tag"],) if "drop_tag" in options else ()
    moved = tuple(options[key] for key in ("move_tag",) if key in options)
    attempt = Attempt(message, (), tags, moved, dropped, metadata=metadata)
    serializable = "isolation" in options
    base = (await tx.staging.base()).version
    await tx.paths()  # raises for invalid tags
    if tags and base and choice.random() < 0.5:
        attempt = attempt._replace(target=await tx.staging.tag_version(choice.randint(1, base)))
    opened = OpenTransaction(tx, attempt, base, serializable=serializable)
    worker.open.append(opened)
    await _edit(worker, opened)
    if choice.random() < 0.5:
        await _commit(worker, opened)


async def work(worker: Worker) -> None:
    """Continue an open transaction."""
    if worker.open:
        await _edit(worker, worker.choice.choice(worker.open))


async def commit(worker: Worker) -> None:
    """Commit an open transaction, or sometimes abort it."""
    if not worker.open:
        return
    opened = worker.choice.choice(worker.open)
    if worker.choice.random() < 0.15:
        worker.open.remove(opened)
        await opened.tx.abort()
        return
    await _commit(worker, opened)


async def commit_together(worker: Worker) -> None:
    """Commit all open transactions at once, so that some share a group commit."""
    opened, worker.open = worker.open, []
    ended = await asyncio.gather(*[_commit(worker, each) for each in opened], return_exceptions=True)
    for error in ended:
        if isinstance(error, BaseException) and not isinstance(error, (*EXPECTED, CommitOutcomeUnknown)):
            raise error


async def _commit(worker: Worker, opened: OpenTransaction) -> None:
    if opened in worker.open:
        worker.open.remove(opened)
    try:
        async with worker.committing(opened.as_attempt()) as acknowledge:
            acknowledge(await opened.tx.commit())
    except Conflict:
        return  # with another worker's, or another open transaction of this worker


async def _edit(worker: Worker, opened: OpenTransaction) -> None:
    for _ in range(worker.choice.randint(1, 4)):
        try:
            await _one(worker, opened)
        except (AlreadyExists, InvalidArgument):
            continue  # the call had no effect
        except NotFound:
            if worker.alone:
                continue
            raise


async def _one(worker: Worker, opened: OpenTransaction) -> None:
    """Apply one operation in a transaction."""
    choice, tx = worker.choice, opened.tx
    paths = await tx.paths()
    path = choice.choice(PATHS)
    draw = choice.random()
    if draw < 0.08:
        attributes = {"n": choice.randrange(9), "deep": {"list": [None, True, "ü"]}}
        if any(p == "top" or p.startswith("top/") for p in paths):
            return
        await tx.create_group("top", attributes)
        opened.ops.append(Group("top", attributes))
    elif path not in paths or draw < 0.15:
        await _create(worker, opened, path)
    elif draw < 0.2:
        target = choice.choice((path, "g", "g/h"))
        await tx.delete(target)
        opened.deleted([p for p in paths if is_at_or_below(p, target)])
    else:
        array = await tx.array(path)
        if draw < 0.3:
            shape = tuple(choice.randint(1, 2 * n + 1) for n in array.shape)
            await array.resize(shape)
            opened.ops.append(Resize(path, shape))
        elif draw < 0.5:
            values = await reading(array)
            if opened.serializable:
                opened.reads.append((tuple(opened.ops), path, values))
        else:
            await _write(worker, opened, array, path)


async def _create(worker: Worker, opened: OpenTransaction, path: str) -> None:
    choice = worker.choice
    shape = tuple(choice.choice((1, 3, 8, 20, 60)) for _ in range(choice.randint(1, 3)))
    chunks = tuple(choice.randint(1, n) if n < 20 else choice.randint(n // 4, n) for n in shape)
    dtype = choice.choice(("int64", "int16", "uint8", "bool", "float32", "float32", "float64", "float16"))
    kinds: list[Any] = [None, None, "lossless"]
    if dtype == "float32":
        kinds += ["e4m3", {"format": "e4m3", "block": 32}]
    sparse = choice.random() < 0.5
    array = await opened.tx.create_array(
        path, shape, dtype, chunks, codecs=choice.choice(kinds), attributes={"of": path}, sparse=sparse
    )
    opened.ops.append(Create(path, shape, chunks, dtype, sparse))
    if choice.random() < 0.7:
        whole = Write(path, tuple((0, n, 1) for n in shape), shape, dtype, worker.seed())
        await array.write(whole.values)
        opened.ops.append(whole)


async def _write(worker: Worker, opened: OpenTransaction, array: tstore.Array, path: str) -> None:
    written = region_of(worker, array, path)
    view = array[written.slices]
    await view.write(written.values)
    opened.ops.append(written)


def region_of(worker: Worker, array: tstore.Array, path: str) -> Write:
    """Return a write to a random region of an array, often aligned to its chunks."""
    region = []
    for n, chunk in zip(array.shape, array.chunks, strict=True):
        if worker.choice.random() < 0.4:
            start = chunk * worker.choice.randrange(-(-n // chunk))
            region.append((start, min(n, start + chunk), 1))
        else:
            start = worker.choice.randrange(n)
            region.append((start, worker.choice.randint(start + 1, n), worker.choice.choice((1, 1, 2))))
    shape = tuple(len(range(*part)) for part in region)
    return Write(path, tuple(region), shape, str(array.dtype), worker.seed())


async def commit_beside_write(worker: Worker) -> None:
    """Commit during a write of the same transaction: the write is in the commit, or it raises."""
    store, message = await worker.store(), worker.message()
    tx = store.transaction(message)
    opened = OpenTransaction(tx, Attempt(message, ()), (await tx.staging.base()).version)
    shape = (worker.choice.choice((300, 200_000)),)
    if "beside" in await tx.paths():
        await tx.delete("beside")
        opened.deleted(["beside"])
    array = await tx.create_array("beside", shape, "int64", (max(1, shape[0] // 4),), sparse=True)
    opened.ops.append(Create("beside", shape, (max(1, shape[0] // 4),), "int64", True))
    write = Write("beside", ((0, shape[0], 1),), shape, "int64", worker.seed())
    sure = len(opened.ops)
    opened.ops.append(write)
    task = asyncio.create_task(array.write(write.values))
    for _ in range(worker.choice.randrange(3)):
        await asyncio.sleep(0)
    try:
        async with worker.committing(opened.as_attempt(sure=sure)) as acknowledge:
            try:
                version = await tx.commit()
            finally:
                [refused] = await asyncio.gather(task, return_exceptions=True)
            if refused is not None:
                opened.ops.remove(write)
            worker.journal.note(opened.as_attempt())
            acknowledge(version)
    except Misuse:
        await tx.abort()
    if isinstance(refused, BaseException) and not isinstance(refused, TStoreError):
        raise refused


async def stale_handles(worker: Worker) -> None:
    """Use views and handles from before a resize or a re-creation, which must raise."""
    store = await worker.store()
    tx = store.transaction(worker.message())
    path = "stale"
    array = await tx.create_array(path, (40, 6), "int64", (worker.choice.choice((7, 40)), 6))
    await array.write(sample(1, (40, 6), "int64"))
    view = array[2:39]
    if worker.choice.random() < 0.5:
        await array.resize((5, 6))
    else:
        await tx.delete(path)
        await tx.create_array(path, (40, 6), worker.choice.choice(("float64", "int64")), (40, 6), sparse=True)
    try:
        for name, call in (("read", view.read), ("write", lambda: view.write(7)), ("read", array.read)):
            if name == "read" and call == array.read and (await tx.array(path)).shape == (5, 6):
                continue  # the handle that resized the array is still valid
            with contextlib.suppress(Misuse, NotFound, InvalidArgument):
                await asyncio.wait_for(call(), 20)
                worker.fault("stale_handles", f"{name} through a stale handle")
    finally:
        await tx.abort()


async def read(worker: Worker) -> None:
    """Read regions of arrays at the newest version, an older one, a tag or a time."""
    choice, store = worker.choice, await worker.store()
    since = time.monotonic()
    newest = await store.snapshot()
    how = choice.choice(("newest", "newest", "version", "tag", "time"))
    snapshot = newest
    last = await store.log.reader.newest()
    if how == "version" and last:
        snapshot = await store.snapshot(choice.randint(1, last))
    elif how == "tag":
        snapshot = await store.snapshot(choice.choice([*newest.tags, *TAGS]))
    elif how == "time":
        times = [c.time async for c in store.history()]
        if times:
            snapshot = await store.snapshot(choice.choice(times))
    for path in choice.sample(snapshot.paths(), min(3, len(snapshot.paths()))):
        array = await snapshot.array(path)
        region = None
        if choice.random() < 0.6 and array.size and array.shape:
            region = region_of(worker, array, path)
            array = array[region.slices]
        values = await reading(array)
        worker.journal.note(
            Read(
                snapshot.version,
                path,
                None if region is None else region.region,
                values,
                since if how == "newest" else None,
            )
        )
