"""Any argument of a caller can be read back, or the call is refused and the store stays usable."""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import exmy
import ml_dtypes
import msgspec
import numpy as np
import pytest

import tstore
import tstore.sync as blocking
from tstore import Keep
from tstore.core.format.objects.records import Record
from tstore.core.storage.objects import Durability
from tstore.errors import InvalidArgument, TStoreError
from tstore.service.server import Access
from tstore.sharding import Mesh

LONE = "a\ud800"
DEEP: Any = []
for _ in range(300):
    DEEP = [DEEP]

Call = Callable[[tstore.Store], Awaitable[object]]


def transaction(**arguments: Any) -> Call:
    async def call(store: tstore.Store) -> None:
        async with store.transaction(**arguments):
            pass

    return call


def save(**arguments: Any) -> Call:
    async def call(store: tstore.Store) -> None:
        await tstore.save(store, **{"tree": {"w": np.ones(3)}, "step": 9, **arguments})

    return call


def quantize(**arguments: Any) -> Call:
    async def call(store: tstore.Store) -> None:
        await tstore.quantize(store, "e4m3", **arguments)

    return call


def array(**arguments: Any) -> Call:
    async def call(store: tstore.Store) -> None:
        async with store.transaction() as tx:
            await tx.create_array(**{"path": "new", "shape": (3,), "dtype": "int8", **arguments})

    return call


async def indexed_by_floats(store: tstore.Store) -> None:
    w = await (await store.snapshot()).array("w")
    _ = w[np.ones((30, 30))]


async def blocking_store(store: tstore.Store) -> None:
    with blocking.open(store.url) as other:
        await tstore.save(other, {"w": np.ones(3)}, 9)  # type: ignore[arg-type]


def resize(shape: Any) -> Call:
    async def call(store: tstore.Store) -> None:
        async with store.transaction() as tx:
            await (await tx.array("w")).resize(shape)

    return call


def group(*arguments: Any) -> Call:
    async def call(store: tstore.Store) -> None:
        async with store.transaction() as tx:
            await tx.create_group(*arguments)

    return call


def streamed(order: Any) -> Call:
    async def call(store: tstore.Store) -> None:
        async for _ in tstore.stream(store, order=order):
            pass

    return call


def attributes_at(path: Any) -> Call:
    async def call(store: tstore.Store) -> None:
        (await store.snapshot()).attributes(path)

    return call


