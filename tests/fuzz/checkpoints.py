"""The fuzzer's operations on checkpoints and on whole stores."""

from __future__ import annotations

import asyncio
import contextlib
import time
from datetime import timedelta
from typing import Any

import numpy as np

import tstore
from tests.fuzz.journal import (
    Acknowledged,
    Attempt,
    Collected,
    Collecting,
    Copying,
    CopyMade,
    Create,
    Known,
    Op,
    Read,
    Replace,
    Replay,
    Write,
    sample,
)
from tests.fuzz.worker import TAGS, Worker
from tstore import Keep, Shards
from tstore.convert.exporting import export_safetensors
from tstore.convert.importing import import_checkpoint
from tstore.convert.safetensors import open_tensors
from tstore.errors import Conflict, Corrupt, TStoreError

__all__ = [
    "collect",
    "copy",
    "export_and_import",
    "finish",
    "inspect",
    "quantize",
    "restore",
    "save",
    "save_while_changing",
    "save_with_gaps",
    "verify",
]

_STEPS = 30
_DTYPES = ("int64", "float32", "float32", "float16", "uint8", "bool")


async def save(worker: Worker) -> None:
    """Save a tree as a step, from one host or cooperatively from several."""
    choice, store = worker.choice, await worker.store()
    step, hosts, message = choice.randrange(_STEPS), choice.choice((1, 1, 1, 2, 3)), worker.message()
    leaves = {path: _leaf(worker) for path in ("w", "p/a", "p/b/c", "s")[: choice.randint(1, 4)]}
    if choice.random() < 0.6:
        leaves["frozen"] = Write("frozen", ((0, 500, 1),), (500,), "float32", 1)
    ops: list[Op] = [Replace()]
    for path, leaf in leaves.items():
        ops += [_create_op(path, leaf.shape, leaf.dtype), leaf._replace(path=path)]
    losses = (1.0, 0.25, 3) if choice.random() < 0.9 else (np.float32(0.5), np.float64(2.0), np.int64(4))
    loss = choice.choice(losses)
    metrics = {"loss": loss, "accuracy": choice.random()} if choice.random() < 0.7 else None
    expected = None if metrics is None else {k: float(v) for k, v in metrics.items()}
    attempt = Attempt(message, tuple(ops), (f"step/{step}",), metrics=expected)
    options: dict[str, Any] = {"message": message, "metrics": metrics, "attributes": {"note": [1, None, "é"]}}
    options["codecs"] = choice.choice((None, None, "lossless", "e4m3", {"w": "e4m3", "**": None}))
    options["durability"] = choice.choice(("fsync", "fsync", "none"))
    if isinstance(options["codecs"], dict) and "w" not in leaves:
        options["codecs"] = None
    if hosts == 1:
        async with worker.committing(attempt) as acknowledge:
            acknowledge(await tstore.save(store, _tree(leaves), step, **options))
        return
    absent = choice.random() < 0.2
    options |= {"hosts": hosts, "attempt": f"{message}@", "timeout": 0.3 if absent else 60.0}
    tree = _tree(leaves)
    tree["sharded"] = None
    shape = (4 * hosts, 50)
    whole = sample(worker.seed(), shape, "float32")
    ops += [_create_op("sharded", shape, "float32"), Known("sharded", whole)]
    async with worker.committing(attempt._replace(ops=tuple(ops))) as acknowledge:
        calls = []
        for host in range(hosts - absent):
            rows = (slice(4 * host, 4 * host + 4), slice(0, 50))
            part = Shards(shape, "float32", [(rows, whole[rows])])
            mine = {**tree, "sharded": part}
            calls.append(tstore.save(store, mine, step, host=host, **options))
        versions = await asyncio.gather(*calls, return_exceptions=True)
        for version in versions:
            if isinstance(version, int):
                acknowledge(version)
        for version in versions:
            if isinstance(version, BaseException):
                raise version


async def save_with_gaps(worker: Worker) -> None:
    """Try to save shards that do not cover their array, which must be refused."""
    store, message = await worker.store(), worker.message()
    part = Shards((8, 50), "int64", [((slice(0, 4), slice(0, 50)), np.ones((4, 50), np.int64))])
    try:
        await tstore.save(store, {"gap": part}, 1000 + worker.choice.randrange(1000), message=message)
    except TStoreError:
        return
    worker.fault("save_with_gaps", "shards with a gap were acknowledged")


async def save_while_changing(worker: Worker) -> None:
    """Change arrays while they are saved: the checkpoint may mix old and new values, but must be readable."""
    if not worker.alone:
        return  # the saved values are known only after reading them back, which a kill would prevent
    store, message, step = await worker.store(), worker.message(), 500 + worker.choice.randrange(400)
    values = np.zeros(worker.choice.choice((100, 50_000, 3_000_000)), np.int32)
    task = asyncio.ensure_future(tstore.save(store, {"w": values}, step, message=message))
    while not task.done():
        values += 1
        await asyncio.sleep(0)
    version = await task
    try:
        saved = (await tstore.restore(store, at=version))["w"]
    except Corrupt as error:
        worker.fault("save_while_changing", error)
        raise
    ops: list[Op] = [Replace(), _create_op("w", values.shape, "int32"), Known("w", saved)]
    worker.journal.note(Attempt(message, tuple(ops), (f"step/{step}",)))
    worker.journal.note(Acknowledged(message, version, time.monotonic()))
    if saved.min() < 0 or saved.max() > values.max():
        worker.fault("save_while_changing", "the checkpoint has values that the array never had")


