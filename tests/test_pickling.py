"""Stores, snapshots and arrays in other processes: pickled, or inherited by a fork."""

from __future__ import annotations

import asyncio
import copy
import datetime
import importlib
import inspect
import multiprocessing
import pickle
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tstore
import tstore.sync
from tests.support.http_server import WRITE, serving
from tests.support.lazy import lazy
from tests.support.processes import DEADLINE
from tstore.core.storage.local.store import LocalStorage
from tstore.errors import Misuse, NotAStore, TimelineChanged

torch = lazy("torch")
dcp = lazy("torch.distributed.checkpoint")
zarr = lazy("zarr")
ZarrStore = lazy("tstore.zarr").ZarrStore

VALUES = np.arange(2000, dtype="f4").reshape(100, 20)


class Rows:
    """A dataset as PyTorch's DataLoader takes: it is passed to worker processes with the open array in it."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, number: int) -> Any:
        return np.asarray(self.array[number])


def row_sums(rows: Rows, results: Any, first: int) -> None:
    results.put({number: float(rows[number].sum()) for number in range(first, len(rows), 2)})


@pytest.fixture
def url(tmp_path: Path) -> str:
    with tstore.sync.open(tmp_path / "s") as store, store.transaction(tag="made") as tx:
        tx.create_array("group/a", VALUES.shape, "f4", chunks=(10, 20)).write(VALUES)
    return str(tmp_path / "s")


def again(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


@pytest.mark.parametrize("start", ["fork", "spawn", "forkserver"])
def test_workers_of_a_data_loader_read_an_open_array(url: str, start: str) -> None:
    context: Any = multiprocessing.get_context(start)
    array = tstore.sync.open(url, "r").snapshot().array("group/a")
    rows, results = Rows(array[10:][::2]), context.Queue()
    assert rows[3].tolist() == VALUES[16].tolist()  # the loop and the threads of this process have begun
    workers = [context.Process(target=row_sums, args=(rows, results, first)) for first in range(2)]
    for worker in workers:
        worker.start()
    sums = results.get(timeout=60) | results.get(timeout=60)
    for worker in workers:
        worker.join()
    assert [sums[number] for number in range(45)] == VALUES[10::2].sum(1).tolist()


def test_the_pickles_of_blocking_objects(url: str) -> None:
    with tstore.sync.open(url) as store:
        snapshot = store.snapshot()
        array = snapshot.array("group/a")
        view = array[10:][::2].T[3].oindex[[5, 1, 1]]
        with store.transaction() as tx:  # the pickles stay at their version
            tx.array("group/a").write(0)
        assert again(store).snapshot().version == 2
        assert again(store).uuid == store.uuid
        assert again(snapshot).tags == {"made": 1}
        assert again(array).read().tolist() == VALUES.tolist()
        assert again(view).read().tolist() == VALUES[10:][::2].T[3][[5, 1, 1]].tolist()
        assert again(again(view)).shape == (3,)
        assert len(pickle.dumps(array)) < 1000
        assert copy.deepcopy(array).read().tolist() == VALUES.tolist()
        with again(store).transaction() as tx:
            tx.array("group/a")[0].write(7)
    with pytest.raises(tstore.errors.Denied):
        again(tstore.sync.open(url, "r")).transaction()


def test_equal_pickles_share_an_open_store(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So the tasks of one process open it once, each with a part of an array."""
    with tstore.sync.open(url, "r") as store:
        array = store.snapshot().array("group/a")
        pickled = [pickle.dumps(value) for value in (store, array, array[3:5], array.T)]
    first = [pickle.loads(data) for data in pickled[:2]]
    monkeypatch.setattr("tstore.core.pickling.open", lambda *_, **__: pytest.fail("a store is opened again"))
    again = [pickle.loads(data) for data in pickled]
    assert again[0].uuid == first[0].uuid
    assert again[2].read().tolist() == VALUES[3:5].tolist()
    assert again[3][1].read().tolist() == first[1][:, 1].read().tolist()


async def test_the_pickles_of_async_objects(url: str) -> None:
    async with await tstore.open(url) as store:
        array = (await (await store.snapshot()).array("group/a"))[::-1]
        assert (await again(array).read()).tolist() == VALUES[::-1].tolist()
        assert (await (await again(store).snapshot()).array("group/a")).shape == (100, 20)


def test_a_relative_path_is_that_of_the_first_process(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(url).parent)
    pickled = pickle.dumps(tstore.sync.open("s", "r"))
    monkeypatch.chdir("/")
    assert pickle.loads(pickled).snapshot().version == 1


def test_a_transaction_is_not_pickled(url: str) -> None:
    with tstore.sync.open(url) as store, store.transaction() as tx:
        for value in (tx, tx.array("group/a"), tx.array("group/a")[3]):
            with pytest.raises(Misuse, match="belong to the process that began it"):
                pickle.dumps(value)