REFUSED: list[tuple[Call, str]] = [
    (group("/".join("a" * 257)), "'a/a.* has 257 levels, more than 256; choose a shorter"),
    (transaction(message=None), r"message=None: expected text"),
    (transaction(message=b"m"), "message"),
    (transaction(message=LONE), "message: .*surrogates"),
    (transaction(message="x" * 100_000), "message=.* has 100000 bytes"),
    (transaction(tag=7), "tag=7: expected text"),
    (transaction(tag="x" * 5000), "tag=.* has 5000 bytes"),
    (transaction(tag=LONE), "tag: .*surrogates"),
    (transaction(tag="a\nb"), "control"),
    (transaction(tag="step/007"), "tag='step/007'"),
    (transaction(move_tag="step/" + "1" * 5000), "move_tag="),
    (transaction(tag="step/" + "1" * 19), "18 digits"),
    (transaction(tag="step/best"), "names a checkpoint's step"),
    (transaction(tag="step/٣"), "names a checkpoint's step"),
    (transaction(drop_tag=7), "drop_tag=7"),
    (transaction(metadata={1: "x"}), r"metadata\[1\]: expected text as a key"),
    (transaction(metadata=[1]), "metadata: expected a mapping"),
    (transaction(metadata={"a": {"b": [0, 10**30]}}), r"metadata\['a'\]\['b'\]\[1\]: .*64 bits"),
    (transaction(metadata={"a": 10**5000}), r"metadata\['a'\]: .*64 bits"),
    (transaction(metadata={"a": float("nan")}), r"metadata\['a'\]: JSON has no nan"),
    (transaction(metadata={"a": object()}), r"metadata\['a'\]: .*is not a JSON value"),
    (transaction(metadata={LONE: 1}), "surrogates"),
    (transaction(metadata={"a": DEEP}), "levels of nesting"),
    (transaction(metadata={"a": "x" * (2 << 20)}), "too many for the record"),
    (transaction(metadata={"metrics": 5}), r"metadata\['metrics'\]=5: expected a mapping"),
    (transaction(metadata={"metrics": {"loss": "low"}}), r"metadata\['metrics'\]\['loss'\]: expected a number"),
    (transaction(host=1), "host=1 without a name; pass name and hosts"),
    (transaction(name=3, host=0, hosts=1, attempt="a"), "name=3"),
    (transaction(name=LONE, host=0, hosts=1, attempt="a"), "name: "),
    (transaction(name="n", host=0, hosts=1, attempt=3), "attempt=3"),
    (transaction(name="n", host="0", hosts=1, attempt="a"), "host='0'"),
    (transaction(name="n", host=0, hosts=1.0, attempt="a"), "hosts=1.0"),
    (save(step=10**30), "step 1000"),
    (save(step=10**5000), "step "),
    (save(step=True), "step True"),
    (save(step=1.0), "step 1.0"),
    (save(message=None), "message=None"),
    (save(tags="best"), "tags='best': expected a list"),
    (save(tags=["7"]), "tags='7': expected text that is not a number"),
    (save(tags=["step/8"]), "'step/8' names a step, which step=… sets"),
    (save(metrics={0: 0.5}), r"metrics\[0\]: expected text as a key"),
    (save(metrics=[0.5]), "metrics"),
    (save(metrics={"loss": 10**30}), r"metrics\['loss'\]: .*64 bits"),
    (save(metrics={"loss": np.ones(2)}), r"metrics\['loss'\]: expected a number"),
    (save(metrics={"loss": 1j}), r"metrics\['loss'\]"),
    (save(attributes={"a": np.nan}), r"attributes\['a'\]: JSON has no nan"),
    (save(attributes={1: 2}), r"attributes\[1\]"),
    (save(attributes={"a": msgspec.Raw(b"{no json")}), r"attributes\['a'\]: .*is not a JSON value"),
    (save(attributes={"tstore": {"mine": 1}}), r"attributes\['tstore'\] is reserved for the structure"),
    (save(host=1), "host 1 of 1 does not exist"),
    (save(host=None), "host=None"),
    (save(hosts="2"), "hosts='2'"),
    (save(hosts=0), "hosts=0: expected at least 1"),
    (save(tree=object()), "an object of type object can't be stored"),
    (save(hosts=2, attempt=3), "attempt=3"),
    (save(durability="always"), "durability='always'"),
    (save(timeout="5"), "timeout='5'"),
    (save(metrics={str(i): i for i in range(200_000)}), "a commit has at most 4,096"),
    (array(path=3), "path=3"),
    (array(shape=3), "shape 3 is not a sequence"),
    (array(shape=None), "pass the shape and the dtype"),
    (array(shape="abc"), "shape 'abc'"),
    (array(shape=(1,) * 33), "33 dimensions are too many"),
    (array(dtype=LONE), "dtype"),
    (array(dimension_names=3), "dimension_names=3"),
    (array(path=LONE), "path"),
    (array(path="a\x1bb"), "control"),
    (array(attributes={"a": {"b": float("inf")}}), r"attributes\['a'\]\['b'\]: JSON has no inf"),
    (array(attributes={"a": b"x"}), r"attributes\['a'\]"),
    (array(attributes={"a": {1, 2}}), r"attributes\['a'\]"),
    (array(dimension_names=[3]), "dimension_names=3"),
    (array(dimension_names="x"), "dimension_names"),
    (array(dimension_names=[LONE]), "dimension_names"),
    (array(shape=(3.0,)), "shape"),
    (array(chunks=(1.5,)), "chunks"),
    (array(codecs=[{"name": "bytes"}, {"name": "zstd", "configuration": {"level": float("nan")}}]), "level"),
    (array(codecs=3), "codecs=3: expected an eXmY format, such as 'e4m3'.*lists of Zarr v3 codecs"),
    (array(codecs=b"zstd"), "codecs=b'zstd': expected"),
    (array(codecs="zstd"), r"codecs='zstd': pass Zarr codecs as a list, such as \['bytes', 'zstd'\]"),
    (array(codecs={"name": "zstd"}), r"pass Zarr codecs as a list, such as \['bytes', {'name': 'zstd'}\]"),
    (array(chunks=True), "chunks True is not a sequence of integers; leave it out"),
    (array(fill_value=None), "fill_value=None: expected a value of dtype int8"),
    (array(fill_value=None, dtype="float32"), "fill_value=None: expected a value of dtype float32"),
    (array(fill_value=None, dtype="M8[s]"), "fill_value=None: expected a value of dtype datetime64"),
    (array(fill_value="x", dtype="float32"), "fill_value='x': expected a value of dtype float32"),
    (resize(5), "shape 5 is not a sequence"),
    (resize(None), "shape None"),
    (resize("4"), "shape"),
    (resize((4.0,)), "shape"),
    (group("g", {1: 2}), r"attributes\[1\]"),
    (group("g", {"a": float("nan")}), r"attributes\['a'\]"),
    (group("g", {"a": msgspec.Raw(b"{no json")}), r"attributes\['a'\]"),
    (group(3), "path=3"),
    (lambda store: store.collect(Keep(best=5)), r"best=5\): expected"),  # type: ignore[arg-type]
    (lambda store: store.collect(Keep(best=(0, "loss"))), "best="),
    (lambda store: store.collect(Keep(best=("loss", 3))), "best="),  # type: ignore[arg-type]
    (lambda store: store.collect(Keep(newer_than=5)), "newer_than=5: expected a timedelta"),  # type: ignore[arg-type]
    (lambda store: store.collect(Keep(tags=5)), "tags=5"),  # type: ignore[arg-type]
    (lambda store: store.collect(Keep(last=2.0)), "last=2.0"),  # type: ignore[arg-type]
    (lambda store: store.collect(abandoned=5), "abandoned=5: expected a timedelta"),  # type: ignore[arg-type]
    (lambda store: store.collect(abandoned=datetime.timedelta(-1)), "abandoned="),
    (lambda store: store.finish(None), "transaction=None"),  # type: ignore[arg-type]
    (lambda store: tstore.restore(store, only=5), "only=5"),  # type: ignore[arg-type]
    (lambda store: tstore.restore(store, only=["w", 5]), "only="),  # type: ignore[list-item]
    (lambda store: tstore.restore(store, only=LONE), "only: .*surrogates"),
    (lambda store: tstore.restore(store, rename=np.ones(2)), "rename=array"),  # type: ignore[arg-type]
    (lambda store: tstore.restore(store, missing=np.ones(2)), "expected 'error' or 'keep'"),  # type: ignore[arg-type]
    (lambda store: tstore.restore(store, host=-1), "host=-1, hosts=1: expected a host from 0"),
    (lambda store: tstore.open(LONE), "surrogates"),
    (lambda store: tstore.open(store.url, storage_options=5), "storage_options of type int"),  # type: ignore[arg-type]
    (lambda store: store.verify(5), "progress=5: expected a function"),  # type: ignore[arg-type]
    (lambda store: tstore.Checkpointer(store).best(["loss"]), "metric="),  # type: ignore[arg-type]
    (streamed(5), "order=5: expected 'storage', or a list of paths"),
    (attributes_at(5), "path=5: expected text"),
    (lambda store: tstore.open(store.url, cache=tstore.Cache(None)), r"Cache\(None\)"),  # type: ignore[arg-type]
    (lambda store: tstore.open(store.url, cache=tstore.Cache("c", size="1")), "size='1'"),  # type: ignore[arg-type]
    (lambda store: store.snapshot(np.arange(9)), r"at=array\("),  # type: ignore[arg-type]
    (lambda store: tstore.restore(store, 1.0), "step 1.0: expected"),  # type: ignore[arg-type]
    (lambda store: tstore.restore(store, True), "step True: expected"),
    (lambda store: tstore.restore(store, "1"), "step '1': expected"),  # type: ignore[arg-type]
    (lambda store: tstore.restore(store, target="w"), "missing in the checkpoint: the whole target"),
    (lambda store: tstore.open("a\0b"), "has a null character"),
    (lambda store: tstore.open("file:///a%00b"), "file://… has a null character"),
    (lambda store: tstore.open(store.url, cache="a\0b"), "has a null character"),
    (lambda store: tstore.save("a\0b", {}, 1), "has a null character"),
    (lambda store: tstore.open("x" * 5000), "has 5,000 characters"),
    (lambda store: tstore.copy(store, f"{store.url}/copy"), "is inside the store to copy"),
    (indexed_by_floats, r"^w: index .{1,100}: expected an integer"),
    (blocking_store, "is a blocking store"),
    (quantize(tag="step/7"), "names a step"),
    (quantize(at=0), "has no arrays to quantize"),
    (quantize(tag=7), "tag=7"),
    (quantize(tag="a\nb"), "control"),
]


