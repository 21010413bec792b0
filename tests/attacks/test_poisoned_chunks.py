"""Chunks whose bytes do not have the checksums of their manifest: a later save would refer to them unread.

A server verifies every chunk that a record adds before it accepts the record: it compares the checksums of blocks
that it has received, and reads all others back.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from msgspec.structs import replace

import tstore
from tests.support.forging import forged
from tests.support.http_server import ADMIN, WRITE, Client, client_of, everybody
from tstore import Keep
from tstore.core.format.arrays.array_metadata import ArrayMeta
from tstore.core.format.checksums import BLOCK, block_checks
from tstore.core.format.layout import commit_key
from tstore.core.format.objects.chunk_refs import ChunkTable
from tstore.core.format.objects.chunk_rows import ChunkRow
from tstore.core.format.objects.records import Record
from tstore.core.format.objects.references import Manifest
from tstore.core.format.tree import validation
from tstore.service.server import Server, chunk_checks

COUNT = 16
VALUES = np.arange(COUNT * 1024, dtype="f4")
META = ArrayMeta.new(VALUES.shape, "f4", (1024,))
CHUNK = 4096
LONG = 3 * BLOCK + 512
LONG_META = ArrayMeta.new((LONG,), "u1", (LONG,))
PACK = "txn/forged/pack-0"


class Place(NamedTuple):
    server: Server
    write: Client
    store: tstore.Store
    pack: str
    """The pack of the honest step 1."""


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[Place]:
    async with Server(tmp_path, access=everybody()) as server, client_of(server, WRITE) as client:
        async with await tstore.open(server.url, storage_options={"token": WRITE}) as store:
            await save(store, VALUES, 1)
            yield Place(server, client, store, str((await rows_of(store))[0].pack))


async def save(store: tstore.Store, values: np.ndarray[Any, Any], step: int) -> None:
    async with store.transaction(tag=f"step/{step}", message="save") as tx:
        array = await tx.create_array("w", values.shape, "f4", (1024,)) if step == 1 else await tx.array("w")
        await array.write(values)


async def rows_of(store: tstore.Store) -> list[ChunkRow]:
    tree = await store.log.reader.tree(await store.log.reader.newest())
    return tree.nodes["w"].chunks.rows


class Reads:
    """Counts the bytes of chunks that the server reads back; pauses before each read, and may time out at one.

    The server remembers the checksums of received packs in `received` bytes.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, pause: float = 0.0, received: int = 0) -> None:
        monkeypatch.setattr(chunk_checks, "_MAX_RECEIVED", received)
        self._sizes: list[int] = []
        self.end = 1 << 62
        """The offset in a pack from which on reads take too long."""
        check = chunk_checks.ChunkChecks._check

        def counted(checks: chunk_checks.ChunkChecks, piece: chunk_checks.Extent) -> None:
            time.sleep(pause)
            if piece.starts[0] >= self.end:
                raise TimeoutError
            self._sizes.append(piece.size)
            check(checks, piece)

        monkeypatch.setattr(chunk_checks.ChunkChecks, "_check", counted)

    def taken(self) -> int:
        """Return the bytes read since the last call."""
        size = sum(self._sizes)
        self._sizes.clear()
        return size


def checks_of(data: bytes) -> bytes:
    return block_checks(memoryview(data))


def honest_rows(pack: str) -> list[ChunkRow]:
    data = VALUES.tobytes()
    parts = [data[i : i + CHUNK] for i in range(0, len(data), CHUNK)]
    return [ChunkRow(n, pack, n * CHUNK, CHUNK, checks_of(part)) for n, part in enumerate(parts)]


def record_of(
    rows: list[ChunkRow], version: int, meta: ArrayMeta = META, path: str = "forged", gc: int = 0
) -> bytes:
    manifest = Manifest.from_nodes([(path, meta.document, True, [ChunkTable.from_rows(rows)])])
    record = Record(
        "forged", version - 1, 1.0, manifests=(manifest,), reused=manifest.reused("forged"), collected=gc
    )
    return forged(record)


async def refusal(place: Place, rows: list[ChunkRow], **fields: Any) -> str:
    version = await place.store.log.reader.newest() + 1
    response = await place.write.create(f"/{commit_key(version)}", record_of(rows, version, **fields))
    assert response.status == 422, (response.status, response.body)
    assert await place.store.log.reader.newest() == version - 1
    return str(json.loads(response.body)["error"])


FORGED: dict[str, Callable[[str], list[ChunkRow]]] = {
    "other bytes in its own pack": lambda honest: honest_rows(PACK),
    "one chunk of another": lambda honest: [replace(honest_rows(honest)[-1], offset=0)],
    "chunks of another in another order": lambda honest: [
        replace(row, offset=(row.number + 1) % COUNT * CHUNK) for row in honest_rows(honest)
    ],
    "chunks of another with other checksums": lambda honest: [
        replace(row, checks=bytes(16)) for row in honest_rows(honest)
    ],
    "a chunk of another with another checksum": lambda honest: [replace(honest_rows(honest)[0], checks=bytes(16))],
    "chunks of another that overlap": lambda honest: [
        replace(row, offset=row.number) for row in honest_rows(honest)
    ],
}


