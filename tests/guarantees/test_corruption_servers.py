"""Corruption is also detected through servers, and the errors name URL, key and chunk."""

from __future__ import annotations

import asyncio
import contextlib
import re
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tstore
from tests.support import gcs
from tstore.core.storage.connect import connect
from tstore.errors import Corrupt, DeadlineExceeded, NotFound, TStoreError
from tstore.lab.simulation.scenario import override_constants
from tstore.service.server import Server

SMALL = 30
"""The number of small arrays, enough for a separate manifest object with this limit on those in records."""
INLINE = 1 << 10
ROOT = 8
TREES: dict[int, dict[str, Any]] = {
    step: {
        "w": np.arange(4e4).reshape(200, 200) + step,
        **{f"p{i}": np.arange(3) + i + step for i in range(SMALL)},
    }
    for step in range(2)
}
Put = Callable[[str, bytes], Awaitable[None]]


@pytest.fixture(autouse=True, scope="module")
def frequent_roots() -> Iterator[None]:
    with override_constants(ROOT_EVERY=ROOT, INLINE_MANIFEST_BYTES=INLINE):
        yield


@pytest.fixture(scope="module")
def good(frequent_roots: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The objects of a store with packs, manifests, a root, the hint, and a pending cooperative transaction."""
    folder = tmp_path_factory.mktemp("good") / "store"

    async def make() -> None:
        async with await tstore.open(folder) as store:
            for step, tree in TREES.items():
                await tstore.save(store, tree, step)
            half = tstore.Shards((4,), "f8", [((slice(0, 2),), np.zeros(2))])
            with pytest.raises(DeadlineExceeded):
                await tstore.save(store, {"x": half}, 7, host=0, hosts=2, attempt="a", timeout=0.01)
            for _ in range(ROOT - len(TREES)):
                async with store.transaction(durability="none"):
                    pass

    asyncio.run(make())
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@contextlib.asynccontextmanager
async def damageable(kind: str, folder: Path) -> AsyncIterator[tuple[dict[str, Any], Put]]:
    """Yield the arguments that open a store on a kind of server, and a function that replaces its objects."""
    async with contextlib.AsyncExitStack() as stack:
        if kind in ("http", "cache"):
            server = await stack.enter_async_context(Server(folder / "store"))
            storage = connect(folder / "store")
            arguments: dict[str, Any] = {"url": server.url}
            if kind == "cache":
                arguments["cache"] = folder / "cache"
        else:
            endpoint = stack.enter_context(gcs.fake_gcs_server(folder))
            options = {"endpoint_url": endpoint}
            arguments = {"url": f"gs://{gcs.new_bucket(endpoint)}/run", "storage_options": options}
            storage = connect(**arguments)
        stack.push_async_callback(storage.close)

        async def put(key: str, data: bytes) -> None:
            await storage.replace(key, data)

        yield arguments, put


def flipped(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 16]) + data[middle + 1 :]


def damaged(key: str, data: bytes) -> list[bytes]:
    """Return an object with a flipped bit; a pack or a manifest also in half, and replaced by a page of HTML.

    Records, roots and the hint are parsed alike from any storage; `test_corruption.py` tests them at many lengths.
    """
    long = "/pack-" in key or "/manifest" in key
    return [flipped(data), *([data[: len(data) // 2], b"<html>log in</html>"] if long else [])]


async def outcome(arguments: dict[str, Any]) -> tuple[list[TStoreError], list[str]]:
    """Return the errors of restoring each step, and the faults that verify finds; wrong values fail the test."""
    errors = []
    async with await tstore.open(mode="r", **arguments) as store:
        for step, tree in TREES.items():
            try:
                restored = await tstore.restore(store, step)
            except TStoreError as error:
                errors.append(error)
            else:
                assert all(np.array_equal(restored[name], values) for name, values in tree.items())
        return errors, (await store.verify()).faults


@pytest.mark.parametrize("kind", ["http", "cache", "gcs"])
async def test_damage_is_named(kind: str, good: dict[str, bytes], tmp_path: Path) -> None:
    async with damageable(kind, tmp_path) as (arguments, put):
        for key, data in good.items():
            await put(key, data)
        assert await outcome(arguments) == ([], [])
        first = f"commits/{1:020d}"
        longest = max((k for k in good if "/pack-" in k), key=lambda k: len(good[k]))
        manifest = next(k for k in good if "/manifest" in k)
        for key in (first, f"roots/{ROOT:020d}", longest, manifest, "latest"):
            for bad in damaged(key, good[key]):
                await put(key, bad)
                errors, faults = await outcome(arguments)
                if key == "latest":
                    assert (errors, faults) == ([], [])
                    continue
                assert any(key in fault and arguments["url"] in fault for fault in faults)
                assert all(isinstance(e, Corrupt) and key in str(e) and arguments["url"] in str(e) for e in errors)
                assert errors or kind == "cache" or key.startswith("roots/")
            await put(key, good[key])
        assert await outcome(arguments) == ([], [])


async def test_a_damaged_fragment_is_reported_to_those_who_need_it(good: dict[str, bytes]) -> None:
    url = f"memory://{uuid.uuid4()}"
    storage = connect(url)
    [fragment] = [key for key in good if "/part-" in key]
    for key, data in good.items():
        await storage.replace(key, flipped(data) if key == fragment else data)
    async with await tstore.open(url) as store:
        [pending] = await store.pending()
        assert (pending.delivered, pending.absent) == ((0,), (1,))
        with pytest.raises(Corrupt, match=re.escape(fragment)):
            await store.finish(pending.transaction)
        with pytest.raises(NotFound, match=re.escape(pending.transaction)):
            await store.finish("step/8")