async def test_arguments_that_could_not_be_read_again_are_refused(tmp_path: Path) -> None:
    store = await tstore.open(tmp_path)
    await tstore.save(store, {"w": np.zeros(3)}, 1)
    files = sorted(p for p in tmp_path.rglob("*") if p.is_file())
    for call, match in REFUSED:
        with pytest.raises(InvalidArgument, match=match):
            await call(store)
        assert sorted(p for p in tmp_path.rglob("*") if p.is_file()) == files, match
    await tstore.save(store, {"w": np.ones(3)}, 2)
    assert (await store.collect(Keep(last=1))).versions == [1]
    assert (await tstore.restore(tmp_path))["w"].tolist() == [1, 1, 1]
    assert (await (await tstore.open(tmp_path, "r")).verify()).ok


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: tstore.Shards((4, 4), "f4", np.ones((4, 4))), "parts is a numpy.ndarray; expected a mapping"),
        (lambda: tstore.Shards((4, 4), "f4", None), "parts is a builtins.NoneType; expected a mapping"),  # type: ignore[arg-type]
        (lambda: Mesh([2, 2]), r"the shape of a mesh is \[2, 2\]; expected a mapping"),  # type: ignore[arg-type]
        (lambda: tstore.Checkpointer("memory://", host=-1), "host=-1, hosts=1: expected a host from 0"),
        (lambda: tstore.Checkpointer("memory://", timeout="5"), "timeout='5'"),  # type: ignore[arg-type]
        (lambda: tstore.Checkpointer("memory://", agree=5), "agree=5: expected a function"),  # type: ignore[arg-type]
        (lambda: tstore.Checkpointer("memory://", on_saved=5), "on_saved=5: expected"),  # type: ignore[arg-type]
        (lambda: tstore.Checkpointer("memory://", on_error=[]), "'raise' or 'warn'"),  # type: ignore[arg-type]
        (lambda: tstore.OnPreemption([]), r"OnPreemption\(\[\]\): expected a signal"),  # type: ignore[arg-type]
        (lambda: Access({}, anonymous="admin"), "anonymous='admin': expected 'none', 'read' or 'write'"),
        (lambda: Access({}, anonymous=3), "anonymous=3: expected"),  # type: ignore[arg-type]
    ],
)
def test_objects_refuse_invalid_arguments(call: Callable[[], object], match: str) -> None:
    with pytest.raises(InvalidArgument, match=match):
        call()


