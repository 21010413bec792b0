"""Work on many arrays of a version at once: in this process, or in batches by the workers of an executor.

A batch goes to a worker as plain data (the store's URL, a version, paths), and what comes back is plain data too:
studies, and references to the chunks that the worker wrote into packs of its own, durable already. The arrays
themselves never pass through the executor.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import BrokenExecutor, Executor
from typing import Any, NamedTuple, TypeVar

from tstore.chunk_writer import PackSet
from tstore.errors import Unavailable
from tstore.kv.base import Durability
from tstore.pool import WORKERS
from tstore.quantization.encoding import Choice, Configuration, Encoded, Study, encode_array, study_array
from tstore.snapshot import Snapshot
from tstore.store import Store, open

__all__ = ["Progress", "Work"]

T = TypeVar("T")
R = TypeVar("R")

_AT_ONCE = min(WORKERS, 4)
_BATCH = 64 << 20

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
        self._place = _Place(store.url, source.version, f"txn/{transaction}", durability)
        self._executor = executor
        self._progress = progress

    async def study(self, recipes: Mapping[str, Configuration], widths: range) -> list[Study]:
        """The studies of these arrays, in their order, each in its granularity and scale."""
        paths = list(recipes)

        async def one(path: str) -> Study:
            return await study_array(self._source, path, recipes[path], widths)

        if self._executor is None:
            return await _at_once(one, paths, self._counted(paths))
        batches = self._batches(paths)
        calls = [(_study_batch, self._place, {p: recipes[p] for p in batch}, widths) for batch in batches]
        return await self._in_executor(calls, batches)

    async def encode(self, choices: Mapping[str, Choice]) -> list[Encoded]:
        """What became of each array, its packs durable."""
        paths = list(choices)
        if self._executor is not None:
            batches = self._batches(paths)
            calls = [(_encode_batch, self._place, {p: choices[p] for p in batch}) for batch in batches]
            return await self._in_executor(calls, batches)
        backend = self._store.log.backend
        packs = PackSet(backend, self._place.folder, self._place.durability)

        async def one(path: str) -> Encoded:
            return await encode_array(backend, packs, self._source, path, choices[path])

        try:
            encoded = await _at_once(one, paths, self._counted(paths))
            await packs.settle()
        except BaseException:
            await packs.discard()
            raise
        return encoded

    async def _in_executor(self, calls: Sequence[tuple[Any, ...]], batches: Sequence[Sequence[str]]) -> list[Any]:
        assert self._executor is not None
        count = self._counted([path for batch in batches for path in batch])
        futures: list[asyncio.Future[Any]] = []
        try:
            for call in calls:
                futures.append(asyncio.wrap_future(self._executor.submit(*call)))
            for future, batch in zip(futures, batches, strict=True):
                await future
                for path in batch:
                    count(path)
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

    def _bytes(self, path: str) -> int:
        return self._source.tree.nodes[path].meta.nbytes

    def _batches(self, paths: Sequence[str]) -> list[list[str]]:
        """The paths in batches of some bytes, so that opening the store costs each worker little."""
        batches: list[list[str]] = []
        room = 0
        for path in paths:
            if room <= 0:
                batches.append([])
                room = _BATCH
            batches[-1].append(path)
            room -= self._bytes(path)
        return batches

    def _counted(self, paths: Sequence[str]) -> Callable[[str], None]:
        """Tells the progress of one more path done."""
        total, done = sum(map(self._bytes, paths)), 0

        def count(path: str) -> None:
            nonlocal done
            done += self._bytes(path)
            if self._progress is not None:
                self._progress(done, total)

        return count


async def _at_once(
    call: Callable[[T], Coroutine[Any, Any, R]], items: Sequence[T], count: Callable[[T], None]
) -> list[R]:
    """The results of the call for all items, in their order, a few of them going on at a time."""
    results: dict[int, R] = {}
    source = iter(enumerate(items))

    async def draw() -> None:
        for i, item in source:
            results[i] = await call(item)
            count(item)

    tasks = [asyncio.ensure_future(draw()) for _ in range(min(_AT_ONCE, len(items)))]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return [results[i] for i in range(len(items))]


def _study_batch(place: _Place, recipes: Mapping[str, Configuration], widths: range) -> list[Study]:
    async def work() -> list[Study]:
        async with await open(place.url, "r") as store:
            source = await store.snapshot(place.version)
            return [await study_array(source, path, recipe, widths) for path, recipe in recipes.items()]

    return asyncio.run(work())


def _encode_batch(place: _Place, choices: Mapping[str, Choice]) -> list[Encoded]:
    async def work() -> list[Encoded]:
        async with await open(place.url, "r") as store:
            source, backend = await store.snapshot(place.version), store.log.backend
            packs = PackSet(backend, place.folder, place.durability)
            try:
                found = [await encode_array(backend, packs, source, p, choice) for p, choice in choices.items()]
                await packs.settle()
            except BaseException:
                await packs.discard()
                raise
            return found

    return asyncio.run(work())
