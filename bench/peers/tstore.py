"""tstore: arrays in chunks, and states from one process or many hosts."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import time
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from bench.contender import SLOTS, Contender, New, Point, Saved, gathered, value_of
from bench.workloads import Arrays, Index, Tree, Values


def durability(durable: bool) -> Any:
    return "fsync" if durable else "none"


class TStore(Contender):
    """`tstore.save`, `save_async` and `restore`; a transaction if the workload prescribes the chunk shape."""

    title = "tstore"
    stagings = ("memory", "turns")
    parts = True
    codecs: ClassVar[dict[str, str] | None] = None
    module = "tstore.sync"
    """Which saves states."""

    def prepare(self) -> None:
        self.tstore: Any = importlib.import_module("tstore")
        self.sync: Any = importlib.import_module(self.module)
        importlib.import_module("numcodecs.zstd")  # which tstore imports at its first use

    @property
    def url(self) -> str:
        return f"{self.folder}/store"

    # whole states

    def save(self, step: int, durable: bool) -> None:
        if self.work.chunked:
            self.create(New(self.arrays, self.work.chunk, durable=durable))
        else:
            options = {} if self.codecs is None else {"codecs": self.codecs}
            self.sync.save(self.url, self.state, step, durability=durability(durable), **options)

    def begin_save(self, step: int, staging: str) -> Callable[[], Any]:
        options = {} if staging == "memory" else {"staging": staging}
        return self.sync.save_async(self.url, self.state, step, **options).wait  # type: ignore[no-any-return]

    def restore(self, step: int, what: str) -> Tree:
        if self.work.chunked:
            with self.sync.open(self.url, "r") as store:
                snapshot = store.snapshot()
                return {name: snapshot.array(name).read() for name in self.work.names}
        only = "group0/**" if what == "tenth" else None
        return self.sync.restore(self.url, step, only=only, **self.targets(what))  # type: ignore[no-any-return]

    def targets(self, what: str) -> dict[str, Any]:
        """Return the target of a restore, if there is one."""
        return {}

    # arrays in chunks

    @cached_property
    def store(self) -> Any:
        return self.runner.run(self.tstore.open(self.url, "r+"))

    def create(self, new: New) -> None:
        how = durability(new.durable)
        if new.chunk is None:
            tree: dict[str, Arrays] = {}
            for path, values in new.arrays.items():
                group, _, name = path.rpartition("/")
                tree.setdefault(group, {})[name] = values
            self.sync.save(self.url, tree, 0, durability=how)
            return
        with self.sync.open(self.url) as store, store.transaction(durability=how) as tx:
            for name, values in new.arrays.items():
                array = tx.create_array(name, values.shape, values.dtype, chunks=new.chunk, codecs=new.codecs)
                array.write(values)

    def open(self, name: str) -> None:
        async def newest(store: Any) -> Any:
            return await (await store.snapshot()).array(name)

        self.array = self.runner.run(newest(self.store))

    def read(self, index: Index) -> Values:
        async def read() -> Any:
            return await self.array[index].read()

        return self.runner.run(read())

    def read_points(self, points: Sequence[Point]) -> Sequence[Any]:
        return self.runner.run(gathered(lambda point: self.array[point].read(), points))

    def read_group(self, paths: Sequence[str]) -> list[Any]:
        group = paths[0].rpartition("/")[0]
        tree = self.runner.run(self.tstore.restore(self.url, only=f"{group}/**"))
        return [tree[group][path.rpartition("/")[2]][0] for path in paths]

    def prepare_to_list(self) -> None:
        self.cli: Any = importlib.import_module("tstore.cli")
        importlib.import_module("tstore.cli.commands")

    def names(self, group: str) -> list[str]:
        with contextlib.redirect_stdout(io.StringIO()) as output:
            self.cli.main(["ls", self.url, group, "--json"])
        return [array["path"].rpartition("/")[2] for array in json.loads(output.getvalue())["arrays"]]

    def write(self, name: str, index: Index, values: Values) -> None:
        async def work(store: Any) -> None:
            async with store.transaction() as tx:
                await (await tx.array(name))[index].write(values)

        self.runner.run(work(self.store))

    # one store of many writers

    def begin(self, writers: int) -> None:
        async def make() -> None:
            async with await self.tstore.open(self.url, "x") as store, store.transaction() as tx:
                for writer in range(writers):
                    await tx.create_array(f"writers/{writer}", (SLOTS,), "int64", chunks=(1,), sparse=True)

        self.runner.run(make())

    def join(self, attempt: int) -> None:
        self.joined = self.runner.run(self.tstore.open(self.url))
        self.written, storage = 0.0, self.joined.log.storage
        flush = storage.flush

        async def timed_flush(prefix: str, durability: Any) -> None:
            await flush(prefix, durability)
            if prefix.startswith("txn/") and not self.written:
                self.written = time.monotonic()  # the chunks of this process are durable

        storage.flush = timed_flush

    def shards(self) -> Tree:
        """Return this host's part of the state."""
        shape = self.work.shape
        return {n: self.tstore.Shards(shape, "float32", [(self.mine, part)]) for n, part in self.arrays.items()}

    def save_part(self, attempt: int) -> Saved:
        hosts = {"host": self.number, "hosts": self.count, "attempt": f"attempt{attempt}"}
        how = durability(self.durable)
        self.runner.run(self.tstore.save(self.joined, self.shards(), 0, **hosts, durability=how))
        return Saved(self.written, time.monotonic())

    def read_part(self, name: str) -> Values:
        async def read() -> Any:
            snapshot = await self.joined.snapshot("step/0")
            return await (await snapshot.array(name))[self.mine].read()

        return self.runner.run(read())

    async def commit(self, writer: int, number: int) -> int:
        tx = self.joined.transaction(durability=durability(self.durable))
        async with tx:
            array = await tx.array(f"writers/{writer}")
            await array[number].write(value_of(writer, number))
        return len(getattr(tx, "retries", ()))

    def lost(self, made: Sequence[int]) -> int:
        async def count() -> int:
            async with await self.tstore.open(self.url, "r") as store:
                snapshot = await store.snapshot()
                missing = 0
                for writer, commits in enumerate(made):
                    values = await (await snapshot.array(f"writers/{writer}"))[:commits].read()
                    missing += int((values != value_of(writer, 0) + np.arange(commits)).sum())
                return missing

        return self.runner.run(count())


