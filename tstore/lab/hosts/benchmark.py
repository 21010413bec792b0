"""The benchmark of a storage location by many host processes at once, as run by `tstore bench`.

1. The benchmark creates a store at an empty URL. Each host process opens it and generates its rows of a state of
   random float32 arrays. None of this is timed.
2. In each round, all hosts save a new state as one commit. Each host then restores its rows and compares them with
   what it saved. The restored data was just written, and usually comes from caches.
3. For some seconds, each host commits transactions of one small chunk, one after the other. Afterwards the
   benchmark reads back every acknowledged commit.
4. The benchmark removes the store, also after a failure, if the storage permits deletes.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from tstore.checkpoint.leaves import Shards
from tstore.checkpoint.restore import restore
from tstore.checkpoint.save import save
from tstore.core.format.layout import MARKER
from tstore.core.runtime.concurrency import together
from tstore.core.runtime.pool import run
from tstore.core.storage.connect import connect
from tstore.core.storage.local.store import LocalStorage
from tstore.core.storage.memory import MemoryStorage
from tstore.core.storage.objects import Durability
from tstore.core.store import Store, open
from tstore.errors import Denied, InvalidArgument, Unavailable
from tstore.lab.hosts.processes import Job, serve_commands

__all__ = ["bench", "serve"]

_ARRAYS, _COLUMNS = 16, 1024
_MAX_COMMITS = 1 << 20  # small commits of one host
_TIMEOUT = 600.0  # seconds

Weights = npt.NDArray[np.float32]


async def bench(
    url: str,
    *,
    hosts: int = 8,
    size: int = 256_000_000,
    rounds: int = 3,
    seconds: float = 5.0,
    durability: Durability = Durability.FSYNC,
    progress: Callable[[str], object] = lambda message: None,
) -> dict[str, Any]:
    """Measure a storage location with `hosts` processes: checkpoints of about `size` bytes, and small commits.

    Return a document with the seconds of each round and the latency of small commits. `lost` counts acknowledged
    commits that could not be read back, `differing` counts restored arrays with other values, and `ok` is whether
    both are 0. Raise `AlreadyExists` if a store exists there, and `InvalidArgument` for memory://, which processes
    do not share.
    """
    if isinstance(connect(url), MemoryStorage):
        raise InvalidArgument(f"{url} is not shared between processes; pass a folder or the URL of a server")
    rows = max(1, round(size / (4 * _COLUMNS * _ARRAYS * hosts)))
    async with await open(url, "x") as store:
        try:
            async with Job(hosts, __name__) as job:
                progress(f"starting {hosts} host processes")
                await job.ask("open", url=url, rows=rows, durability=durability.value)
                saves, restores, differing = await _save_and_restore(job, hosts, rounds, progress)
                progress(f"{hosts} hosts make small commits for {seconds:g} s")
                async with store.transaction("arrays for small commits") as tx:
                    for number in range(hosts):
                        await tx.create_array(
                            f"writers/{number}", (_MAX_COMMITS,), "int64", chunks=(1,), sparse=True
                        )
                started = time.perf_counter()
                reports = await job.ask("commit", seconds=seconds)
                elapsed = time.perf_counter() - started
            progress("reading back every acknowledged commit")
            lost = await _lost_commits(store, [len(report["latencies"]) for report in reports])
        finally:
            progress(f"removing {store.url}")
            removed = await _remove(url)
    latencies = np.concatenate([report["latencies"] for report in reports])
    return {
        "ok": not lost and not differing,
        "store": store.url,
        "hosts": hosts,
        "bytes": 4 * _COLUMNS * _ARRAYS * rows * hosts,
        "durability": durability.value,
        "save_seconds": saves,
        "restore_seconds": restores,
        "commits": len(latencies),
        "commits_per_second": len(latencies) / elapsed,
        "median_seconds": float(np.median(latencies)),
        "p99_seconds": float(np.quantile(latencies, 0.99)),
        "retries": sum(report["retries"] for report in reports),
        "lost": lost,
        "differing": differing,
        "removed": removed,
    }


async def _save_and_restore(
    job: Job, hosts: int, rounds: int, progress: Callable[[str], object]
) -> tuple[list[float], list[float], int]:
    """Save and restore once per round; return the seconds of each save and restore, and how many arrays differ."""
    saves, restores, differing = [], [], 0
    for step in range(rounds):
        progress(f"round {step + 1} of {rounds}: {hosts} hosts save one checkpoint")
        saves.append(max(await job.ask("save", step=step)))
        progress(f"round {step + 1} of {rounds}: {hosts} hosts restore it")
        results = await job.ask("restore", step=step)
        restores.append(max(seconds for seconds, _ in results))
        differing += sum(count for _, count in results)
    return saves, restores, differing


async def _lost_commits(store: Store, acknowledged: list[int]) -> int:
    """Return how many small commits are lost, from the number of acknowledged commits of each host."""
    snapshot = await store.snapshot()
    lost = 0
    for number, count in enumerate(acknowledged):
        values = await (await snapshot.array(f"writers/{number}"))[:count].read()
        lost += int((values != np.arange(1, count + 1)).sum())
    return lost


async def _remove(url: str) -> bool:
    """Remove the store; return False if the server fails or forbids deletes, as `tstore serve` does."""
    storage = connect(url)
    try:
        if isinstance(storage, LocalStorage):
            await run(shutil.rmtree, storage.url)
        else:
            keys = await storage.list("")
            await storage.delete(MARKER)
            await together(storage.delete, keys)
    except (Denied, Unavailable):
        return False
    finally:
        await storage.close()
    return True


class _Worker:
    """The work of one host process: its rows of every array, and one array for its small commits."""

    def __init__(self, number: int, count: int, report_halt: Callable[[int], None]) -> None:
        self._number = number
        self._count = count

    async def open(self, url: str, rows: int, durability: str) -> None:
        """Open the store and generate this host's rows."""
        self._store = await open(url, "r+")
        self._durability: Any = durability
        self._rows = rows
        self._region = slice(self._number * rows, (self._number + 1) * rows), slice(0, _COLUMNS)
        values = np.random.default_rng(self._number).standard_normal((rows, _COLUMNS), dtype=np.float32)
        self._parts = {f"w{i:02}": values + np.float32(i) for i in range(_ARRAYS)}

    async def save(self, step: int) -> float:
        """Save new values of the rows as part of a step, and return the duration in seconds."""
        for part in self._parts.values():
            np.add(part, 1, out=part)  # otherwise the save would only reference the chunks of the previous step
        started = time.perf_counter()
        await save(
            self._store,
            {name: self._shard(part) for name, part in self._parts.items()},
            step,
            host=self._number,
            hosts=self._count,
            attempt="bench",
            durability=self._durability,
            timeout=_TIMEOUT,
        )
        return time.perf_counter() - started

    async def restore(self, step: int) -> tuple[float, int]:
        """Restore the rows of a step, and return the duration in seconds and the number of arrays that differ."""
        target = {name: self._shard(None) for name in self._parts}
        started = time.perf_counter()
        restored = await restore(self._store, step, target=target)
        elapsed = time.perf_counter() - started
        same = [np.array_equal(restored[name].parts[0][1], part) for name, part in self._parts.items()]
        return elapsed, same.count(False)

    async def commit(self, seconds: float) -> dict[str, Any]:
        """Make small commits for some seconds; return the latency of each and the total number of retries."""
        latencies: list[float] = []
        retries, end = 0, time.perf_counter() + seconds
        while (started := time.perf_counter()) < end:
            async with self._store.transaction(durability=self._durability) as tx:
                array = await tx.array(f"writers/{self._number}")
                await array[len(latencies)].write(len(latencies) + 1)
            latencies.append(time.perf_counter() - started)
            retries += len(tx.retries)
        return {"latencies": latencies, "retries": retries}

    def _shard(self, part: Weights | None) -> Shards:
        return Shards((self._rows * self._count, _COLUMNS), "float32", [(self._region, part)])


def serve(number: int, count: int) -> None:
    """Run a host of the benchmark until its input ends."""
    serve_commands(_Worker, number, count)