@pytest.mark.parametrize("name", FORGED)
async def test_a_chunk_of_other_bytes_is_refused(place: Place, name: str) -> None:
    """So a save with the values of its checksum finds no such chunk to refer to."""
    assert (await place.write.create(f"/{PACK}", bytes(VALUES.nbytes))).status == 201
    rows = FORGED[name](place.pack)
    for path in ("w", "forged"):
        said = await refusal(place, rows, path=path)
        if "overlap" in name:
            assert "overlap" in said
        else:
            at, pack = (0, PACK) if "own" in name else (0, place.pack)
            assert f"the {CHUNK} bytes at {at} of {pack} do not match their checksum" in said
            assert "write these chunks again" in said
    await save(place.store, VALUES, 2)
    assert np.array_equal(await (await (await place.store.snapshot()).array("w")).read(), VALUES)
    assert (await place.store.verify()).ok


async def test_a_chunk_beyond_the_end_of_its_pack_is_refused(place: Place) -> None:
    rows = honest_rows(place.pack)
    rows[-1] = replace(rows[-1], offset=VALUES.nbytes)
    assert f"{place.pack} has {VALUES.nbytes} bytes, but a chunk in it ends at" in await refusal(place, rows)


@pytest.mark.parametrize("at", [0, BLOCK - 1, 2 * BLOCK, LONG - 1])
async def test_each_block_of_a_long_chunk_is_verified(place: Place, at: int) -> None:
    data = bytearray(np.random.default_rng(0).bytes(LONG))
    row = ChunkRow(0, PACK, 0, LONG, checks_of(bytes(data)))
    data[at] ^= 1
    assert (await place.write.create(f"/{PACK}", bytes(data))).status == 201
    said = await refusal(place, [row], meta=LONG_META)
    start = at // BLOCK * BLOCK
    assert f"the {min(BLOCK, LONG - start)} bytes at {start} of {PACK}" in said
    right = replace(row, checks=checks_of(bytes(data)))
    version = await place.store.log.reader.newest() + 1
    record = record_of([right], version, meta=LONG_META)
    assert (await place.write.create(f"/{commit_key(version)}", record)).status == 201
    assert (await place.store.verify()).ok


