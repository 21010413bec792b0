"""Archives, which contain the records of many consecutive versions, unchanged; pure, no I/O."""

from __future__ import annotations

from typing import Annotated

import msgspec

from tstore.core.format.layout import ARCHIVE_EVERY, commit_key
from tstore.core.format.objects.references import Body, Natural
from tstore.errors import Corrupt

__all__ = ["Archive", "ArchiveEnd"]


class ArchiveEnd(Body, frozen=True):
    """The first field of an archive: all that is decoded where its checksum is checked but no record is needed."""

    end: Natural


class Archive(ArchiveEnd, frozen=True):
    """The bytes of the `ARCHIVE_EVERY` records up to version `end`, a multiple of that number."""

    records: Annotated[tuple[bytes, ...], msgspec.Meta(max_length=ARCHIVE_EVERY)]

    def validate(self) -> None:
        """Raise `Corrupt` unless there are as many records as an archive has."""
        if not self.end or self.end % ARCHIVE_EVERY or len(self.records) != ARCHIVE_EVERY:
            raise Corrupt(
                f"an archive of {len(self.records)} records ends at version {self.end}; expected {ARCHIVE_EVERY} "
                "records up to a multiple of that"
            )

    def record(self, version: int) -> bytes:
        """Return the bytes of the record of a version; raise `Corrupt` if it has other versions."""
        if not self.end - ARCHIVE_EVERY < version <= self.end:
            raise Corrupt(f"an archive up to version {self.end} does not have {commit_key(version)}")
        return self.records[version - self.end - 1]