async def test_what_another_process_can_not_open_is_not_pickled(url: str) -> None:
    with pytest.raises(Misuse, match="open it by its URL"):
        pickle.dumps(await tstore.open(LocalStorage(url)))


PUBLIC = [
    "tstore",
    "tstore.sync",
    "tstore.sharding",
    "tstore.torch",
    "tstore.sync.torch",
    "tstore.sync.jax",
    "tstore.zarr",
]

BELONGS_TO_ITS_PROCESS = {
    "Transaction": "begin a transaction there",
    "Checkpointer": "make one in the other process",
    "BackgroundSave": "wait for it here",
    "Mapped": "map the checkpoint in the other process",
    "Follower": "follow it there",
}
"""What can't be pickled, and what the error says to do."""


def objects(url: str) -> Iterator[Any]:
    """Make objects of all public types."""
    sync = tstore.sync
    store = sync.open(url)
    yield store
    yield from (snapshot := store.snapshot(), array := snapshot.array("group/a"))
    with store.transaction() as tx:
        yield tx
        tx.create_array("rows", (0, 3), "f4")
        yield (appended := tx.array("rows").append(np.ones((2, 3), "f4")))
        with pytest.raises(Misuse, match="commit it first"):
            pickle.dumps(appended)
    yield from map(inspect.unwrap, (store, snapshot, array, tx))
    yield from (follower := store.follow(), inspect.unwrap(follower), next(store.snapshot().patches(since=1)))
    yield (diff := store.diff(1, 2))
    yield diff.arrays[0]
    steps = f"{url}-steps"
    yield (save := sync.save_async(steps, {"w": VALUES, "bias": VALUES[0]}, 0))
    save.wait()
    yield (quantized := sync.quantize(steps, bits=4, tag="small"))
    yield quantized.arrays[0]
    yield sync.quantization_loss(steps, "w")
    sync.quantize(steps, {"w": "e4m3"}, tag="packed")
    yield sync.copy(url, f"{url}-copy")
    yield store.collect(tstore.Keep(last=1), dry_run=True)
    yield from store.history()
    yield from sync.Checkpointer(steps).steps()
    yield sync.explain(steps)
    yield from (mapped := sync.restore(steps, map=True), inspect.unwrap(mapped))
    yield from (sync.summarize(array), sync.heat_map(array))
    store.transaction(name="step/9", host=0, hosts=2, attempt="a").deliver()
    yield store.pending()[0]
    yield from (
        tstore.Bits(3),
        tstore.MinSqnr(30),
        tstore.Keep(last=5, best=(3, "loss")),
        tstore.Cache(url, 1 << 20),
    )
    yield from (tstore.EverySeconds(3), tstore.EverySteps(3), tstore.OnPreemption(signal.SIGUSR1))
    yield from (tstore.Continuous(), tstore.SaveReport(1, 2, 0.1, 0.1, 0.2, 3, 4, 0))
    yield from (
        tstore.Tiers("local", url),
        tstore.TierStep(3, "local", 0, 1, datetime.datetime.now(datetime.UTC), 8, False),
    )
    yield from (
        sync.Checkpointer(url),
        sync.torch.Checkpointer(url),
        sync.jax.Checkpointer(url),
        tstore.Checkpointer(url),
    )
    yield tstore.torch.Checkpointer(url)
    yield from (sync.torch.Writer(f"{url}-dcp", 1, codecs={"**/w*": "lossless"}), sync.torch.Reader(steps))
    yield ZarrStore(snapshot)
    sharding = tstore.sharding
    mesh, spec = sharding.Mesh({"x": 2}), sharding.P("x")
    yield from (mesh, spec, mesh.shards((4, 4), spec)[0], tstore.Shards.of(VALUES, mesh, spec, 0))
    yield tstore.PerHost(VALUES)
    yield from (sharding.Pipeline(2, 4), sharding.Placements("replicate", ("shard", 0)))
    yield sharding.ReplicaSplit.choose((8, 8), (8, 8), 2, 4, 1)
    wanted = {"w": tstore.Shards.wanted((100, 20), "f4", mesh, spec, 0)}
    yield sync.restore(steps, at="packed", only="w", packed=True, target=wanted)["w"]


def used(value: Any) -> Any:
    """Return what a process gets from an object by using it; values are compared as text."""
    match type(inspect.unwrap(value)).__name__:
        case "Store":
            return inspect.unwrap(value).uuid
        case "Snapshot":
            return inspect.unwrap(value).paths()
        case "Array":
            return np.asarray(tstore.sync.Array(inspect.unwrap(value)).read()).tolist()
        case "Appended":
            return value.region
        case "ZarrStore":
            return zarr.open_group(value, mode="r")["group/a"][:].tolist()
        case "Writer":
            dcp.save({"w": torch.ones(3)}, storage_writer=value, no_dist=True)
            return None
        case "Reader":
            dcp.load(state := {"w": torch.zeros(100, 20)}, storage_reader=value, no_dist=True)
            return state["w"].tolist()
    return repr(value if type(value).__repr__ is not object.__repr__ else vars(value))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:process_group")
