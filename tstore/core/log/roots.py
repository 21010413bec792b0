"""Writing the root of a version, from which readers build its tree without the records before it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Set

from tstore.core.format.layout import HINT, parent_root, root_chain, root_key
from tstore.core.format.objects.records import Root
from tstore.core.format.objects.roots import StoredRoot
from tstore.core.format.tree.tree import Tree
from tstore.core.log.reader import LogReader
from tstore.core.runtime.concurrency import batched, together
from tstore.core.storage.base import Storage
from tstore.core.storage.objects import Durability
from tstore.errors import (
    AlreadyExists,
    Corrupt,
    Denied,
    NotFound,
    StorageFull,
    TStoreError,
    UnsupportedFormat,
)

__all__ = [
    "are_usable",
    "create_missing",
    "empty_roots",
    "has_lost_changes",
    "renew_roots",
    "write_root",
]


async def write_root(log: LogReader, version: int) -> None:
    """Write the root of a version and the hint; a failure only costs later readers some requests.

    Also write the roots to which it refers, if one is missing because its writer died.
    """
    try:
        tree = await log.head(version)
        stored = await log.root(tree)
        if not await create_missing(log, filter(tree.nodes.knows, root_chain(stored.root.parent))):
            return
        is_stored = await _create_root(log, stored)
    except TStoreError:
        return
    # the new tree has one chunk table per array, not one per commit; its pages may be those of the root
    if is_stored:
        log.trees.replace(Tree.from_root(stored.root, log.objects.pages, tree))
    with contextlib.suppress(TStoreError):
        await log.storage.replace(HINT, str(version).encode())


async def create_missing(log: LogReader, versions: Iterable[int]) -> bool:
    """Create the roots of versions, in ascending order, that do not exist; return False if one can't be made."""
    versions = list(versions)
    existing = await log.storage.sizes(map(root_key, versions))
    missing = [version for version in versions if root_key(version) not in existing]
    complete = True
    for version in missing:
        try:
            await _create_root(log, await log.root(await log.head(version)))
        except (NotFound, Corrupt, Denied, StorageFull):
            complete = False
    return complete


async def empty_roots(storage: Storage, versions: Iterable[int]) -> None:
    """Replace the roots of versions by empty objects, durably.

    Readers ignore them, and no store can create a root there any more: one that does not know of a repair yet
    would create a root that has voided changes.
    """
    for some in batched(versions):
        await together(lambda version: storage.replace(root_key(version), b""), some)
    await storage.sync()


async def renew_roots(log: LogReader, versions: Iterable[int], needed: Set[int]) -> None:
    """Write the roots of versions in place of empty ones; delete those that are not `needed`.

    A root that can't be made stays empty: it only saves time.
    """
    for version in sorted(versions):
        if version not in needed:
            await log.storage.delete(root_key(version))
            continue
        with contextlib.suppress(NotFound, Corrupt, UnsupportedFormat):
            root = await log.root(await log.head(version))
            await log.storage.replace(root_key(version), root.data)


async def are_usable(log: LogReader, versions: Iterable[int]) -> bool:
    """Return whether the roots of these versions can be read, and are those of their records."""
    for version in versions:
        root = await log.trees.root(version)
        if root is None or not (await log.stored(version)).has_root(root):
            return False
    return True


async def has_lost_changes(storage: Storage, root: Root) -> bool:
    """Return whether an intact root has the only copy of a lost record's changes (`Record.resumes`).

    The root that the void record names may be absent, since a garbage collection deletes those that only expired
    versions need. Then a later one has these changes.
    """
    log, version = LogReader(storage), root.version
    with contextlib.suppress(NotFound, Corrupt, UnsupportedFormat):
        records = log.each_record(range(parent_root(version) + 1, version + 1))
        crossed = any([0 < r.resumes <= version async for _, r in records])
        if crossed and (await log.stored(version)).has_root(root):
            return not await _can_be_made(log, version)
    return False


async def _can_be_made(log: LogReader, version: int) -> bool:
    try:
        await log.head(version)
    except (NotFound, Corrupt, UnsupportedFormat):
        return False
    return True


async def _create_root(log: LogReader, root: StoredRoot) -> bool:
    """Create a root; return False if another store's root is in its place, as a backup may have left it."""
    version = root.root.version
    try:
        await log.storage.create(root_key(version), root.data, Durability.FSYNC)
    except AlreadyExists:
        existing = await log.trees.root(version)
        return existing is not None and existing.record_check == root.root.record_check
    return True
