"""A commit of few chunks takes a short way, with the bytes of the general one, and a bounded number of calls."""

from __future__ import annotations

import random
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import tstore
from tstore.core.data.writer import PackSet
from tstore.core.format.frame import Link, linked
from tstore.core.format.layout import is_record
from tstore.core.format.objects import references
from tstore.core.format.objects.chunk_refs import ChunkTable
from tstore.core.format.objects.chunk_rows import ChunkRow
from tstore.core.format.objects.references import Manifest
from tstore.core.format.tree.nodes import Nodes
from tstore.core.runtime.pool import Workers
from tstore.core.runtime.world import World, use_world
from tstore.core.transactions.staged_manifest import short_manifest
from tstore.errors import Corrupt

MAX_CALLS = 422
"""Python calls of a commit of one chunk, from `Store.transaction` to the end of the block."""

NUMBERS = st.integers(0, (1 << 62) - 1)
ROWS = st.builds(
    ChunkRow,
    NUMBERS,
    st.sampled_from(["txn/a/pack-1", "txn/b/pack-2"]) | st.binary(max_size=5),
    NUMBERS,
    st.integers(0, 1 << 20),
    st.binary(min_size=16, max_size=16),
)
NODES = st.tuples(st.text(max_size=3), st.sampled_from([b"{}", b"[]", b"1"]), st.booleans())


@given(st.lists(st.tuples(NODES, st.lists(ROWS, max_size=5)), max_size=5))
def test_a_short_manifest_is_the_one_of_its_table(
    nodes: list[tuple[tuple[str, bytes, bool], list[ChunkRow]]],
) -> None:
    heads, counts = [head for head, _ in nodes], [len(rows) for _, rows in nodes]
    rows = [row for _, rows in nodes for row in rows]
    assert short_manifest(heads, counts, rows) == Manifest.from_table(heads, counts, ChunkTable.from_rows(rows))


PACKS = st.sampled_from([("",), ("", ""), ("txn/a/pack-1",), ()])
FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "packs": PACKS,
        "inline": st.lists(st.binary(max_size=3), max_size=2).map(tuple),
        "documents": st.lists(st.sampled_from([b"{}", b"[" * 800, b"{" * 600]), max_size=2).map(tuple),
        "paths": st.lists(st.sampled_from(["", "a", "a/b", "b", "a//b", "a/zarr.json"]), max_size=3).map(tuple),
        "document": st.binary(max_size=8) | st.just(b"\0" * 4),
        "replaces_node": st.binary(max_size=2),
        "count": st.integers(0, 3).map(lambda count: count.to_bytes(8, "little")) | st.binary(max_size=16),
        "number": st.lists(st.integers(0, 2), max_size=2).map(lambda n: np.array(n, "<u8").tobytes()),
        "pack": st.lists(st.integers(0, 2), max_size=2).map(lambda n: np.array(n, "<u4").tobytes()),
        "offset": st.sampled_from([b"", b"\0" * 8, b"\xff" * 8, b"\0" * 16]),
        "length": st.lists(st.integers(0, 1 << 21), max_size=2).map(lambda n: np.array(n, "<u8").tobytes()),
        "checks": st.sampled_from([b"", b"\0" * 16, b"\0" * 32]),
        "segment_count": st.sampled_from([b"", b"\0" * 4]),
    },
)


def table_of(manifest: Manifest) -> ChunkTable | None:
    try:
        return manifest.table
    except Corrupt:
        return None


@given(FIELDS)
@example({"pack": b"\1\0\0\0"})
@example({"offset": b"\0" * 7 + b"\x40"})
@example({"length": (1 << 21).to_bytes(8, "little")})
@example({"document": b"\1\0\0\0"})
@example({"documents": (b"[" * 800,)})
@example({"replaces_node": b"\4"})
@example({"count": b"\2" + b"\0" * 7})
@example({"checks": b""})
@example({"paths": ("a//b",)})
@example({"inline": ()})
@example(
    {"paths": ("a", "b"), "document": b"\0" * 8, "replaces_node": b"\0\1", "count": bytes([0] * 8 + [1] + [0] * 7)}
)
def test_the_quick_check_of_a_short_manifest_accepts_nothing_that_the_other_refuses(
    fields: dict[str, Any],
) -> None:
    one = short_manifest([("a", b"{}", 0)], [1], [ChunkRow(1, b"12", 0, 2, bytes(16))])
    forged = msgspec.structs.replace(one, **fields)
    with pytest.MonkeyPatch.context() as patch:
        quick = table_of(forged)
        patch.setattr("tstore.core.format.objects.references.surely_valid_rows", lambda *_: None)
        slow = table_of(msgspec.structs.replace(forged))
        if quick is None or slow is None:
            assert quick is slow
        else:
            assert quick.equals(slow)


