"""Gaps in a log that are too long for lost records, because an object lies far above the newest version.

A search for the newest version starts at the hint. So with two objects, a hint and a record with a high number,
a malicious writer can fake a log of 10^18 versions, which whoever reads all versions must notice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tstore.core.format.layout import (
    ARCHIVE_EVERY,
    archive_end,
    archive_versions,
    commit_key,
    is_archive,
    version_of,
)
from tstore.core.log.reader import LogReader
from tstore.core.runtime.concurrency import batched

__all__ = ["Gap", "long_gap"]

_MAX_LOST = 1 << 14  # records that may be missing below the newest version: the content of 32 archives


class Gap(NamedTuple):
    """The missing versions from `first` to `last`; the next one exists."""

    first: int
    last: int

    def message(self, url: str) -> str:
        """Return a sentence about the gap, with advice."""
        return (
            f"{url}: the {self.last - self.first + 1:,} records from {commit_key(self.first)} to "
            f"{commit_key(self.last)} are missing, though version {self.last + 1} exists; if this one is not of "
            "the store, delete it and the hint (latest), else restore the missing records from a copy"
        )


async def long_gap(log: LogReader, newest: int, listed: Sequence[int]) -> Gap | None:
    """Return the first gap below the newest version if more records are missing than can be lost, else None.

    `listed` has the versions whose records have objects of their own. If the storage can't be listed, the last
    version of each archive is probed.
    """
    if newest <= _MAX_LOST:
        return None
    if not log.storage.capabilities.listing:
        return await _probed_gap(log, newest)
    ends = {version_of(key) for key in await log.storage.list("archives/") if is_archive(key)}
    own = [(version, version) for version in listed if archive_end(version) not in ends]
    expected, missing, gap = 1, 0, None
    for start, stop in sorted([*own, *((end - ARCHIVE_EVERY + 1, end) for end in ends)]):
        if expected < start <= newest:
            missing += start - expected
            gap = gap or Gap(expected, start - 1)
        expected = stop + 1
    return gap if missing > _MAX_LOST else None


async def _probed_gap(log: LogReader, newest: int) -> Gap | None:
    absent: list[int] = []
    for ends in batched(range(ARCHIVE_EVERY, newest, ARCHIVE_EVERY)):
        existing = await log.commits.existing(ends)
        absent += [end for end in ends if end not in existing]
        if len(absent) * ARCHIVE_EVERY > _MAX_LOST:
            block = archive_versions(absent[0])
            existing = await log.commits.existing(block)
            return Gap(min(version for version in block if version not in existing), newest - 1)
    return None
