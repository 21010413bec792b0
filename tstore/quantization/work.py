"""Studies and encodings of many arrays: in this process, or in tasks for the workers of an executor.

A task goes to a worker as plain data (the store's URL, a version, paths), and returns plain data: studies, or
references to chunks in the worker's own packs, which are durable by then. The values of arrays never pass through
the executor.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import BrokenExecutor, Executor
from functools import partial
from typing import Any, NamedTuple, TypeVar

from tstore.data.writer import PackSet
from tstore.errors import Unavailable
from tstore.quantization.encoding import Choice, Encoded, encode_batch
from tstore.quantization.study import Configuration, Profile, Study, study
from tstore.quantization.values import ValueCache, batches, in_threads
from tstore.runtime.pool import WORKERS
from tstore.snapshot import Snapshot
from tstore.storage.objects import Durability
from tstore.store import Store, open

__all__ = ["Progress", "Work"]

R = TypeVar("R")

_AT_ONCE = min(WORKERS, 4)
"""Batches that this process works on at a time."""

_TASK = 64 << 20
"""The least bytes of values of a task: enough to make the cost of opening the store small."""

Progress = Callable[[int, int], None]
"""Called with the bytes of values that are done, and with the total."""


class _Workspace(NamedTuple):
    """The version that tasks read, the folder for their packs, and the bytes of values that each may keep."""

    url: str
    version: int
    folder: str
    durability: Durability
    memory: int


class Work:
    """The studies and encodings of the arrays of one version, into packs of one transaction."""

    def __init__(
        self,
        store: Store,
        source: Snapshot,
        transaction: str,
        durability: Durability,
        executor: Executor | None,
        progress: Progress | None,
        memory: int,
    ) -> None:
        self._store = store
        self._metas = {path: source.tree.nodes[path].meta for path in source.paths()}
        self._workspace = _Workspace(store.url, source.version, f"txn/{transaction}", durability, memory)
        self._batches = _Batches(store, source, memory)
        self._executor = executor
        self._progress = progress

    async def study(self, configurations: Mapping[str, Configuration], widths: range) -> list[Study]:
        """Study these arrays, each in its granularity and scale, and return the studies in their order."""
        paths = list(configurations)
        if self._executor is not None:
            tasks = self._tasks(paths)
            calls = [(_study_task, self._workspace, {p: configurations[p] for p in t}, widths) for t in tasks]
            return await self._in_executor(calls)
        return await self._concurrently(partial(self._batches.study, configurations, widths), paths)

    async def encode(self, choices: Mapping[str, Choice], profiles: Mapping[str, Profile]) -> list[Encoded]:
        """Encode these arrays into durable packs and return them in their order.

        `profiles` has the arrays that were studied.
        """
        paths = list(choices)
        if self._executor is not None:
            calls = [
                (_encode_task, self._workspace, {p: choices[p] for p in t}, _part(profiles, t))
                for t in self._tasks(paths)
            ]
            return await self._in_executor(calls)
        self._batches.cache.drop_others(choices)
        async with _packs(self._store, self._workspace) as packs:
            return await self._concurrently(partial(self._batches.encode, packs, choices, profiles), paths)

    async def _in_executor(self, calls: Sequence[tuple[Any, ...]]) -> list[Any]:
        assert self._executor is not None
        count = self._counter([path for call in calls for path in call[2]])
        futures: list[asyncio.Future[Any]] = []
        try:
            for call in calls:
                futures.append(asyncio.wrap_future(self._executor.submit(*call)))
            for future, call in zip(futures, calls, strict=True):
                await future
                count(call[2])
        except BrokenExecutor as error:
            raise Unavailable(
                f"{self._workspace.url}: the executor broke, as when one of its workers is killed ({error}), and "
                "nothing was committed; quantize again with another executor"
            ) from error
        finally:
            for future in futures:
                future.cancel()
            await asyncio.gather(*futures, return_exceptions=True)
        return [result for future in futures for result in future.result()]

    async def _concurrently(
        self, call: Callable[[list[str]], Coroutine[Any, Any, list[R]]], paths: Sequence[str]
    ) -> list[R]:
        """Return the results of all batches in their order; a few batches are under way at a time."""
        listed, count = batches(self._metas, paths), self._counter(paths)
        results: dict[int, list[R]] = {}
        source = iter(enumerate(listed))

        async def draw() -> None:
            for i, batch in source:
                results[i] = await call(batch)
                count(batch)

        tasks = [asyncio.ensure_future(draw()) for _ in range(min(_AT_ONCE, len(listed)))]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return [result for i in range(len(listed)) for result in results[i]]

    def _tasks(self, paths: Sequence[str]) -> list[list[str]]:
        """Return the paths in tasks of at least `_TASK` bytes."""
        tasks: list[list[str]] = []
        room = 0
        for path in paths:
            if room <= 0:
                tasks.append([])
                room = _TASK
            tasks[-1].append(path)
            room -= self._metas[path].nbytes
        return tasks

    def _counter(self, paths: Iterable[str]) -> Callable[[Iterable[str]], None]:
        """Return a function to call with paths when they are done, which reports the progress."""
        total, done = sum(self._metas[path].nbytes for path in paths), 0

        def count(some: Iterable[str]) -> None:
            nonlocal done
            done += sum(self._metas[path].nbytes for path in some)
            if self._progress is not None:
                self._progress(done, total)

        return count


def _part(profiles: Mapping[str, Profile], paths: Iterable[str]) -> dict[str, Profile]:
    return {path: profiles[path] for path in paths if path in profiles}


class _Batches:
    """Work on batches of the arrays of one version, whose values stay in memory while there is room."""

    def __init__(self, store: Store, source: Snapshot, memory: int) -> None:
        self._storage = store.log.storage
        self._source = source
        self.cache = ValueCache(memory)

    async def study(
        self, configurations: Mapping[str, Configuration], widths: range, batch: list[str]
    ) -> list[Study]:
        """Study the arrays of a batch."""
        async with self.cache.read(self._source, batch) as values:
            return await in_threads(lambda v: study(v, configurations[v.path], widths), values)

    async def encode(
        self, packs: PackSet, choices: Mapping[str, Choice], profiles: Mapping[str, Profile], batch: list[str]
    ) -> list[Encoded]:
        """Encode the arrays of a batch, and drop their values."""
        async with self.cache.read(self._source, batch) as values:
            encoded = await encode_batch(self._storage, packs, values, choices, profiles)
        self.cache.drop(batch)
        return encoded


@contextlib.asynccontextmanager
async def _packs(store: Store, workspace: _Workspace) -> AsyncIterator[PackSet]:
    """Yield packs of the transaction: durable after the block, discarded if it fails."""
    packs = PackSet(store.log.storage, workspace.folder, workspace.durability)
    try:
        yield packs
        await packs.flush()
    except BaseException:
        await packs.discard()
        raise


def _study_task(workspace: _Workspace, configurations: Mapping[str, Configuration], widths: range) -> list[Study]:
    async def work() -> list[Study]:
        async with await open(workspace.url, "r") as store:
            source = await store.snapshot(workspace.version)
            arrays = _Batches(store, source, workspace.memory)
            return await _in_turn(source, configurations, partial(arrays.study, configurations, widths))

    return asyncio.run(work())


def _encode_task(
    workspace: _Workspace, choices: Mapping[str, Choice], profiles: Mapping[str, Profile]
) -> list[Encoded]:
    async def work() -> list[Encoded]:
        async with await open(workspace.url, "r") as store:
            source = await store.snapshot(workspace.version)
            arrays = _Batches(store, source, workspace.memory)
            async with _packs(store, workspace) as packs:
                return await _in_turn(source, choices, partial(arrays.encode, packs, choices, profiles))

    return asyncio.run(work())


async def _in_turn(
    source: Snapshot, paths: Iterable[str], call: Callable[[list[str]], Coroutine[Any, Any, list[R]]]
) -> list[R]:
    """Return the results of all batches of these paths, one batch after the other."""
    metas = {path: source.tree.nodes[path].meta for path in paths}
    return [result for batch in batches(metas, list(metas)) for result in await call(batch)]