def test_every_public_type_works_in_another_process_or_says_why_not(url: str) -> None:
    public = {
        value
        for module in map(importlib.import_module, PUBLIC)
        for value in map(module.__getattribute__, module.__all__)
        if inspect.isclass(value)
    }
    made = list(objects(url))
    assert public - {type(value) for value in made} == {tstore.Retry}  # a class that is only caught or passed
    pickles = []
    for value in made:
        if advice := BELONGS_TO_ITS_PROCESS.get(type(value).__name__):
            with pytest.raises(Misuse, match=advice):
                pickle.dumps(value)
        else:
            pickles.append(value)
    for start in ("fork", "spawn"):
        with multiprocessing.get_context(start).Pool(1) as pool:
            results = [pool.apply_async(used, [value]) for value in pickles]
            for value, result in zip(pickles, results, strict=True):
                assert result.get(DEADLINE) == (None if isinstance(value, tstore.torch.Writer) else used(value)), (
                    value
                )
        shutil.rmtree(f"{url}-dcp")  # where the other process has saved a step


def test_what_can_not_be_opened_in_another_process_raises_there_when_it_is_used(url: str) -> None:
    """An error while unpickling would end the worker of a Pool, and the parent would wait for it for ever."""
    gone = shutil.copytree(url, f"{url}-gone")
    store = tstore.sync.open(gone)
    tx = tstore.sync.open(url).transaction()
    snapshot = store.snapshot()
    values = [store, snapshot, snapshot.array("group/a"), ZarrStore(snapshot), ZarrStore(tx)]
    with multiprocessing.get_context("fork").Pool(1) as pool:
        shutil.rmtree(gone)
        for value in values:
            with pytest.raises(Misuse if value is values[-1] else NotAStore):
                pool.apply_async(used, [value]).get(DEADLINE)
    tx.abort()


def test_an_object_that_could_not_be_opened(url: str) -> None:
    pickled = pickle.dumps(tstore.sync.open(url, "r").snapshot().array("group/a"))
    shutil.rmtree(url)
    array = pickle.loads(pickled)
    assert isinstance(array, tstore.sync.Array)
    assert "that can't be used: " in repr(array)
    uses: list[Callable[[], Any]] = [
        *(lambda: array.shape, lambda: len(array), lambda: array[0], lambda: np.asarray(array)),
        *(array.read, lambda: again(array).read(), lambda: copy.copy(array).shape),
    ]
    for use in uses:
        with pytest.raises(NotAStore, match=r"has no tstore\.json"):
            use()


def test_stores_in_memory_exist_in_one_process() -> None:
    store = tstore.sync.open("memory://pickled")
    assert again(store).uuid == store.uuid
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool, pytest.raises(NotAStore, match="only in the process that created it"):
        pool.apply_async(used, [store]).get(DEADLINE)


def test_another_store_at_the_url_is_noticed(url: str, tmp_path: Path) -> None:
    with tstore.sync.open(url) as store:
        pickled = [pickle.dumps(value) for value in (store, store.snapshot(), store.snapshot().array("group/a"))]
    del store
    shutil.rmtree(url)
    with tstore.sync.open(url) as store, store.transaction() as tx:
        tx.create_array("group/a", VALUES.shape, "f4")
    for each in pickled:
        with pytest.raises(TimelineChanged):
            used(pickle.loads(each))


def test_a_pickle_has_the_token_that_opens_the_store(url: str) -> None:
    with serving(url) as server:
        array = tstore.sync.open(server.url, "r", storage_options={"token": WRITE}).snapshot().array("group/a")
        assert again(array[3]).read().tolist() == VALUES[3].tolist()


def test_dask_names_arrays_by_what_they_are(url: str) -> None:
    import dask.array

    array, same = (tstore.sync.open(url, "r").snapshot().array("group/a") for _ in range(2))
    assert dask.base.tokenize(array[3:]) == dask.base.tokenize(same[3:])
    assert dask.base.tokenize(array[3:]) != dask.base.tokenize(array[4:])
    from_array: Any = dask.array.from_array
    total = from_array(array, chunks=(50, 20)).sum()
    assert total.compute(scheduler="processes", num_workers=2) == VALUES.sum()


def test_threads_and_a_running_loop_share_an_array(url: str) -> None:
    array = tstore.sync.open(url, "r").snapshot().array("group/a")
    failures: list[int] = []

    def read(first: int) -> None:
        failures.extend(n for n in range(first, 100, 8) if array[n].read().tolist() != VALUES[n].tolist())

    async def in_a_notebook() -> None:
        threads = [threading.Thread(target=read, args=(first,)) for first in range(8)]
        for thread in threads:
            thread.start()
        assert np.asarray(array).tolist() == VALUES.tolist()
        for thread in threads:
            thread.join()

    asyncio.run(in_a_notebook())
    assert not failures
