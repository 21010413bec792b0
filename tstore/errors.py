"""The errors of tstore, grouped by what the handler does about them.

Every message says what failed, where (URL, path, chunk), what was expected, and what to do.

    TStoreError
    ├── InvalidArgument      mend the call                       (also a ValueError)
    │   ├── StructureMismatch    the target does not fit the checkpoint; lists every path
    │   └── NotFinite            NaN or infinity where a finite value is needed
    ├── Misuse               mend the program's order of calls   (also a RuntimeError)
    ├── NotFound             look elsewhere                      (also a LookupError)
    │   ├── NotAStore            nothing of tstore's is at that URL
    │   └── SnapshotExpired      the version was collected; open a newer one
    ├── AlreadyExists        choose another name
    ├── Conflict             read again, decide again, retry     (lists the paths)
    │   └── SourceCondemned      a gc took chunks that were re-used; repeat, and write them anew
    ├── Inconsistent         the hosts of a group disagree; mend the job
    ├── Corrupt              restore from a copy                 (names path and chunk)
    ├── TimelineChanged      open the store anew; another history stands at its URL
    ├── UnsupportedFormat    install a newer tstore
    ├── Denied               mend permissions
    ├── StorageFull          make room, then repeat; nothing committed was harmed
    ├── Unavailable          try again later
    │   ├── Unreachable          check the address, and that the server runs
    │   ├── Throttled            after `retry_after` seconds, where the server said so
    │   └── DeadlineExceeded     a wait ran out; names the absent hosts   (also a TimeoutError)
    └── CommitOutcomeUnknown ask `store.outcome(txn)` later
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

__all__ = [
    "AlreadyExists",
    "CommitOutcomeUnknown",
    "Conflict",
    "Corrupt",
    "DeadlineExceeded",
    "Denied",
    "Inconsistent",
    "InvalidArgument",
    "Misuse",
    "NotAStore",
    "NotFinite",
    "NotFound",
    "SnapshotExpired",
    "SourceCondemned",
    "StorageFull",
    "StructureMismatch",
    "TStoreError",
    "Throttled",
    "TimelineChanged",
    "Unavailable",
    "Unreachable",
    "UnsupportedFormat",
    "inventory",
    "listed",
    "parsing",
]

_LISTED = 20
_IN_A_LINE = 10


def inventory(noun: str, names: Sequence[str] | Sequence[int]) -> str:
    """Return "its <noun> are: …" with all of the names, or with the last ten of many."""
    which = f"its {noun}" if len(names) <= _IN_A_LINE else f"the last of its {len(names):,} {noun}"
    return f"{which} are: {', '.join(map(str, names[-_IN_A_LINE:])) or 'none'}"


def listed(lines: Sequence[str]) -> str:
    """The lines, one per row and indented, cut after twenty with a count of the rest."""
    shown = [f"\n  {line}" for line in lines[:_LISTED]]
    if len(lines) > _LISTED:
        shown.append(f"\n  … and {len(lines) - _LISTED} more")
    return "".join(shown)


@contextlib.contextmanager
def parsing(what: str) -> Iterator[None]:
    """Make `Corrupt` of what the block raises where a stored document is not of the form that tstore writes."""
    try:
        yield
    except TStoreError:
        raise
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, RecursionError) as error:
        raise Corrupt(f"{what} is not of the form that tstore writes: {error!r:.200}") from error


class TStoreError(Exception):
    """The root of all errors that tstore raises on purpose."""


class InvalidArgument(TStoreError, ValueError):
    """An argument is outside what the call accepts; nothing was changed."""


class StructureMismatch(InvalidArgument):
    """The target of a restore does not fit the checkpoint.

    `missing`, `unexpected` and `mismatched` list every path concerned, not only the first.
    """

    def __init__(
        self, where: str, missing: Sequence[str], unexpected: Sequence[str], mismatched: Sequence[str]
    ) -> None:
        self.missing = list(missing)
        self.unexpected = list(unexpected)
        self.mismatched = list(mismatched)
        lines = [f"missing in the checkpoint: {p}" for p in missing]
        lines += [f"unexpected, not in the target: {p}" for p in unexpected]
        lines += [f"does not fit: {m}" for m in mismatched]
        super().__init__(
            f"the target does not fit {where}: {len(missing)} missing, {len(unexpected)} unexpected, "
            f"{len(mismatched)} of another shape or dtype; restore with a fitting target, without one, "
            f"or with only=…:{listed(lines)}"
        )


class NotFinite(InvalidArgument):
    """NaN or infinity stands where only finite values can be encoded."""


class Misuse(TStoreError, RuntimeError):
    """A call came at the wrong moment, as a write to a snapshot or to a closed transaction."""


class NotFound(TStoreError, LookupError):
    """A version, tag, array, chunk or object is not there."""


class NotAStore(NotFound):
    """The URL holds no tstore store."""


class SnapshotExpired(NotFound):
    """The version was removed by retention while it was being read."""


class AlreadyExists(TStoreError):
    """The name to be created is taken; what stands there was left as it is."""


class Conflict(TStoreError):
    """Another transaction committed a change to the same chunks or metadata first.

    `paths` lists the nodes (or tags) on which the two overlap. Nothing of this transaction is visible.
    """

    def __init__(self, message: str, paths: Sequence[str]) -> None:
        self.paths = list(paths)
        super().__init__(f"{message}:{listed(self.paths)}" if self.paths else message)


class SourceCondemned(Conflict):
    """A gc condemned chunks of an older version that this transaction re-uses; `paths` are their packs."""


class Inconsistent(TStoreError):
    """Fragments of one cooperative transaction contradict each other, or leave chunks out.

    `paths` lists what they contradict each other on. Nothing of the transaction is visible.
    """

    def __init__(self, message: str, paths: Sequence[str]) -> None:
        self.paths = list(paths)
        super().__init__(f"{message}:{listed(self.paths)}" if self.paths else message)


class Corrupt(TStoreError):
    """Stored bytes differ from what was committed (checksum, length or form)."""


class TimelineChanged(TStoreError):
    """The store at the URL was replaced while it was open, as by restoring a backup: what is known of it is void.

    Open it anew.
    """


class UnsupportedFormat(TStoreError):
    """The store was written by a newer tstore, or needs a codec that is not installed."""


class Denied(TStoreError):
    """The backend refused: permissions, a read-only folder, or a store opened with mode="r"."""


class StorageFull(TStoreError):
    """The disk, quota or file-size limit is exhausted; nothing already committed was lost."""


class Unavailable(TStoreError):
    """The backend did not answer, or answered that it can't just now."""


class Unreachable(Unavailable):
    """No connection could be made: the host name is unknown, or nothing listens at that address."""


class Throttled(Unavailable):
    """The backend refuses for now, because of too many requests. `retry_after`: the seconds it named, if any."""

    def __init__(self, message: str, retry_after: float | None = None) -> None:
        self.retry_after = retry_after
        super().__init__(message)


class DeadlineExceeded(Unavailable, TimeoutError):
    """A wait ran out of time. `absent` lists the hosts that had not delivered their fragment."""

    def __init__(self, message: str, absent: Sequence[int] = ()) -> None:
        self.absent = list(absent)
        super().__init__(message)


class CommitOutcomeUnknown(TStoreError):
    """Whether the commit landed could not be learned; nothing was deleted.

    `transaction` is the id to pass to `store.outcome(…)` once the backend answers again.
    """

    def __init__(self, message: str, transaction: str) -> None:
        self.transaction = transaction
        super().__init__(message)