class Repeated(World):
    """A clock and tokens that are the same in each run."""

    def __init__(self) -> None:
        self._random = random.Random(1)

    def now(self) -> float:
        return 1e9

    def token(self, size: int) -> str:
        return self._random.randbytes(size).hex()


async def objects(folder: Path) -> dict[str, bytes]:
    """Return all objects of a store after commits of few chunks, except for its marker; records without links."""
    with use_world(Repeated()):
        store = await tstore.open(folder, "x")
        async with store.transaction() as tx:
            for dtype, codecs in (("float64", None), (">i2", None), ("int8", "lossless"), ("float32", "e4m3")):
                await tx.create_array(f"a/{dtype}", (6, 10), dtype, (2, 4), codecs=codecs)
            await tx.create_array("scalar", (), "uint8")
            await tx.create_array("long", (4096,), "uint8", (2048,))
        regions: list[Any] = [np.s_[2:4, 4:8], np.s_[0:2, 0:4], np.s_[0:2, 8:10], np.s_[1, 2], np.s_[3:1:-1, 0:4]]
        for path in (f"a/{dtype}" for dtype in ("float64", ">i2", "int8", "float32")):
            async with store.transaction() as tx:
                array = await tx.array(path)
                await array.write(1)
            for region in regions:
                async with store.transaction() as tx:
                    view = (await tx.array(path))[region]
                    values = np.arange(60).reshape(6, 10)[region]
                    await view.write(np.array(values, array.dtype.newbyteorder("="), order="F"))
        async with store.transaction() as tx:
            await (await tx.array("scalar")).write(3)
            for _ in range(2):  # the second does not fit into the record beside the first and the scalar
                await (await tx.array("long"))[:2048].write(4)
                await (await tx.array("long"))[2048:].write(5)
        assert (await store.verify()).ok
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != "tstore.json")
    objects = {str(path.relative_to(folder)): path.read_bytes() for path in files}
    return {key: linked(data, Link()) if is_record(key) else data for key, data in objects.items()}


async def test_the_short_way_writes_the_bytes_of_the_general_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = await objects(tmp_path / "short")
    monkeypatch.setattr(PackSet, "write_inline", lambda *_: None)
    monkeypatch.setattr("tstore.core.transactions.staged_manifest.SHORT_COLUMN", -1)
    general = await objects(tmp_path / "general")
    assert short == general
    assert any(name.startswith("txn/") for name in short)


async def test_a_small_commit_makes_few_calls_and_no_hops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tstore.core.runtime.concurrency._QUICK", float("inf"))  # on any disk
    store = await tstore.open(tmp_path / "store", "x")
    async with store.transaction() as tx:
        await tx.create_array("a", (1000,), "int64", (1,), sparse=True)

    async def commit(number: int) -> None:
        async with store.transaction() as tx:
            await (await tx.array("a"))[number].write(number)

    for number in range(100):
        await commit(number)
    calls, hops = 0, []

    def count(_: object, event: str, __: object) -> None:
        nonlocal calls
        calls += event == "call"

    monkeypatch.setattr(Workers, "start", lambda self, call: hops.append(call))
    sys.setprofile(count)
    try:
        for number in range(100, 120):  # no root is written meanwhile
            await commit(number)
    finally:
        sys.setprofile(None)
    assert calls / 20 <= MAX_CALLS
    assert not hops


