"""The local store of one host, in the folder of its job on local storage.

`<local>/<uuid of the durable store>/` has a file `place`, which identifies the storage, and a folder for each
store: `<start>-<host>` is that of a host in one start of the job, `<start>-<host>-at-<other>` a copy. So a new
start never writes to what the hosts restore from. It deletes the stores of earlier starts that no longer count
at once, and all others once its hosts have saved enough steps.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from tstore.checkpoint.checkpoint import Checkpoint
from tstore.checkpoint.checkpoint import Saved as Committed
from tstore.checkpoint.job_store import TierStep, steps_in
from tstore.checkpoint.options import CommitSettings
from tstore.core.format.tree.retention import JobKeep
from tstore.core.runtime import world
from tstore.core.runtime.pool import run
from tstore.core.snapshot import Snapshot
from tstore.core.steps import step_tag
from tstore.core.storage.local.store import LocalStorage
from tstore.core.storage.objects import Durability
from tstore.core.store import Store
from tstore.core.store import open as open_store
from tstore.core.tags import drop_steps_after
from tstore.errors import AlreadyExists, TStoreError
from tstore.tiers.holders import METADATA, held_parts, stores_below
from tstore.tiers.objects import Decision, Held, Part, Saved

__all__ = ["LocalTier", "overwriting"]

_log = logging.getLogger("tstore.tiers")


class LocalTier:
    """The local store of a host in one start of the job, and the folder `root` in which it is."""

    def __init__(self, root: str, place: str, job: str, start: str, host: int, keep: int) -> None:
        self.root = root
        self.place = place
        self.start = start
        self._job = job
        self._host = host
        self._keep = keep
        self._store: Store | None = None
        self._count = 0  # of saves

    @staticmethod
    async def open(local: str, job: str, start: str, host: int, keep: int) -> LocalTier:
        """Return the tier, and make its folder; raise `StorageFull`, `Denied` or `Unavailable`."""
        root = os.path.join(local, job)
        storage = LocalStorage(root)
        with contextlib.suppress(AlreadyExists):
            await storage.create("place", world.token(12).encode(), Durability.NONE)
        return LocalTier(
            root, (await storage.get("place")).decode(errors="backslashreplace"), job, start, host, keep
        )

    async def held(self) -> list[Held]:
        """Return the parts of steps that are whole here; read and verify every chunk of each."""
        return await held_parts(self.root, self._job)

    async def begin(self, decision: Decision, held: Iterable[Held]) -> None:
        """Create the store of this start, and drop what the decision has given up."""
        if self._store is not None:
            with contextlib.suppress(TStoreError):
                await drop_steps_after(self._store, decision.step)
            return
        self._store = await open_store(os.path.join(self.root, f"{self.start}-{self._host:05d}"), "a")
        counting = {part.folder for part in held if decision.counts(part.part.saved)}
        await run(self._delete_folders, lambda name: name not in counting)

    def reader(self) -> Store:
        """Return the store, for another event loop."""
        assert self._store is not None
        return Store(self._store.log.storage, self._store.marker, "r")

    async def snapshot(self, version: int) -> Snapshot:
        """Return the snapshot of a version of the store."""
        assert self._store is not None
        return await self._store.snapshot(version)

    async def save(self, checkpoint: Checkpoint, saved: Saved, on_written: Callable[[], None] | None) -> Committed:
        """Commit this host's part of a checkpoint, alone."""
        assert self._store is not None
        part = Part(self._job, saved, checkpoint.host, checkpoint.hosts)
        local = checkpoint._replace(
            hosts=1,
            attempt=None,
            metadata={**checkpoint.metadata, METADATA: msgspec.to_builtins(part)},
            settings=overwriting(checkpoint.settings),
            check_tags=lambda tags: None,
            withdraws=False,
        )
        committed = await local.save(self._store, on_written)
        self._count += 1
        return committed

    async def collect(self, pinned: Iterable[int]) -> None:
        """Drop the steps that newer ones supersede, except pinned ones, and the stores of earlier starts."""
        assert self._store is not None
        try:
            tags = tuple(step_tag(step) for step in pinned)
            await self._store.collect(JobKeep(last=self._keep, tags=tags))
        except TStoreError as error:
            _log.warning("%s: superseded steps were not dropped: %s", self._store.url, error)
        if self._count == self._keep:
            await run(self._delete_folders, lambda name: True)

    async def steps(self) -> list[TierStep]:
        """Return the steps in the stores here: those of hosts, and copies of them."""
        found: list[TierStep] = []
        for folder in await run(stores_below, self.root):
            with contextlib.suppress(TStoreError):  # a folder may vanish
                async with await open_store(folder, "r") as store:
                    _, host, *copied = folder.name.split("-")
                    found += await steps_in(store, "copy" if copied else "local", int(host))
        return found

    async def close(self) -> None:
        """Close the store."""
        if self._store is not None:
            await self._store.close()

    def _delete_folders(self, condemned: Callable[[str], bool]) -> None:
        """Delete the stores of earlier starts whose names are condemned."""
        for path in Path(self.root).iterdir():
            if not path.name.startswith(self.start) and path.is_dir() and condemned(path.name):
                shutil.rmtree(path, ignore_errors=True)


def overwriting(settings: CommitSettings) -> CommitSettings:
    """Return settings that replace a step which a decision has given up."""
    settings = copy.copy(settings)
    settings.overwrite = True
    return settings
