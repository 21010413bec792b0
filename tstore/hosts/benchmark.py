"""What a place gives to many writers at once, measured by host processes; `tstore bench` shows it.

1. A store is made where nothing lies. Each host process opens it and takes its rows of a state of float32 arrays,
   random values, into memory; all that comes before the clock starts.
2. In each round all hosts save a new state as one commit, and then each restores its rows and compares them. What
   was written a moment ago comes from caches as a rule.
3. For some seconds each host commits transactions of one small chunk, one after the other. Afterwards every one
   that was acknowledged is looked for.
4. The store is removed again, also after a failure.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

import tstore
from tstore.checkpoint.shards import Shards
from tstore.errors import AlreadyExists, Denied, InvalidArgument, Unavailable
from tstore.format.layout import MARKER
from tstore.hosts.processes import Job, serve_commands
from tstore.runtime.concurrency import together
from tstore.runtime.pool import run
from tstore.storage.connect import connect
from tstore.storage.local.store import LocalStorage
from tstore.storage.memory import MemoryStorage
from tstore.storage.objects import Durability

__all__ = ["BenchReport", "bench", "serve"]

_ARRAYS, _COLUMNS = 16, 1024
_SLOTS = 1 << 20  # small commits that one host may make
_PATIENCE = 600.0  # seconds

Array = npt.NDArray[np.float32]


class BenchReport(NamedTuple):
    """What was measured: the seconds of each round, and the seconds from a small transaction's begin to its
    acknowledgement at the median and at the 99th percentile. `lost` were acknowledged and are not there.
    """

    url: str
    hosts: int
    bytes: int
    durability: str
    save_seconds: list[float]
    restore_seconds: list[float]
    commits: int
    commits_per_second: float
    median_seconds: float
    p99_seconds: float
    retries: int
    lost: int
    differing: int
    removed: bool

    @property
    def ok(self) -> bool:
        """Whether all came back as it was acknowledged."""
        return not self.lost and not self.differing


async def bench(
    url: str,
    *,
    hosts: int = 8,
    size: int = 256_000_000,
    rounds: int = 3,
    seconds: float = 5.0,
    durability: Durability = Durability.FSYNC,
    tell: Callable[[str], object] = lambda what: None,
) -> BenchReport:
    """What `hosts` processes get of a place: a state of about `size` bytes as one commit, and small commits.

    Raises `AlreadyExists` where something lies there, `InvalidArgument` for memory://, which is one process's own.
    """
    if isinstance(connect(url), MemoryStorage):
        raise InvalidArgument(f"{url} is seen by one process alone; name a folder or a server's URL")
    rows = max(1, round(size / (4 * _COLUMNS * _ARRAYS * hosts)))
    try:
        created = await tstore.open(url, "x")
    except AlreadyExists as error:
        raise AlreadyExists(f"{url} is a store already; name an empty or a new place to measure") from error
    async with created as store:
        try:
            async with Job(hosts, __name__) as job:
                tell(f"starting {hosts} host processes")
                await job.ask("open", url=url, rows=rows, durability=durability.value)
                saves, restores, differing = [], [], 0
                for step in range(rounds):
                    tell(f"round {step + 1} of {rounds}: {hosts} hosts save one checkpoint")
                    saves.append(max(await job.ask("save", step=step)))
                    tell(f"round {step + 1} of {rounds}: {hosts} hosts restore it")
                    found = await job.ask("restore", step=step)
                    restores.append(max(took for took, _ in found))
                    differing += sum(wrong for _, wrong in found)
                tell(f"{hosts} hosts make small commits for {seconds:g} s")
                async with store.transaction("room for small commits") as tx:
                    for number in range(hosts):
                        await tx.create_array(f"writers/{number}", (_SLOTS,), "int64", chunks=(1,), sparse=True)
                began = time.perf_counter()
                told = await job.ask("commit", seconds=seconds)
                passed = time.perf_counter() - began
            tell("looking for every commit that was acknowledged")
            lost = await _lost(store, [len(t["seconds"]) for t in told])
        finally:
            tell(f"removing {store.url}")
            removed = await _remove(url)
    taken = np.concatenate([np.array(t["seconds"]) for t in told])
    return BenchReport(
        url=store.url,
        hosts=hosts,
        bytes=4 * _COLUMNS * _ARRAYS * rows * hosts,
        durability=durability.value,
        save_seconds=saves,
        restore_seconds=restores,
        commits=len(taken),
        commits_per_second=len(taken) / passed,
        median_seconds=float(np.median(taken)),
        p99_seconds=float(np.quantile(taken, 0.99)),
        retries=sum(t["retries"] for t in told),
        lost=lost,
        differing=differing,
        removed=removed,
    )


async def _lost(store: tstore.Store, made: list[int]) -> int:
    snapshot = await store.snapshot()
    lost = 0
    for number, count in enumerate(made):
        values = await (await snapshot.array(f"writers/{number}"))[:count].read()
        lost += int((values != np.arange(1, count + 1)).sum())
    return lost


async def _remove(url: str) -> bool:
    """Whether the store could be removed; `tstore serve` forbids it, and then nothing of it is."""
    backend = connect(url)
    try:
        if isinstance(backend, LocalStorage):
            await run(shutil.rmtree, backend.url)
        else:
            keys = await backend.list("")
            await backend.delete(MARKER)
            await together(backend.delete, keys)
    except (Denied, Unavailable):
        return False
    finally:
        await backend.close()
    return True


class _Writer:
    """One host process: its rows of every array, and one array for its small commits."""

    def __init__(self, number: int, count: int, halted: Callable[[int], None]) -> None:
        self._number = number
        self._count = count

    async def open(self, url: str, rows: int, durability: str) -> None:
        """Opens the store and makes this host's rows."""
        self._store = await tstore.open(url, "r+")
        self._durability: Any = durability
        self._rows = rows
        self._mine = slice(self._number * rows, (self._number + 1) * rows), slice(0, _COLUMNS)
        values = np.random.default_rng(self._number).standard_normal((rows, _COLUMNS), dtype=np.float32)
        self._parts = {f"w{i:02}": values + np.float32(i) for i in range(_ARRAYS)}

    async def save(self, step: int) -> float:
        """Saves new values of the rows as part of a step, and returns the seconds it took."""
        for part in self._parts.values():
            np.add(part, 1, out=part)  # else the chunks of the step before would be re-used
        began = time.perf_counter()
        await tstore.save(
            self._store,
            {name: self._shard(part) for name, part in self._parts.items()},
            step,
            host=self._number,
            hosts=self._count,
            attempt="bench",
            durability=self._durability,
            timeout=_PATIENCE,
        )
        return time.perf_counter() - began

    async def restore(self, step: int) -> tuple[float, int]:
        """Restores the rows of a step: the seconds it took, and how many arrays came back different."""
        wanted = {name: self._shard(None) for name in self._parts}
        began = time.perf_counter()
        found = await tstore.restore(self._store, step, target=wanted)
        took = time.perf_counter() - began
        same = [np.array_equal(found[name].parts[0][1], part) for name, part in self._parts.items()]
        return took, same.count(False)

    async def commit(self, seconds: float) -> dict[str, Any]:
        """Makes small commits for some seconds: what each took, and how many tries more than one there were."""
        taken: list[float] = []
        retries, end = 0, time.perf_counter() + seconds
        while (began := time.perf_counter()) < end:
            async with self._store.transaction(durability=self._durability) as tx:
                array = await tx.array(f"writers/{self._number}")
                await array[len(taken)].write(len(taken) + 1)
            taken.append(time.perf_counter() - began)
            retries += len(tx.retries)
        return {"seconds": taken, "retries": retries}

    def _shard(self, part: Array | None) -> Shards:
        return Shards((self._rows * self._count, _COLUMNS), "float32", [(self._mine, part)])


def serve() -> None:
    """Runs a host of the benchmark."""
    serve_commands(_Writer)