async def test_the_manifest_of_a_small_commit_takes_only_the_quick_check(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, follower = await tstore.open(url), await tstore.open(url)
    async with store.transaction() as tx:
        await tx.create_array("a", (1000,), "int64", (1,), sparse=True)
    assert (await follower.snapshot()).version == 1
    async with store.transaction() as tx:
        array = await tx.array("a")
        await array[3].write(5)
        await array[7].write(6)
    monkeypatch.setattr(references, "check_nodes", lambda *_: pytest.fail("a long check is made"))
    array = await (await follower.snapshot()).array("a")
    assert [int(await array[n].read()) for n in (3, 7, 8)] == [5, 6, 0]


@pytest.mark.parametrize("seed", range(3))
async def test_a_process_that_follows_the_commits_of_others_has_the_tree_that_a_new_one_builds(seed: int) -> None:
    """Commits that only write chunks are applied together, up to one that does more, or that has a root."""
    url, draw = f"memory://{uuid.uuid4()}", random.Random(seed)
    writer, follower = await tstore.open(url, "x"), await tstore.open(url)
    async with writer.transaction() as tx:
        for path in "ab":
            await tx.create_array(path, (40,), "int64", (1,), sparse=True)
    while (version := (await writer.snapshot()).version) < 200:
        for _ in range(draw.randrange(1, 40)):
            action = draw.random()
            async with writer.transaction(move_tag="t" if action < 0.1 else None) as tx:
                if 0.1 < action < 0.2:
                    await (await tx.array("b")).resize((draw.choice([20, 40]),))
                else:
                    array = await tx.array(draw.choice("ab"))
                    await array[draw.randrange(array.shape[0])].write(draw.randrange(1 << 40))
        followed = (await follower.snapshot()).version
        assert followed > version
        tree = await follower.log.reader.tree(followed)
        built = await (await tstore.open(url)).log.reader.tree(followed)
        assert built.differences(tree, nodes=True) == []
        assert tree.root(b"c" * 16).data == built.root(b"c" * 16).data


async def test_following_the_commits_of_others_stays_as_cheap_as_it_was_at_first(tmp_path: Path) -> None:
    """If rows stayed apart in memory, a read would ask the tables of all commits since the array was created."""
    polls = 40
    writer, follower = await tstore.open(tmp_path / "store", "x"), await tstore.open(tmp_path / "store")
    async with writer.transaction() as tx:
        await tx.create_array("a", (10 * polls,), "int64", (1,), sparse=True)
    calls = 0

    def count(_: object, event: str, __: object) -> None:
        nonlocal calls
        calls += event == "call"

    costs = []
    for poll in range(polls):
        for number in range(10 * poll, 10 * poll + 10):
            async with writer.transaction(durability="none") as tx:
                await (await tx.array("a"))[number].write(number + 1)
        before = calls
        sys.setprofile(count)
        try:
            array = await (await follower.snapshot()).array("a")
            values = [int(await array[n].read()) for n in (0, number)]
        finally:
            sys.setprofile(None)
        costs.append(calls - before)
        assert values == [1, number + 1]
    assert sum(costs[-5:]) <= 1.5 * sum(costs[:5])


async def test_reading_after_each_write_of_an_element_costs_no_more_each_time() -> None:
    store = await tstore.open(f"memory://{uuid.uuid4()}")
    calls = 0

    def count(_: object, event: str, __: object) -> None:
        nonlocal calls
        calls += event == "call"

    costs = []
    async with store.transaction() as tx:
        array = await tx.create_array("a", (400,), "int64", (40,), sparse=True)
        for first in range(0, 400, 40):
            before = calls
            sys.setprofile(count)
            try:
                for number in range(first, first + 40):
                    await array[number].write(number + 1)
                    assert await array[number].read() == number + 1
            finally:
                sys.setprofile(None)
            costs.append(calls - before)
    assert np.array_equal(await (await (await store.snapshot()).array("a")).read(), np.arange(400) + 1)
    assert costs[-1] <= 1.5 * costs[0]


async def test_commits_of_others_are_applied_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer, follower = await tstore.open(tmp_path / "store", "x"), await tstore.open(tmp_path / "store")
    async with writer.transaction() as tx:
        await (await tx.create_array("a", (1000,), "int64", (1,), sparse=True))[0].write(7)
    await (await follower.snapshot()).array("a")
    for number in range(1, 6):
        async with writer.transaction(durability="none") as tx:
            await (await tx.array("a"))[number].write(number)
    applied, after = [], Nodes.after

    def counted(self: Nodes, manifests: Sequence[Manifest], *arguments: Any) -> Nodes:
        applied.append(len(manifests))
        return after(self, manifests, *arguments)

    monkeypatch.setattr(Nodes, "after", counted)
    values = await (await (await follower.snapshot()).array("a"))[:6].read()
    assert values.tolist() == [7, *range(1, 6)]
    assert sum(applied) == 5
    assert len(applied) <= 2
