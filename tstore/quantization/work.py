"""Study and encode many arrays: in this process, or in tasks for the workers of an executor.

A worker gets a task as plain data (the store's URL, a version, paths) and returns plain data: studies, or
references to chunks in packs that it wrote, which are durable by then. The values of arrays never pass through the
executor.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Callable, Container, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import BrokenExecutor, Executor, Future
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
from msgspec import structs

from tstore.core.data.encoded_chunks import read_encoded
from tstore.core.data.writer import PackSet
from tstore.core.format.objects.chunk_rows import ChunkRow
from tstore.core.snapshot import Snapshot
from tstore.core.storage.objects import Durability
from tstore.core.store import Store, open
from tstore.errors import InvalidArgument, Unavailable
from tstore.quantization.encoding import CodecChoice, EncodedArray, encode_batch
from tstore.quantization.study import Profile, Study, Undecided, study
from tstore.quantization.values import ValueCache, batches, in_threads

__all__ = ["BatchWork", "ProgressCallback"]

R = TypeVar("R")

_CONCURRENCY = 4
"""The number of batches that this process studies or encodes concurrently.

A large array is read by one thread at a time; with as many batches as cores, cores would wait for the last ones.
"""

_MIN_TASK_BYTES = 64 << 20
"""The minimum bytes of values in each task but the last; with less, opening the store would cost too much."""

_MAX_UNUSED = 16  # packs are replaced if more than 1/16 of them is unused
_MOVED_BYTES = 16 << 20  # bytes of chunks moved at once

ProgressCallback = Callable[[int, int], None]
"""A function called with the bytes of values that are done and with the total."""


class _Workspace(NamedTuple):
    """The version that tasks read, the folder for their packs, and the bytes of values that each may cache."""

    url: str
    version: int
    folder: str
    durability: Durability
    memory: int


class BatchWork:
    """Studies the arrays of one version (the error of each candidate format), and encodes them into packs."""

    def __init__(
        self,
        store: Store,
        source: Snapshot,
        transaction: str,
        durability: Durability,
        executor: Executor | None,
        progress: ProgressCallback | None,
        memory: int,
    ) -> None:
        self._store = store
        self.source = source
        self._metas = {path: source.tree.nodes[path].meta for path in source.paths()}
        self._workspace = _Workspace(store.url, source.version, f"txn/{transaction}", durability, memory)
        self._runner = _BatchRunner(store, source, memory)
        self._executor = executor
        self._progress = progress

    async def study(self, undecided: Mapping[str, Undecided]) -> list[Study]:
        """Study arrays, each in the formats that its coding can use; return the studies in order."""
        paths = list(undecided)
        if self._executor is not None:
            tasks = self._tasks(paths)
            calls = [(_study_task, self._workspace, {p: undecided[p] for p in t}) for t in tasks]
            return await self._execute(calls)
        return await self._run_concurrently(partial(self._runner.study, undecided), paths)

    async def encode(
        self, choices: Mapping[str, CodecChoice], profiles: Mapping[str, Profile]
    ) -> list[EncodedArray]:
        """Encode arrays into durable packs; return the results in order. `profiles` are of the studied arrays."""
        paths = list(choices)
        if self._executor is not None:
            calls: list[tuple[Any, ...]] = []
            for task in self._tasks(paths):
                task_profiles = {path: profiles[path] for path in task if path in profiles}
                calls.append((_encode_task, self._workspace, {p: choices[p] for p in task}, task_profiles))
            return await self._execute(calls)
        self._runner.cache.drop_others(choices)
        async with _packs(self._store, self._workspace) as packs:
            return await self._run_concurrently(partial(self._runner.encode, packs, choices, profiles), paths)

    async def without_unused(self, encoded: Mapping[str, EncodedArray]) -> dict[str, EncodedArray]:
        """Return the arrays with their chunks in packs that hold little else.

        Packs hold unused chunks if an array was encoded more than once, or stays unchanged after all. Chunks are
        moved from such packs into new ones, and the packs are deleted.
        """
        storage, folder = self._store.log.storage, self._workspace.folder
        used: Counter[str | bytes] = Counter()
        for array in encoded.values():
            for row in array.rows:
                used[row.pack] += row.length
        sizes = await storage.sizes(await storage.list(f"{folder}/pack-"))
        wasteful: set[str | bytes] = {
            pack for pack, size in sizes.items() if size - used[pack] > size // _MAX_UNUSED
        }
        if not wasteful:
            return dict(encoded)
        async with _packs(self._store, self._workspace) as packs:
            moved = {path: await self._moved(packs, array, wasteful) for path, array in encoded.items()}
        for pack in sizes.keys() & wasteful:
            await storage.delete(pack)
        return moved

    async def _moved(self, packs: PackSet, array: EncodedArray, wasteful: Container[str | bytes]) -> EncodedArray:
        """Return an array whose chunks in wasteful packs are in other packs."""
        rows = [row for row in array.rows if row.pack not in wasteful]
        moving = sorted((row for row in array.rows if row.pack in wasteful), key=lambda row: row.number)
        ends = list(itertools.accumulate((row.length for row in moving), initial=0))
        first = 0
        while first < len(moving):
            end = bisect.bisect_right(ends, ends[first] + _MOVED_BYTES, first + 2) - 1
            batch, first = moving[first:end], end
            data: dict[int, bytes] = {}
            deliver = partial(_keep, data)
            await read_encoded(self._store.log.storage, array.path, batch, deliver)
            pack, offset = await packs.write_bytes([data[row.number] for row in batch])
            for row in batch:
                rows.append(structs.replace(row, pack=pack, offset=offset))
                offset += row.length
        return array._replace(rows=tuple(rows))

    async def _execute(self, calls: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Return the results of all calls in order, made by the executor.

        A call is a function and its arguments: `call[0]` is `_study_task` or `_encode_task`, and `call[2]` has the
        paths of the arrays.
        """
        assert self._executor is not None
        count = self._counter([path for call in calls for path in call[2]])
        futures: list[asyncio.Future[Any]] = []
        try:
            for call in calls:
                futures.append(asyncio.wrap_future(_submitted(self._executor, call)))
            for future, call in zip(futures, calls, strict=True):
                await future
                count(call[2])
        except BrokenExecutor as error:
            raise Unavailable(
                f"{self._workspace.url}: the executor broke ({error}), perhaps because a worker was killed; "
                "nothing was committed, so quantize again with another executor"
            ) from error
        finally:
            for future in futures:
                future.cancel()
            await asyncio.gather(*futures, return_exceptions=True)
        return [result for future in futures for result in future.result()]

    async def _run_concurrently(
        self, call: Callable[[list[str]], Coroutine[Any, Any, list[R]]], paths: Sequence[str]
    ) -> list[R]:
        """Return the results of a call for all batches of these paths, in order; run a few calls at a time."""
        all_batches, count = batches(self._metas, paths), self._counter(paths)
        results: dict[int, list[R]] = {}
        remaining = iter(enumerate(all_batches))

        async def run_remaining() -> None:
            for i, batch in remaining:
                results[i] = await call(batch)
                count(batch)

        tasks = [asyncio.ensure_future(run_remaining()) for _ in range(min(_CONCURRENCY, len(all_batches)))]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return [result for i in range(len(all_batches)) for result in results[i]]

    def _tasks(self, paths: Sequence[str]) -> list[list[str]]:
        """Divide the paths into tasks of at least `_MIN_TASK_BYTES` bytes of values, except for the last."""
        tasks: list[list[str]] = []
        room = 0
        for path in paths:
            if room <= 0:
                tasks.append([])
                room = _MIN_TASK_BYTES
            tasks[-1].append(path)
            room -= self._metas[path].nbytes
        return tasks

    def _counter(self, paths: Iterable[str]) -> Callable[[Iterable[str]], None]:
        """Return a function that counts paths as done and reports the progress."""
        total, done = sum(self._metas[path].nbytes for path in paths), 0

        def count(batch: Iterable[str]) -> None:
            nonlocal done
            done += sum(self._metas[path].nbytes for path in batch)
            if self._progress is not None:
                self._progress(done, total)

        return count