async def test_a_format_is_accepted_for_its_name(tmp_path: Path) -> None:
    e4m3, w = exmy.Format("e4m3"), np.random.default_rng(0).standard_normal((16, 16)).astype("f4")
    for step, codecs in enumerate([e4m3, {"w": e4m3}, {"format": e4m3, "axis": 0}, {"**": {"format": e4m3}}]):
        await tstore.save(tmp_path, {"w": w}, step, codecs=codecs)
    await tstore.save(tmp_path, {"w": w}, 9)
    for formats in (e4m3, {"w": e4m3}, {"format": e4m3, "axis": 0}):
        report = await tstore.quantize(tmp_path, formats, tag=None if formats is e4m3 else repr(formats))
        assert [row.format for row in report.arrays] == ["e4m3"]
    async with await tstore.open(tmp_path) as store:
        assert (await store.tags())["step/9/e4m3"]
        async with store.transaction() as tx:
            array = await tx.create_array("new", shape=(16, 16), dtype="float32", codecs=e4m3)
            await array.write(w)
        assert array.codecs[0]["configuration"] == {"format": "e4m3"}


@pytest.mark.parametrize(
    "arguments",
    [
        {"hosts": 2},
        {"host": 2, "hosts": 2, "attempt": "a"},
        {"durability": None},
        {"timeout": [1]},
        {"metrics": {str(i): i for i in range(200_000)}},
    ],
    ids="-".join,
)
async def test_a_save_that_is_refused_makes_no_store(
    arguments: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SLURM_JOB_ID", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(InvalidArgument):
        await tstore.save(tmp_path / "new", {"w": np.ones(3)}, 1, **arguments)
    assert not (tmp_path / "new").exists()


async def test_hosts_may_be_numpy_integers(tmp_path: Path) -> None:
    tree = {f"w{i}": np.full(3, i) for i in range(8)}
    two = np.int64(2)
    saves = [tstore.save(tmp_path, tree, 1, host=host, hosts=two, attempt="a") for host in np.arange(two)]
    assert await asyncio.gather(*saves) == [1, 1]
    assert (await tstore.restore(tmp_path))["w7"].tolist() == [7, 7, 7]


async def test_accepted_arguments_are_read_back(tmp_path: Path) -> None:
    metrics = {
        "a": np.float32(0.5),
        "b": np.int64(3),
        "c": np.array(2.5),
        "d": ml_dtypes.bfloat16(1.5),
        "e": 7,
        "nan": float("nan"),
        "inf": np.float64("inf"),
    }
    metadata = {"metrics": metrics, "t": (1, np.int8(2)), "s": np.str_("ö"), "n": None, "deep": {"x": [True, 1.5]}}
    store = await tstore.open(tmp_path)
    async with store.transaction("ö\n", tag="step/0", metadata=metadata) as tx:
        attributes = {"list": [1, (2,)], "f": np.float64(1.5)}
        w = await tx.create_array("ö b", (1,), "int8", dimension_names=["x"], attributes=attributes)
        await w.write(1)
    store = await tstore.open(tmp_path, "r")
    (commit,) = [c async for c in store.history()]
    recorded = commit.metadata.pop("metrics")
    assert str(recorded) == "{'a': 0.5, 'b': 3, 'c': 2.5, 'd': 1.5, 'e': 7, 'nan': nan, 'inf': inf}"
    assert commit.metadata == {"t": [1, 2], "s": "ö", "n": None, "deep": {"x": [True, 1.5]}}
    assert commit.message == "ö\n"
    assert (await (await store.snapshot("step/0")).array("ö b")).attributes == {"list": [1, [2]], "f": 1.5}


async def test_a_step_that_diverged_is_saved_and_is_never_the_best(tmp_path: Path) -> None:
    losses: list[Any] = [0.5, float("nan"), -np.inf, np.float32(0.25), 0.75, np.float32("nan")]
    for step, loss in enumerate(losses):
        await tstore.save(tmp_path, {"w": np.full(3, step)}, np.int64(step), metrics={"loss": loss})
    store = await tstore.open(tmp_path)
    await store.collect(Keep(best=(2, "loss")))
    assert await tstore.steps(store) == [0, 3, 5]


async def test_the_caller_may_change_its_arguments_later(tmp_path: Path) -> None:
    store = await tstore.open(tmp_path)
    metadata: dict[str, Any] = {"a": [1], "metrics": {"loss": 1.0}}
    tx = store.transaction(metadata=metadata)
    metadata["a"].append(object())
    metadata["metrics"][0] = "x"
    await tx.commit()
    assert [c.metadata async for c in store.history()] == [{"a": [1], "metrics": {"loss": 1.0}}]


@pytest.mark.parametrize(
    "values",
    [
        {"message": None},
        {"metadata": {1: "x"}},
        {"metadata": {"a": np.float32(1)}},
        {"metadata": {"a": 10**30}},
        {"tags": (LONE,)},
        {"bytes_added": 1.5},
        {"deleted": (None,)},
    ],
)
async def test_a_record_that_could_not_be_read_is_not_created(values: dict[str, Any], tmp_path: Path) -> None:
    """Even if a check of an argument is missing. Other commits of the same group are not affected."""
    store = await tstore.open(tmp_path)

    async def good(number: int) -> None:
        async with store.transaction() as tx:
            await tx.create_array(f"a{number}", (1,), "int8", sparse=True)

    async def bad() -> None:
        async with store.transaction() as tx:
            await tx.create_array("b", (1,), "int8", sparse=True)
            staging = tx.staging
            manifest = await staging.seal()
            changes = staging.changes()
            record = msgspec.structs.replace(Record(tx.id, 0, 0.0, manifests=(manifest,)), **values)

            async def validate(newer: Any) -> Record:
                return record

            with pytest.raises(InvalidArgument, match="could not be read again"):
                await store.log.append(record, validate, Durability.FSYNC, changes=changes)
            await tx.abort()

    await asyncio.gather(good(1), good(2), bad(), good(3), good(4))
    assert (await (await tstore.open(tmp_path, "r")).snapshot()).paths() == ["a1", "a2", "a3", "a4"]


@pytest.mark.parametrize(
    "values",
    [
        {"metadata": {"metrics": 5}},
        {"metadata": {"metrics": {0: 1, "a": "b", "c": None}}},
        {"tags": ("step/007",)},
        {"tags": ("step/" + "1" * 5000, "step/٣", "step/", "")},
        {"time": 1e300},
        {"time": float("nan")},
        {"time": float("-inf")},
    ],
)
async def test_encoding_refuses_what_callers_may_not_pass(values: dict[str, Any], tmp_path: Path) -> None:
    """For records written by other programs, see `test_forged_records` and `test_repair`."""
    store = await tstore.open(tmp_path)
    await tstore.save(store, {"w": np.zeros(3)}, 1)

    async def validate(version: int, other: Record) -> Record:
        raise AssertionError

    with pytest.raises(InvalidArgument):
        await store.log.append(Record("strange", 1, **{"time": 1.0, **values}), validate, Durability.FSYNC)
    assert (await (await tstore.open(tmp_path)).snapshot()).version == 1


@pytest.mark.parametrize(
    "call",
    [
        lambda store: store.snapshot("x" * 100_000),
        lambda store: store.finish("x" * 60_000),
        lambda store: tstore.restore(store, only="x" * 100_000),
        lambda store: tstore.open(store.url, "x" * 100_000),
    ],
)
async def test_an_error_shows_the_beginning_of_a_huge_argument(call: Call, tmp_path: Path) -> None:
    store = await tstore.open(tmp_path)
    await tstore.save(store, {"w": np.zeros(3)}, 1)
    with pytest.raises(TStoreError) as raised:
        await call(store)
    assert len(str(raised.value)) < 500
