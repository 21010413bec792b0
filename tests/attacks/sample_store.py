"""A store with known contents, copies of which are attacked."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import tstore
from tstore import Keep
from tstore.errors import TStoreError

__all__ = ["NEXT_ROOT", "SampleStore", "digest_of", "tree_of"]

NEXT_ROOT = 64
_NEWEST = NEXT_ROOT - 3


def tree_of(step: int, size: int = 100_000) -> dict[str, Any]:
    """Return the tree of a step, which depends only on the step."""
    values = np.random.default_rng(step).standard_normal(size).astype("f4")
    return {"w": values.reshape(-1, 100), "b": [np.arange(9) + step, step]}


def digest_of(tree: Any) -> str:
    """Return a digest of the values of a tree."""
    return hashlib.sha256(b"".join(_parts(tree))).hexdigest()


def _parts(tree: Any) -> list[bytes]:
    if isinstance(tree, dict):
        return [part for key in sorted(tree) for part in [key.encode(), *_parts(tree[key])]]
    if isinstance(tree, (list, tuple)):
        return [part for item in tree for part in _parts(item)]
    values = np.asarray(tree)
    return [f"{values.dtype}{values.shape}".encode(), values.tobytes()]


class SampleStore(NamedTuple):
    """A store in a folder, and its contents."""

    folder: Path
    newest: int
    values: dict[int, str]
    """The digests of the trees of some versions."""
    commits: dict[int, tuple[str | None, str]]
    """The tag and message of each living version."""
    expired: tuple[str, ...]
    """The transactions of expired versions."""

    @staticmethod
    async def make(folder: Path) -> SampleStore:
        """Make a store with saves, a gc, many small commits, and an incomplete cooperative transaction."""
        async with await tstore.open(folder) as store:
            for step in range(4):
                await tstore.save(store, tree_of(step), step, metrics={"loss": 1 / (step + 1)}, durability="none")
            expired = tuple([(await store.log.reader.record(v)).transaction for v in (1,)])
            await store.collect(Keep(last=3))
            async with store.transaction(tag="many", durability="none") as tx:
                for i in range(150):
                    await (await tx.create_array(f"many/{i}", (64,), "f4", (4,))).write(np.full(64, i))
            version = await store.log.reader.newest()
            while version < _NEWEST:
                async with store.transaction(f"commit {version}", durability="none") as tx:
                    pass
                version = await store.log.reader.newest()
            tx = store.transaction(name="half", host=1, hosts=2, attempt="a", tag="half")
            await (await tx.create_array("half", (8,), "f4", (4,)))[4:].write(np.ones(4))
            with suppress(TStoreError):  # the other host is absent
                await tx.commit(timeout=0.01)
            values = {}
            for version in (2, 3, 4, 6, _NEWEST):
                values[version] = digest_of(await tstore.restore(store, at=version))
            commits = {c.version: (c.tag, c.message) async for c in store.history()}
        return SampleStore(folder, _NEWEST, values, commits, expired)
