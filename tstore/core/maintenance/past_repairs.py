"""Past repairs in the records of a log: which have not ended, and which were undone.

A repair replaces records by void ones, and then commits a record that lists these versions (`repair`). If no
record lists a void version, its repair was interrupted, or its commit was lost or voided. If a listed version has
a record that is not void, a backup has probably restored it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Container, Iterable, Set

from tstore.core.format.layout import commit_key, is_object, version_of
from tstore.core.format.objects.records import Record
from tstore.core.log.reader import LogReader
from tstore.core.maintenance.replay import UNREADABLE
from tstore.core.runtime.concurrency import batched
from tstore.errors import Corrupt

__all__ = ["PastRepairs", "check_repairs_ended", "interrupted_message"]


class PastRepairs:
    """The repairs that the records added so far show."""

    def __init__(self, log: LogReader) -> None:
        self._log = log
        self._void: set[int] = set()  # by repairs
        self._listed: dict[int, int] = {}  # by version, the commit of the last repair that lists it as void

    @staticmethod
    async def up_to(log: LogReader, newest: int, without: Container[int] = ()) -> PastRepairs:
        """Return the repairs shown by all readable records up to a version.

        Commits of repairs in `without` do not count: they are to be voided.
        """
        repairs = PastRepairs(log)
        for batch in batched(range(1, newest + 1)):
            for version, short in zip(batch, await log.records.short_records(batch), strict=True):
                with contextlib.suppress(*UNREADABLE):
                    record = await log.record(version) if short is None else short.record
                    if record.was_voided or version not in without:
                        repairs.add(version, record)
        return repairs

    def add(self, version: int, record: Record) -> None:
        """Add the record of a version."""
        if record.was_voided:
            self._void.add(version)
        self._listed |= {voided: version for voided in record.voids if 0 < voided < version}

    @property
    def unlisted(self) -> list[int]:
        """The void versions that no repair's commit lists, in order."""
        return sorted(self._void - self._listed.keys())

    @property
    def ended(self) -> Set[int]:
        """The void versions that a repair's commit lists."""
        return self._void & self._listed.keys()

    async def restored(self) -> dict[int, str]:
        """Return the listed versions that have a record again, with a sentence about each."""
        restored = {}
        for version in sorted(self._listed.keys() - self._void):
            with contextlib.suppress(*UNREADABLE):
                if not (await self._log.record(version)).void:
                    restored[version] = (
                        f"{self._log.storage.url}: {commit_key(version)} is a record again, though the repair in "
                        f"version {self._listed[version]} voided that version, so it was probably restored from a "
                        f"backup made before; `tstore repair --void-intact {version}` voids it again"
                    )
        return restored


def interrupted_message(url: str, version: int) -> str:
    """Return a sentence about a void version that no repair's commit lists."""
    return (
        f"{url}: the repair that voided version {version} has not ended; if it was interrupted, finish it with "
        f"`tstore repair --void {version}`"
    )


async def check_repairs_ended(log: LogReader, alive: Iterable[int]) -> None:
    """Raise `Corrupt` if a version that counts as living is void: the repair that voided it has not ended.

    Raise `TimelineChanged` if this process has read the version before it was voided.
    """
    replaced = {version_of(key) for key in await log.storage.list("damaged/") if is_object(key)}
    for version in sorted(replaced.intersection(alive)):
        if (await log.anew().record(version)).void:
            if (cached := log.records.cached(version)) is not None and not cached.record.void:
                await log.records.refetch(version, cached.check)
            raise Corrupt(f"{interrupted_message(log.storage.url, version)}. Nothing was collected")
