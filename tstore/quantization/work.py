"""Work on many arrays of a version at once: in this process, or in tasks by the workers of an executor.

A task goes to a worker as plain data (the store's URL, a version, paths), and what comes back is plain data too:
studies, and references to the chunks that the worker wrote into packs of its own, durable already. The arrays
themselves never pass through the executor.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import BrokenExecutor, Executor
from typing import Any, NamedTuple, TypeVar

from tstore.data.writer import PackSet
from tstore.errors import Unavailable
from tstore.quantization.encoding import Choice, Encoded, encode_batch
from tstore.quantization.study import Configuration, Study, study
from tstore.quantization.values import batches, in_threads, read_batch
from tstore.runtime.pool import WORKERS
from tstore.snapshot import Snapshot
from tstore.storage.base import Backend, Durability
from tstore.store import Store, open

__all__ = ["Progress", "Work"]

R = TypeVar("R")

_AT_ONCE = min(WORKERS, 4)
_TASK = 64 << 20

Progress = Callable[[int, int], None]
"""Called with the bytes of values done and in all."""


class _Place(NamedTuple):
    """Where a worker finds the arrays, and where its packs go."""

    url: str
    version: int
    folder: str
    durability: Durability


class Work:
    """Studies and encodings of the arrays of one version, into packs of one transaction."""

    def __init__(
        self,
        store: Store,
        source: Snapshot,
        transaction: str,
        durability: Durability,
        executor: Executor | None,
        progress: Progress | None,
    ) -> None:
        self._store = store
        self._source = source
        self._metas = {path: source.tree.nodes[path].meta for path in source.paths()}
        self._place = _Place(store.url, source.version, f"txn/{transaction}", durability)
        self._executor = executor
        self._progress = progress

    async def study(self, recipes: Mapping[str, Configuration], widths: range) -> list[Study]:
        """The studies of these arrays, in their order, each in its granularity and scale."""
        paths = list(recipes)
        if self._executor is not None:
            calls = [(_study_task, self._place, {p: recipes[p] for p in t}, widths) for t in self._tasks(paths)]
            return await self._in_executor(calls)
        return await self._at_once(lambda batch: _study_batch(self._source, batch, recipes, widths), paths)

    async def encode(self, choices: Mapping[str, Choice]) -> list[Encoded]:
        """What became of each array, its packs durable."""
        paths = list(choices)
        if self._executor is not None:
            calls = [(_encode_task, self._place, {p: choices[p] for p in t}) for t in self._tasks(paths)]
            return await self._in_executor(calls)
        backend, source = self._store.log.backend, self._source
        async with _packs(backend, self._place) as packs:
            return await self._at_once(lambda batch: encode_batch(backend, packs, source, batch, choices), paths)

    async def _in_executor(self, calls: Sequence[tuple[Any, ...]]) -> list[Any]:
        assert self._executor is not None
        count = self._counted([path for call in calls for path in call[2]])
        futures: list[asyncio.Future[Any]] = []
        try:
            for call in calls:
                futures.append(asyncio.wrap_future(self._executor.submit(*call)))
            for future, call in zip(futures, calls, strict=True):
                await future
                count(call[2])
        except BrokenExecutor as error:
            raise Unavailable(
                f"{self._place.url}: the executor broke, as when one of its workers is killed ({error}); nothing "
                "was committed: repeat it with another executor"
            ) from error
        finally:
            for future in futures:
                future.cancel()
            await asyncio.gather(*futures, return_exceptions=True)
        return [result for future in futures for result in future.result()]

    async def _at_once(
        self, call: Callable[[list[str]], Coroutine[Any, Any, list[R]]], paths: Sequence[str]
    ) -> list[R]:
        """The results of all batches, in their order, a few of them going on at a time."""
        listed, count = batches(self._metas, paths), self._counted(paths)
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
        """The paths in tasks of some bytes, so that opening the store costs each worker little."""
        tasks: list[list[str]] = []
        room = 0
        for path in paths:
            if room <= 0:
                tasks.append([])
                room = _TASK
            tasks[-1].append(path)
            room -= self._metas[path].nbytes
        return tasks

    def _counted(self, paths: Iterable[str]) -> Callable[[Iterable[str]], None]:
        """Tells the progress of some more paths done."""
        total, done = sum(self._metas[path].nbytes for path in paths), 0

        def count(some: Iterable[str]) -> None:
            nonlocal done
            done += sum(self._metas[path].nbytes for path in some)
            if self._progress is not None:
                self._progress(done, total)

        return count


async def _study_batch(
    source: Snapshot, batch: Sequence[str], recipes: Mapping[str, Configuration], widths: range
) -> list[Study]:
    return await in_threads(lambda v: study(v, recipes[v.path], widths), await read_batch(source, batch))


@contextlib.asynccontextmanager
async def _packs(backend: Backend, place: _Place) -> AsyncIterator[PackSet]:
    """Packs of the transaction: durable after the block, given up where it fails."""
    packs = PackSet(backend, place.folder, place.durability)
    try:
        yield packs
        await packs.flush()
    except BaseException:
        await packs.discard()
        raise


def _study_task(place: _Place, recipes: Mapping[str, Configuration], widths: range) -> list[Study]:
    async def work() -> list[Study]:
        async with await open(place.url, "r") as store:
            source = await store.snapshot(place.version)
            return await _in_turn(source, recipes, lambda batch: _study_batch(source, batch, recipes, widths))

    return asyncio.run(work())


def _encode_task(place: _Place, choices: Mapping[str, Choice]) -> list[Encoded]:
    async def work() -> list[Encoded]:
        async with await open(place.url, "r") as store:
            source, backend = await store.snapshot(place.version), store.log.backend
            async with _packs(backend, place) as packs:
                return await _in_turn(
                    source, choices, lambda batch: encode_batch(backend, packs, source, batch, choices)
                )

    return asyncio.run(work())


async def _in_turn(
    source: Snapshot, paths: Iterable[str], call: Callable[[list[str]], Coroutine[Any, Any, list[R]]]
) -> list[R]:
    """The results of all batches of these paths, one batch after the other."""
    metas = {path: source.tree.nodes[path].meta for path in paths}
    return [result for batch in batches(metas, list(metas)) for result in await call(batch)]
