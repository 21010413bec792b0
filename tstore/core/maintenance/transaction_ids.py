"""The ids of all transactions in a log, to detect duplicates from a record that was copied over another.

Hosts that use an attempt again may commit its id once more, once the version that it had become has expired. They
begin above that version, since a writer finds its own transaction above the base.

Only verification looks for these. Readers do not refuse them: a client of a server that commits an id again must
not make the store unreadable.
"""

from __future__ import annotations

import secrets
from array import array

import numpy as np
import xxhash

from tstore.core.format.layout import commit_key
from tstore.core.format.objects.records import Record
from tstore.core.log.reader import LogReader

__all__ = ["TransactionIds"]


class TransactionIds:
    """The ids of the transactions in records, each as a 64-bit hash with its version."""

    def __init__(self) -> None:
        self._digests = array("Q")
        self._versions = array("Q")
        self._salt = secrets.randbits(63)

    def add(self, version: int, record: Record) -> None:
        """Add the transactions that the record of a version commits."""
        for transaction in _ids(record):
            self._digests.append(xxhash.xxh3_64_intdigest(transaction.encode(), self._salt))
            self._versions.append(version)

    async def faults(self, log: LogReader) -> list[str]:
        """Return a sentence for each version that commits a transaction of an earlier one; read both again."""
        digests = np.array(self._digests, np.uint64)
        order = np.argsort(digests, kind="stable")
        same = np.flatnonzero(np.diff(digests[order]) == 0)
        positions = np.concatenate([order[same], order[same + 1]]).tolist()
        versions = sorted({self._versions[position] for position in positions})
        last: dict[str, int] = {}
        faults = []
        async for version, record in log.each_record(versions):
            ids = _ids(record)
            if repeated := {t for t in ids if record.base < last.get(t, 0)}:
                transaction = min(repeated)
                faults.append(
                    f"{log.storage.url}: {commit_key(version)} commits the transaction {transaction}, as "
                    f"{commit_key(last[transaction])} does, so one of them is in the place of another record; "
                    "restore both from a copy of the store"
                )
            last |= dict.fromkeys(ids, version)
        return faults


def _ids(record: Record) -> set[str]:
    return set() if record.void else {record.transaction, *record.transactions}
