"""Archiving: move the records of old versions into archives, many in each.

1. Begin with the list of the objects of records, which the collection has made to look for gaps. They belong to
   versions that are not archived yet, or were archived by the last collection (step 2). So the cost follows these,
   not the whole history.
2. Delete the objects of versions whose archive existed before this collection. The archive has all of these
   records; an object that a stalled writer created next to it is not a commit (`log.commits`). But keep all if
   some are of another history than the archive, as in two copies that were merged (`foreign_archive`). First make
   the archives durable: a collection that was killed may have left one that is not.
3. Create an archive for every other block of `ARCHIVE_EVERY` versions that ends at least `ROOT_EVERY` versions
   before the newest, if each of its records can be read. Leave their objects to the next collection, so that
   requests under way still find them. The next collection also continues one that was killed, or failed.

The records of a block are not archived if one is damaged, or if they are too long for one archive. A repair that
voids a record of a block that may be archived creates the archive itself (`void_records`).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Container, Sequence

from tstore.core.format.bounds import ARCHIVE_BYTES
from tstore.core.format.frame import check_of, link_of, unseal
from tstore.core.format.layout import (
    ARCHIVE_EVERY,
    ROOT_EVERY,
    archive_end,
    archive_key,
    archive_versions,
    commit_key,
)
from tstore.core.format.objects.encoding import Archive, encode
from tstore.core.log.commits import CommitObjects
from tstore.core.log.reader import LogReader
from tstore.core.log.records import Chain
from tstore.core.runtime.concurrency import batched, together
from tstore.core.runtime.pool import run
from tstore.core.storage.objects import Durability
from tstore.errors import AlreadyExists, Corrupt, InvalidArgument, NotFound, StorageFull, UnsupportedFormat

__all__ = ["archive_records", "foreign_archive", "may_be_archived"]


def may_be_archived(version: int, newest: int) -> bool:
    """Return whether a garbage collection may archive the record of a version while `newest` is the newest."""
    return archive_end(version) + ROOT_EVERY <= newest


async def archive_records(log: LogReader, newest: int, listed: Sequence[int]) -> None:
    """Archive the records of old versions by the steps at the top of this file.

    `newest` is a version that exists; `listed` has those whose records have objects of their own.
    Raise `Denied` or `Unavailable`.
    """
    blocks: dict[int, list[int]] = {}  # by their last version
    for version in listed:
        if may_be_archived(version, newest):
            blocks.setdefault(archive_end(version), []).append(version)
    archived = await log.storage.sizes(map(archive_key, blocks))
    if archived:
        await log.storage.flush("archives", Durability.FSYNC)
    own = set(listed)
    for end, versions in blocks.items():
        if archive_key(end) in archived:
            await _delete(log, end, versions, own)
        elif len(versions) == ARCHIVE_EVERY:
            await _archive(log, end)


async def foreign_archive(log: LogReader, end: int, listed: Container[int]) -> str:
    """Return why an archive and the record objects next to it are of different histories; "" if they are not.

    The record after those of the archive names the checksum of the archive's last one. And an object beside the
    archive is that of a stalled writer, unless its link names a record that is not in the log. `listed` has the
    versions whose records have objects of their own.
    """
    commits = CommitObjects(log.storage)  # new, so that it reads from the storage
    beside = [version for version in range(end - ARCHIVE_EVERY + 1, end + 2) if version in listed]
    with contextlib.suppress(Corrupt, NotFound, UnsupportedFormat):  # reported elsewhere
        if not beside or await commits.archive(end) is None:
            return ""
        for versions in batched(beside):
            own = await together(functools.partial(_own, log), versions)
            for version, data in zip(versions, own, strict=True):
                if not data or (version <= end and await commits.get(version) == data):
                    continue
                link = link_of(data)
                if not 0 < link.version <= end:
                    continue
                named = await commits.get(link.version)
                if link.check not in (check_of(named), *log.objects.decode_record(link.version, named).replaced):
                    return (
                        f"{log.storage.url}: {archive_key(end)} has records of another history of the store than "
                        f"{commit_key(version)}, as if one came from a copy that has diverged; move that away. "
                        "Delete the archive if all of its records have objects of their own"
                    )
    return ""


async def _own(log: LogReader, version: int) -> bytes:
    """Return the object of a record, empty if it can't be read."""
    with contextlib.suppress(Corrupt, NotFound, UnsupportedFormat):
        data = await log.storage.get(commit_key(version))
        unseal(data, b"R")
        return data
    return b""


async def _delete(log: LogReader, end: int, versions: Sequence[int], own: Container[int]) -> None:
    """Delete the objects of records that are in an archive, unless this can't be read or is foreign."""
    try:
        archive = await CommitObjects(log.storage).archive(end)  # new, so that it reads from the storage
    except (Corrupt, UnsupportedFormat):
        return
    if archive is not None and not await foreign_archive(log, end, own):  # the size may have been stale
        await together(log.storage.delete, map(commit_key, versions))


async def _archive(log: LogReader, end: int) -> None:
    """Create the archive of a block, unless a record of it is damaged or missing, or all are too long together."""
    records: list[bytes] = []
    size, durable, chain = 0, True, Chain(log.records.chain.log_id)
    for versions in batched(archive_versions(end)):
        try:
            found = await together(lambda version: log.storage.get(commit_key(version)), versions)
            for version, data in zip(versions, found, strict=True):
                record = log.objects.decode_record(version, data)
                chain.add(version, record, data)
                durable = record.durable
        except (Corrupt, NotFound, UnsupportedFormat):
            return
        records += found
        if (size := size + sum(map(len, found))) > ARCHIVE_BYTES:
            return
    if not durable:
        await log.storage.sync()  # a durable record requires durable data
    try:
        data = await run(encode, Archive(end, tuple(records)))
        await log.storage.create(archive_key(end), data, Durability.FSYNC)
    except (AlreadyExists, InvalidArgument, StorageFull):
        return  # another collection was faster, the records are too long, or the storage is full