class TStoreE4M3(TStore):
    """`TStore` with 8 bits per value; its GB/s count the float32 bytes of the input."""

    title = "tstore e4m3"
    exact = False
    codecs: ClassVar = {"**": "e4m3"}


class TStoreApart(TStore):
    """A store and a commit for each host: the same bytes as `TStore`, without coordination."""

    title = "tstore, a store per host"

    @property
    def url(self) -> str:
        return f"{self.folder}/{self.number}"

    def begin(self, writers: int) -> None:
        """Do nothing: `join` creates the store of each host."""

    def save_part(self, attempt: int) -> Saved:
        self.runner.run(self.tstore.save(self.joined, self.arrays, 0, durability=durability(self.durable)))
        return Saved(self.written, time.monotonic())

    def read_part(self, name: str) -> Values:
        async def read() -> Any:
            return await (await (await self.joined.snapshot()).array(name)).read()

        return self.runner.run(read())


class TStoreServed(TStore):
    """One commit of all hosts to a storage that a server serves; nginx serves the files of a local store."""

    def prepare(self) -> None:
        super().prepare()
        from tstore.core.storage.connect import connect

        self.options = self.work.place.options or None
        connect(self.work.place.store, self.options)  # imports the modules of the storage

    def save(self, step: int, durable: bool) -> None:
        place = self.work.place
        url = f"{place.folder}/store" if self.work.server == "nginx" else place.store
        with self.sync.open(url, storage_options=self.options) as store:
            hosts = {"host": self.number, "hosts": self.count, "attempt": "bench"}
            self.sync.save(store, self.shards(), step, **hosts)
            self._count(store)

    def restore(self, step: int, what: str) -> Tree:
        target = self.tstore.Shards(self.work.shape, "float32", [(self.mine, None)])
        with self.sync.open(self.work.place.store, "r", storage_options=self.options) as store:
            tree = self.sync.restore(store, step, target=dict.fromkeys(self.work.names, target))
            self._count(store)
        return {name: tree[name].parts[0][1] for name in self.work.names}

    def _count(self, store: Any) -> None:
        self.requests = {} if store.traffic is None else dict(store.traffic.requests)
