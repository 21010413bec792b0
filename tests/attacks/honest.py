"""Honest clients during and after an attack: coroutine functions for child processes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any, NamedTuple

import tstore
from tests.attacks.sample_store import digest_of, tree_of
from tests.support.http_server import ADMIN, READ, WRITE
from tstore.core.store import Store

__all__ = ["Site", "audit", "read_on", "save_once"]


class Site(NamedTuple):
    """The address of a served store."""

    url: str
    ca_file: str | None = None

    async def open(self, token: str, mode: Any = "r") -> Store:
        """Open the store with a token."""
        options = {"token": token} | ({} if self.ca_file is None else {"ca_file": self.ca_file})
        return await tstore.open(self.url, mode, storage_options=options)


async def audit(
    site: Site, values: dict[int, str], commits: dict[int, tuple[str | None, str]], step: int | None
) -> list[str]:
    """Return the faults that honest clients encounter: a reader, `verify`, a gc, and a writer who saves `step`.

    Without a step nothing changes, and the gc is a dry run.
    """
    faults: list[str] = []

    @contextlib.asynccontextmanager
    async def noted(action: str) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(20):
                yield
        except Exception as error:
            faults.append(f"{action}: {type(error).__name__}: {error}"[:300])

    async def look(store: Store) -> None:
        for version, digest in values.items():
            async with noted(f"restore at {version}"):
                if digest_of(await tstore.restore(store, at=version)) != digest:
                    faults.append(f"version {version} has other values")
        async with noted("history"):
            actual = {c.version: (c.tag, c.message) async for c in store.history()}
            changed = [v for v, commit in commits.items() if actual.get(v) != commit]
            if changed:
                faults.append(f"the history has other commits for versions {changed[:5]}")
        async with noted("verify"):
            report = await store.verify()
            faults.extend(f"verify: {fault}"[:300] for fault in report.faults[:3])
        async with noted("transactions"):
            await store.pending()
        async with noted("snapshot"):
            snapshot = await store.snapshot()
            for path in snapshot.paths():
                await snapshot.array(path)
        async with noted("steps"):
            missing = {2, 3} - set(await tstore.steps(store))
            if missing:
                faults.append(f"steps {sorted(missing)} are not listed")

    async with noted("open"):
        async with await site.open(READ) as reader, await site.open(ADMIN, "r+") as admin:
            await look(reader)
            async with noted("gc --dry-run"):
                report = await admin.collect(dry_run=True)
                if report.objects:
                    faults.append(f"gc --dry-run would remove {report.objects} objects")
            if step is None or faults:
                return faults
            async with await site.open(WRITE, "r+") as writer:
                async with noted("save"):
                    await tstore.save(writer, tree_of(step), step)
            async with noted("gc"):
                await admin.collect()
        async with await site.open(READ) as reader:
            await look(reader)
            async with noted("restore of the new step"):
                if digest_of(await tstore.restore(reader, step)) != digest_of(tree_of(step)):
                    faults.append("the saved step has other values")
    return faults


async def read_on(tell: Callable[[Any], None], site: Site, values: dict[int, str], patience: float) -> None:
    """Restore versions forever, every other time over a new connection, and report whether each was correct.

    A read is a whole restore by tstore's client, with its retries. It fails if it takes longer than `patience`
    seconds.
    """
    kept: Store | None = None
    turn = 0
    while True:
        turn += 1
        version = list(values)[turn % len(values)]
        try:
            async with asyncio.timeout(patience):
                if kept is None:
                    kept = await site.open(READ)
                if turn % 2:
                    right = digest_of(await tstore.restore(kept, at=version)) == values[version]
                else:
                    async with await site.open(READ) as fresh:
                        right = digest_of(await tstore.restore(fresh, at=version)) == values[version]
            tell((right, "other values"))
        except Exception as error:
            tell((False, f"{type(error).__name__}: {error}"[:300]))
        await asyncio.sleep(0.02)


async def save_once(site: Site, step: int, size: int) -> None:
    """Save a step of `size` values, and restore it."""
    tree = tree_of(step, size)
    async with await site.open(WRITE, "r+") as store:
        await tstore.save(store, tree, step)
        if digest_of(await tstore.restore(store, step)) != digest_of(tree):
            raise ValueError("the restored values differ from the saved ones")