def _keep(data: dict[int, bytes], row: ChunkRow, encoded: npt.NDArray[np.uint8]) -> None:
    data[row.number] = encoded.tobytes()


def _submitted(executor: Executor, call: tuple[Any, ...]) -> Future[Any]:
    """Return the future of a call; raise `InvalidArgument` if the executor was shut down."""
    try:
        return executor.submit(*call)
    except BrokenExecutor:
        raise
    except RuntimeError as error:
        raise InvalidArgument(f"executor={executor!r:.100} takes no tasks: {error}; pass one in use") from error


class _BatchRunner:
    """Studies and encodes the arrays of one version, a batch at a time, with a cache of their values."""

    def __init__(self, store: Store, source: Snapshot, memory: int) -> None:
        self._storage = store.log.storage
        self._source = source
        self.cache = ValueCache(memory)

    async def study(self, undecided: Mapping[str, Undecided], batch: list[str]) -> list[Study]:
        async with self.cache.read(self._source, batch) as values:
            return await in_threads(lambda v: study(v, undecided[v.path]), values)

    async def encode(
        self, packs: PackSet, choices: Mapping[str, CodecChoice], profiles: Mapping[str, Profile], batch: list[str]
    ) -> list[EncodedArray]:
        """Encode the arrays of a batch, and drop their values."""
        async with self.cache.read(self._source, batch) as values:
            encoded = await encode_batch(self._storage, packs, values, choices, profiles)
        self.cache.drop(batch)
        return encoded

    async def run_in_turn(
        self, call: Callable[[list[str]], Coroutine[Any, Any, list[R]]], paths: Iterable[str]
    ) -> list[R]:
        """Return the results of a call for all batches of these paths, one batch after the other."""
        metas = {path: self._source.tree.nodes[path].meta for path in paths}
        return [result for batch in batches(metas, list(metas)) for result in await call(batch)]


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


def _study_task(workspace: _Workspace, undecided: Mapping[str, Undecided]) -> list[Study]:
    async def work() -> list[Study]:
        async with await open(workspace.url, "r") as store:
            runner = _BatchRunner(store, await store.snapshot(workspace.version), workspace.memory)
            return await runner.run_in_turn(partial(runner.study, undecided), undecided)

    return asyncio.run(work())


def _encode_task(
    workspace: _Workspace, choices: Mapping[str, CodecChoice], profiles: Mapping[str, Profile]
) -> list[EncodedArray]:
    async def work() -> list[EncodedArray]:
        async with await open(workspace.url, "r") as store:
            runner = _BatchRunner(store, await store.snapshot(workspace.version), workspace.memory)
            async with _packs(store, workspace) as packs:
                return await runner.run_in_turn(partial(runner.encode, packs, choices, profiles), choices)

    return asyncio.run(work())