async def test_received_blocks_are_not_read_back(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the next collection; a block that begins elsewhere in its pack is read back."""
    read = Reads(monkeypatch, received=1 << 20)
    data = np.random.default_rng(0).bytes(LONG)
    await tstore.save(place.store, {"long": np.frombuffer(data, "u1")}, 2)
    assert read.taken() == 0
    for pack, start in (("txn/a/pack-0", 0), ("txn/b/pack-0", 0), ("txn/c/pack-0", 512)):
        assert (await place.write.create(f"/{pack}", bytes(start) + data)).status == 201
        if "b" in pack:
            async with await tstore.open(place.server.url, storage_options={"token": ADMIN}) as admin:
                await admin.collect(Keep(last=1))
        wrong = bytearray(checks_of(data))
        wrong[-1] ^= 1
        row = ChunkRow(0, pack, start, LONG, bytes(wrong))
        gc = 0 if pack.startswith("txn/a") else 3
        said = await refusal(place, [row], meta=LONG_META, gc=gc)
        assert f"the 512 bytes at {start + 3 * BLOCK} of {pack}" in said
        assert read.taken() == (512 if pack.startswith("txn/a") else LONG)


async def test_a_refused_body_is_not_taken_for_the_pack_of_its_name(place: Place) -> None:
    first, second = (np.random.default_rng(seed).bytes(LONG) for seed in (0, 1))
    bodies = [client_of(place.server, WRITE) for _ in range(2)]
    async with bodies[0] as one, bodies[1] as other:
        responses = await asyncio.gather(*[c.create(f"/{PACK}", b) for c, b in ((one, first), (other, second))])
    assert sorted(response.status for response in responses) == [201, 412]
    refused = first if responses[0].status == 412 else second
    said = await refusal(place, [ChunkRow(0, PACK, 0, LONG, checks_of(refused))], meta=LONG_META)
    assert f"the {BLOCK} bytes at 0 of {PACK}" in said


async def test_chunks_of_the_newest_version_are_not_read_again(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Reads(monkeypatch)
    tree = {str(i): VALUES + i for i in range(5)}
    await tstore.save(place.store, tree, 2)
    assert read.taken() == 5 * VALUES.nbytes
    tree["3"] = tree["3"] + 1
    await tstore.save(place.store, tree, 3)
    assert read.taken() == VALUES.nbytes
    node = (await place.store.log.reader.tree(1)).nodes["w"]
    async with Server(tmp_path, access=everybody()) as other:  # it has checked nothing yet
        async with await tstore.open(other.url, storage_options={"token": WRITE}) as store:
            async with store.transaction() as tx:
                await tx.staging.keep_array("old", node.meta, node.tables, 1)
            assert read.taken() == VALUES.nbytes  # the newest version has no such array
            async with store.transaction() as tx:
                await (await tx.array("old")).resize((2048,))
            assert read.taken() == 0
    assert (await place.store.verify()).ok
    assert np.array_equal((await tstore.restore(place.store, 3))["3"], VALUES + 4)


def positions_of(server: Server) -> dict[bytes, object]:
    return dict(server._app._writes._admission._state.progress._positions)


async def test_a_long_verification_is_continued_by_the_next_request(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server responds before clients give up, does not begin from the start, and remembers no pieces."""
    monkeypatch.setattr(chunk_checks, "_MAX_SECONDS", 0.05)
    read = Reads(monkeypatch, pause=0.02)
    values = np.random.default_rng(0).bytes(40 << 20)
    await tstore.save(place.store, {"w": np.frombuffer(values, "u1")}, 5)
    assert read.taken() == len(values)
    assert len(positions_of(place.server)) == 1
    assert (await place.store.verify()).ok


async def continued(place: Place, rows: list[ChunkRow], meta: ArrayMeta, gc: int) -> str:
    """Send a record until the server has read its chunks; return why it is refused."""
    for _ in range(50):
        version = await place.store.log.reader.newest() + 1
        response = await place.write.create(f"/{commit_key(version)}", record_of(rows, version, meta, gc=gc))
        if response.status != 503:
            assert response.status == 422, response.body
            return str(json.loads(response.body)["error"])
    raise AssertionError("the server still reads")


@pytest.mark.parametrize("between", ["nothing", "another", "collect", "repair"])
async def test_a_verification_begins_again_after_a_collection(
    place: Place, between: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also if a repair voids it: meanwhile the pack could have been deleted and created again."""
    size, count = 4 << 20, 6
    data = np.random.default_rng(0).bytes(size * count)
    rows = [ChunkRow(n, PACK, n * size, size, checks_of(data[n * size :][:size])) for n in range(count)]
    meta = ArrayMeta.new((len(data),), "u1", (size,))
    read = Reads(monkeypatch)
    assert (await place.write.create(f"/{PACK}", data)).status == 201
    await save(place.store, VALUES + 1, 2)
    read.taken()
    read.end = 3 * size
    version = await place.store.log.reader.newest() + 1
    wrong = [*rows[:-1], replace(rows[-1], checks=bytes(64))]
    record = record_of(wrong, version, meta)
    assert (await place.write.create(f"/{commit_key(version)}", record)).status == 503
    before, read.end = read.taken(), len(data)
    assert before == 3 * size
    if between in ("collect", "repair"):
        async with await tstore.open(place.server.url, storage_options={"token": ADMIN}) as admin:
            await admin.collect(Keep(last=1))
    if between == "repair":
        await (await tstore.open(tmp_path)).repair(void_intact=[version])
    if between == "another":
        wrong = [replace(rows[0], checks=bytes(64)), *wrong[1:]]  # so another commit
    at = 0 if between == "another" else (count - 1) * size
    gc = await place.store.log.reader.newest() if between in ("collect", "repair") else 0
    assert f"bytes at {at} of {PACK}" in await continued(place, wrong, meta, gc)
    if between != "another":
        assert read.taken() == len(data) - (before if between == "nothing" else 0)


def test_a_client_with_many_positions_displaces_only_its_own() -> None:
    progress = chunk_checks.CheckProgress()
    piece = chunk_checks.Extent(PACK, *np.zeros((2, 1), "i8"), np.zeros((1, 16), "u1"))
    progress.advance(b"honest", "honest", piece._replace(stops=np.array([7])))
    for number in range(1000):
        progress.advance(b"%d" % number, "greedy", piece._replace(stops=np.array([number])))
    assert progress.position(b"honest") == (PACK, 7)
    assert progress.position(b"999") == (PACK, 999)
    assert progress.position(b"0") == ("", 0)
    progress.advance(b"honest", "other", piece)
    assert progress.position(b"honest") == (PACK, 7)


async def test_many_chunks_are_checked_in_steps(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those at the borders of the steps: known, repeated and overlapping ones."""
    monkeypatch.setattr(validation, "_STEP_ROWS", 3)
    read = Reads(monkeypatch)
    tree = {str(i): VALUES + i for i in range(20)}
    await tstore.save(place.store, tree, 3)
    read.taken()
    for i in (2, 3, 7, 19):
        tree[str(i)] = tree[str(i)] + 50
    await tstore.save(place.store, tree, 4)
    assert read.taken() == 4 * VALUES.nbytes
    assert (await place.write.create(f"/{PACK}", VALUES.tobytes())).status == 201
    for number in range(COUNT):
        rows = honest_rows(PACK)
        rows[number] = replace(rows[number], checks=bytes(16))
        assert f"bytes at {number * CHUNK} of" in await refusal(place, rows)
        rows[number] = replace(rows[number], offset=max(0, number * CHUNK - 1))
        assert ("overlap" if number else "bytes at 0 of") in await refusal(place, rows)