async def restore(worker: Worker) -> None:
    """Restore a step: completely, by paths, or into a target."""
    choice, store = worker.choice, await worker.store()
    steps = await tstore.steps(store)
    if not steps:
        return
    version = (await store.snapshot(f"step/{choice.choice((steps[-1], choice.choice(steps)))}")).version
    how = choice.choice(("all", "only", "target"))
    if how == "only":
        tree = await tstore.restore(store, at=version, only="**")
    else:
        tree = await tstore.restore(store, at=version)
    if how == "target":
        target = _empty_like(tree)
        tree = await tstore.restore(store, at=version, target=target)
    for path, values in _flatten(tree).items():
        worker.journal.note(Read(version, path, None, values))


async def collect(worker: Worker) -> None:
    """Collect garbage by a random combination of retention rules."""
    choice, store = worker.choice, await worker.store()
    rules: dict[str, Any] = {}
    for name, rule in (
        ("last", choice.randint(1, 3)),
        ("every", choice.randint(2, 5)),
        ("best", choice.choice(((1, "loss"), (2, "accuracy", "max")))),
        ("tags", (choice.choice(TAGS),)),
        ("newer_than", timedelta(hours=1)),
    ):
        if choice.random() < 0.3:
            rules[name] = rule
    if rules and choice.random() < 0.5:
        rules["copies"] = choice.randint(0, 2)
    keep = Keep(**rules) if rules else None
    abandoned = timedelta(0) if choice.random() < 0.3 else timedelta(days=7)
    if choice.random() < 0.3:
        await store.collect(keep, abandoned=abandoned, dry_run=True)
    if worker.open and abandoned == timedelta(0):
        abandoned = timedelta(days=7)  # or its own open transactions would be condemned
    worker.journal.note(Collecting(keep, abandoned))
    report = await store.collect(keep, abandoned=abandoned)
    worker.journal.note(Collected(keep, report.version, tuple(report.versions)))


async def quantize(worker: Worker) -> None:
    """Make a quantized copy of a step, or of another copy, whose values the format represents exactly."""
    choice, store, message = worker.choice, await worker.store(), worker.message()
    sources = sorted(tag for tag in await store.tags() if tag.startswith(("step/", "q/")))
    if not sources:
        return
    version = (await store.snapshot(choice.choice(sources))).version
    options: dict[str, Any] = {"block": 32} if choice.random() < 0.5 else {}
    async with worker.committing(Attempt(message, (Replay(version),), (f"q/{message}",))) as acknowledge:
        report = await tstore.quantize(store, "e4m3", at=version, tag=f"q/{message}", message=message, **options)
        acknowledge(report.version)


async def copy(worker: Worker) -> None:
    """Copy the store to one of several places, or update an existing copy."""
    if not worker.place.copies:
        return
    url = worker.choice.choice(worker.place.copies)
    worker.journal.note(Copying(url))
    try:
        report = await tstore.copy(await worker.store(), url)
    except Conflict:
        if worker.rewound:
            return  # the copy has versions that the store lost when a backup replaced it
        raise
    worker.journal.note(CopyMade(url, report.version))


async def export_and_import(worker: Worker) -> None:
    """Export a step to a file, and import the file as another step."""
    store, message = await worker.store(), worker.message()
    steps = await tstore.steps(store)
    if not steps:
        return
    file = worker.place.scratch / f"{message}.safetensors"
    await export_safetensors(store, file, step=worker.choice.choice(steps))
    try:
        tensors, _ = open_tensors(file)
        step = worker.choice.randrange(_STEPS)
        ops: list[Op] = [Replace()]
        for path, values in tensors.items():
            ops += [_create_op(path, values.shape, str(values.dtype)), Known(path, np.array(values))]
        attempt = Attempt(f"imported from {file.name}", tuple(ops), (f"step/{step}",))
        async with worker.committing(attempt) as acknowledge:
            acknowledge((await import_checkpoint(file, store, step)).version)
    finally:
        file.unlink(missing_ok=True)


async def finish(worker: Worker) -> None:
    """Finish a pending cooperative transaction."""
    store = await worker.store()
    pending = await store.pending()
    if pending:
        with contextlib.suppress(Conflict):  # a later attempt may have saved the step
            await store.finish(worker.choice.choice(pending).transaction)


async def verify(worker: Worker) -> None:
    """Verify the store, which must be valid at any time."""
    report = await (await worker.store()).verify()
    if not report.ok:
        worker.fault("verify", "finds faults", report.faults[0])


async def inspect(worker: Worker) -> None:
    """Query the store's history, tags, pending transactions, differences and outcomes."""
    store = await worker.store()
    commits = [c async for c in store.history()]
    if commits:
        commit = worker.choice.choice(commits)
        if await store.outcome(commit.transaction) != commit.version:
            worker.fault("inspect", "wrong outcome", f"that of {commit.transaction} is not {commit.version}")
        await store.diff(commit.version, commits[0].version)
    await store.tags()
    await store.pending()


def _leaf(worker: Worker) -> Write:
    choice = worker.choice
    shape = choice.choice(((), (0,), (5,), (40, 7), (300,), (64, 128), (3, 4, 5)))
    return Write("", tuple((0, n, 1) for n in shape), shape, choice.choice(_DTYPES), worker.seed())


def _create_op(path: str, shape: tuple[int, ...], dtype: str) -> Create:
    return Create(path, shape, tuple(max(1, n) for n in shape), dtype, sparse=False)


def _tree(leaves: dict[str, Write]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *heads, last = path.split("/")
        group = tree
        for head in heads:
            group = group.setdefault(head, {})
        group[last] = leaf.values
    return tree


def _flatten(tree: Any, head: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= _flatten(value, f"{head}{key}/") if isinstance(value, dict) else {f"{head}{key}": value}
    return flat


def _empty_like(tree: Any) -> Any:
    return {k: _empty_like(v) if isinstance(v, dict) else np.empty(v.shape, v.dtype) for k, v in tree.items()}
