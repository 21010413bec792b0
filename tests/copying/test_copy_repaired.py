"""Copies of repaired histories to a server: their collections name voided versions."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tstore
from tests.support.forging import place
from tests.support.http_server import ADMIN, WRITE, everybody
from tstore import Keep
from tstore.core.format.layout import commit_key
from tstore.core.format.objects.encoding import encode
from tstore.core.format.objects.records import REPAIR, Collection, Record
from tstore.core.tags import set_tag
from tstore.errors import Corrupt, Denied, InvalidArgument
from tstore.service.server import Server

VALUES = np.arange(4000.0)

History = Callable[[str], Awaitable[int]]


async def saved(url: str, *steps: int) -> None:
    """Save steps that share `frozen`, so that each but the first references a pack of another."""
    async with await tstore.open(url) as store:
        for step in steps:
            await tstore.save(store, {"w": VALUES + step, "frozen": VALUES}, step)


async def collected(url: str, keep: Keep) -> int:
    async with await tstore.open(url) as store:
        version = (await store.collect(keep)).version
    assert version is not None
    return version


async def changed(url: str, tag: str, move: str | None = None) -> None:
    """Commit one more array, under a tag, and move another tag."""
    async with await tstore.open(url) as store, store.transaction(tag=tag, move_tag=move) as tx:
        await (await tx.create_array(tag, VALUES.shape, "f8")).write(VALUES)


async def told(url: str) -> dict[int | str, Any]:
    """Return the values of each step, or its error if a voided collection removed them; and the fault count."""
    async with await tstore.open(url) as store:
        said: dict[int | str, Any] = {"faults": len((await store.verify()).faults)}
        for step in await tstore.steps(store):
            try:
                said[step] = (await tstore.restore(store, step))["w"].tobytes()
            except Corrupt as error:
                said[step] = str(error).replace(url, "")
        said["tags"] = {tag: v for tag, v in (await store.tags()).items() if tag != "step/20"}
    return said


async def a_listed_version(url: str) -> int:
    await saved(url, 0, 1, 2, 3)
    await collected(url, Keep(last=2))
    return 3


async def an_expired_version_whose_chunks_are_held(url: str) -> int:
    await saved(url, 0, 1, 2, 3)
    await collected(url, Keep(last=2))
    return 1


async def the_newest_listed_version(url: str) -> int:
    await saved(url, 0, 1, 2, 3)
    return await collected(url, Keep(last=2)) - 1


async def a_version_that_moved_a_tag(url: str) -> int:
    await changed(url, "a", move="best")
    await changed(url, "b", move="best")
    await changed(url, "c")
    await changed(url, "d")
    await collected(url, Keep(tags=("a", "b")))
    return 2


async def an_expired_version_that_moved_a_tag(url: str) -> int:
    await changed(url, "a", move="best")
    await changed(url, "b", move="best")
    await changed(url, "c")
    await collected(url, Keep(tags=("c",)))
    return 2


async def an_expired_version_of_which_later_ones_are_made(url: str) -> int:
    await changed(url, "a")
    await changed(url, "b")
    await collected(url, Keep(tags=("b",)))
    return 1


async def a_collection_followed_by_another(url: str) -> int:
    await saved(url, 0, 1, 2, 3)
    voided = await collected(url, Keep(last=2))
    await saved(url, 4)
    await collected(url, Keep(last=1))
    return voided


async def a_collection_between_two_others(url: str) -> int:
    await saved(url, 0, 1, 2, 3)
    await collected(url, Keep(last=3))
    await saved(url, 4)
    voided = await collected(url, Keep(last=2))
    await saved(url, 5)
    await collected(url, Keep(last=1))
    return voided


async def a_tagged_version(url: str) -> int:
    await saved(url, 0, 1, 2)
    async with await tstore.open(url) as store:
        await set_tag(store, "best", 2)
    return 2


async def a_tagged_version_that_a_collection_lists(url: str) -> int:
    voided = await a_tagged_version(url)
    await collected(url, Keep(tags=("best",)))
    return voided


async def a_collection_that_expired_a_tagged_version(url: str) -> int:
    await a_tagged_version(url)
    return await collected(url, Keep(last=1))


HISTORIES: list[History] = [
    a_tagged_version,
    a_tagged_version_that_a_collection_lists,
    a_collection_that_expired_a_tagged_version,
    a_listed_version,
    an_expired_version_whose_chunks_are_held,
    the_newest_listed_version,
    a_version_that_moved_a_tag,
    an_expired_version_that_moved_a_tag,
    an_expired_version_of_which_later_ones_are_made,
    a_collection_followed_by_another,
    a_collection_between_two_others,
]


@pytest.mark.parametrize("history", HISTORIES)
async def test_a_repaired_history_is_copied_to_a_server(history: History, tmp_path: Path) -> None:
    source, copy = str(tmp_path / "source"), str(tmp_path / "copy")
    voided = await history(source)
    Path(source, commit_key(voided)).write_bytes(b"garbage")
    async with await tstore.open(source) as store:
        assert (await store.repair([voided])).voided == [voided]
    await saved(source, 10)
    async with Server(copy, access=everybody()) as server:
        with pytest.raises(Denied, match="scope admin"):
            await tstore.copy(source, server.url, storage_options={"token": WRITE})
        await tstore.copy(source, server.url, storage_options={"token": ADMIN})
        async with await tstore.open(server.url, storage_options={"token": WRITE}) as store:
            await tstore.save(store, {"w": VALUES}, 20)  # and the copy accepts commits
    assert await told(copy) == {**await told(source), 20: VALUES.tobytes()}


async def test_a_void_record_not_named_by_a_collection_excuses_nothing(tmp_path: Path) -> None:
    """An admin can't expire the newest version with a void record that looks like a repair's."""
    url = str(tmp_path / "store")
    await saved(url, 0, 1)
    void = encode(Record(REPAIR + "x" * 24, 2, 1e9, void=True))
    async with Server(url, access=everybody()) as server:
        options = {"token": ADMIN}
        async with await tstore.open(server.url, storage_options=options) as store:
            await place(store.log.storage, 3, void)
        for collected_by in (0, 3):
            async with await tstore.open(server.url, storage_options=options) as store:
                gone = Collection((), (1, 2), {"step/0": 1, "step/1": 2}, (), ())
                forged = encode(Record("gc-x", 3, 1e9, collection=gone, collected=collected_by))
                with pytest.raises(InvalidArgument, match="expires the head, version 2"):
                    await place(store.log.storage, 4, forged)
                forgetful = encode(
                    Record("gc-x", 3, 1e9, collection=Collection((), (), {}, (), ()), collected=collected_by)
                )
                with pytest.raises(InvalidArgument, match=r"the head, version 2|minus those that it expires"):
                    await place(store.log.storage, 4, forgetful)
    assert await tstore.steps(url) == [0, 1]
