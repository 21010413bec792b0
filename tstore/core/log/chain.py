"""The chain of records: whether each record is in its place, in the history of one store.

The bytes of a record do not depend on its version, so a writer that lost a race for a number need not write and
fsync them again. But each has a link: the id of the log, and the version and checksum of the newest record that
its writer had validated it against when it made the bytes (`frame.Link`). The rules are:
1. The link of version N refers to a version from the newest one with a root below N, 64 * ((N - 1) // 64), up to
   N - 1. A writer whose attempts pass a version with a root makes its bytes again.
2. A reader begins at a root, which has the checksum of its version's record, and reads all records after it. So it
   knows all records to which these may refer, and checks every link without a further request.
3. A record that was copied over another number of the same block of 64 is noticed because its bytes are there
   twice, or because later links refer to those that it replaced; in another block, by rule 1.
4. A record that a repair put in the place of a voided one lists the checksums by which later links may refer to
   it.
5. A root that continues an earlier one names the checksum of the record of that version.

A link may refer to any record of its block, so one check passes: the writer of the record had read only versions
that the other history has too. This takes a writer that was about to commit when the histories parted.
"""

from __future__ import annotations

from typing import Any
from uuid import UUID

from tstore.core.format.frame import NO_RECORD, Link, check_of, link_of
from tstore.core.format.layout import commit_key, first_link
from tstore.core.format.objects.records import Record
from tstore.errors import Corrupt

__all__ = ["Chain", "OtherHistory"]

_MAX_CHECKS = 1024
_NOTHING: dict[bytes, int] = {}
_TWO_HISTORIES = "the store has records of two histories (diverged copies that were merged?)"


class OtherHistory(Corrupt):
    """A record refers to another record than the one of that version, so it is of another history of the store."""


class Chain:
    """The checksums of records, as read and as links name them, with which further records are compared.

    `log_id` is the id of the log, None for that of the first record added. Threads may share a chain.
    """

    def __init__(self, log_id: bytes | None = None) -> None:
        self.log_id = log_id
        self._accepted: dict[int, tuple[bytes, ...]] = {}  # by version, what links to it may name
        self._named: dict[int, dict[bytes, int]] = {}  # by version, what links to it do name, and where
        self._versions: dict[bytes, int] = {}  # by checksum

    def add(self, version: int, record: Record, data: bytes) -> None:
        """Add the record of a version; raise what `check` raises, and then add nothing."""
        check = check_of(data)
        if self._versions.get(check) == version:
            return
        try:
            link, accepted = self.check(version, record, data)
        except OtherHistory:
            self._accepted.setdefault(version, ())  # what refers to it is of that history too
            raise
        self.log_id = link.log_id
        self.append(version, check, accepted)
        if (named := self._named.get(link.version)) is None:
            named = self._named[link.version] = {}
        named[link.check] = version

    def append(self, version: int, check: bytes, accepted: tuple[bytes, ...] = ()) -> None:
        """Add the record of a version, unchecked; links may refer to it by the checksums `accepted`, if any."""
        self._accepted[version] = accepted or (check,)
        self._versions[check] = version
        if len(self._versions) > _MAX_CHECKS or len(self._named) > _MAX_CHECKS:
            self._forget_oldest()

    def check(self, version: int, record: Record, data: bytes) -> tuple[Link, tuple[bytes, ...]]:
        """Return the link of a record, and the checksums by which links may refer to it.

        Raise `Corrupt` unless the record may be that of a version of this log.
        """
        check, link = check_of(data), link_of(data)
        accepted = (check, *record.replaced) if record.void else (check,)
        if self.log_id is not None and link.log_id != self.log_id:
            raise Corrupt(f"it is a record of another store, whose log has the id {UUID(bytes=link.log_id)}")
        first = first_link(version)
        if not first <= link.version < version:
            raise Corrupt(
                f"it is the record of another version: it refers to version {link.version}; expected one from "
                f"{first} to {version - 1}"
            )
        if (other := self._versions.get(check, version)) != version:
            raise Corrupt(f"it equals {commit_key(other)}, so one of them is in the place of another record")
        for named, later in list(self._named.get(version, _NOTHING).items()):
            if named not in accepted:
                raise Corrupt(
                    f"{commit_key(later)} follows another record {version} than this one: {_TWO_HISTORIES}"
                )
        if not self.agrees(link.version, link.check):
            raise OtherHistory(
                f"it follows another {commit_key(link.version)} than the one here: {_TWO_HISTORIES}"
            )
        return link, accepted

    def agrees(self, version: int, check: bytes) -> bool:
        """Return whether the record of a version may have a checksum, as far as is known."""
        return check in self._accepted.get(version, (check if version else NO_RECORD,))

    def forget(self, version: int) -> None:
        """Forget what is known of the record of a version, which a repair has replaced."""
        for check in self._accepted.pop(version, ()):
            self._versions.pop(check, None)
        self._named.pop(version, None)

    def _forget_oldest(self) -> None:
        tables: tuple[dict[Any, Any], ...] = self._accepted, self._named, self._versions
        for known in tables:
            for oldest in list(known)[: len(known) - _MAX_CHECKS // 2]:
                known.pop(oldest, None)
