"""The errors of tstore, classified by how to handle them.

Every message says what failed, where (URL, path, chunk), what was expected, and what to do.

    TStoreError
    ├── InvalidArgument      fix the call                        (also a ValueError)
    │   ├── StructureMismatch    the target does not match the checkpoint; lists every path
    │   └── NotFinite            NaN or infinity in values that must be finite
    ├── Misuse               fix the order of calls              (also a RuntimeError)
    ├── NotFound             check the name                      (also a LookupError)
    │   ├── NotAStore            there is no store at the URL
    │   └── SnapshotExpired      garbage collection removed the version; open a newer one
    ├── AlreadyExists        choose another name
    ├── Conflict             read the newest version, and retry  (lists the paths)
    │   └── SourceCondemned      garbage collection condemned reused chunks; retry and write them again
    ├── Inconsistent         the hosts of a job disagree; fix the job
    ├── Corrupt              restore from a copy                 (names what is damaged)
    ├── TimelineChanged      open the store again; it was replaced by one with another history
    ├── UnsupportedFormat    install a newer tstore
    ├── Denied               fix the permissions
    ├── StorageFull          free space, then retry; committed data is not affected
    ├── Unavailable          retry later
    │   ├── Unreachable          check the address, and that the server is running
    │   ├── TemporaryFailure     the server responded, but could not serve the request
    │   │   └── Throttled            retry after `retry_after` seconds, if given
    │   └── DeadlineExceeded     a timeout; names the absent hosts        (also a TimeoutError)
    └── CommitOutcomeUnknown call `commit` again later, or ask `store.outcome(txn)`
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

__all__ = [
    "AlreadyExists",
    "CommitOutcomeUnknown",
    "Conflict",
    "Corrupt",
    "DeadlineExceeded",
    "Denied",
    "Inconsistent",
    "InvalidArgument",
    "InvalidIndex",
    "Misuse",
    "NotAStore",
    "NotFinite",
    "NotFound",
    "SnapshotExpired",
    "SourceCondemned",
    "StorageFull",
    "StructureMismatch",
    "TStoreError",
    "TemporaryFailure",
    "Throttled",
    "TimelineChanged",
    "Unavailable",
    "Unreachable",
    "UnsupportedFormat",
]

_MAX_LINES = 20
_MAX_INLINE = 10


def name_list(noun: str, names: Sequence[str] | Sequence[int]) -> str:
    """Return "its <noun> are: …" with all names, of more than ten "the last of its <count> <noun> are: …"."""
    if not names:
        return f"it has no {noun}"
    subject = f"its {noun}" if len(names) <= _MAX_INLINE else f"the last of its {len(names):,} {noun}"
    return f"{subject} are: {', '.join(map(str, names[-_MAX_INLINE:]))}"


def bullet_list(lines: Sequence[str]) -> str:
    """Format lines as an indented list, with a count in place of those after the first twenty."""
    shown = [f"\n  {line}" for line in lines[:_MAX_LINES]]
    if len(lines) > _MAX_LINES:
        shown.append(f"\n  … and {len(lines) - _MAX_LINES} more")
    return "".join(shown)


@contextlib.contextmanager
def parsing(document: str) -> Iterator[None]:
    """Raise `Corrupt`, naming the document, if the block fails to parse it."""
    try:
        yield
    except TStoreError:
        raise
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, RecursionError) as error:
        raise Corrupt(f"{document} does not have the format that tstore writes: {error!r:.200}") from error


class TStoreError(Exception):
    """The base class of all errors that tstore raises deliberately."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (type(self), self.args), vars(self)


def _unpickled(error_type: type[TStoreError], args: tuple[Any, ...]) -> TStoreError:
    """Return an error without calling its `__init__`, whose parameters are not `args`."""
    error = error_type.__new__(error_type)
    error.args = args
    return error


class InvalidArgument(TStoreError, ValueError):
    """An argument is invalid; nothing was committed."""


class InvalidIndex(InvalidArgument, IndexError):
    """An index does not fit the array: it is out of range, has too many items, or has another type."""


class StructureMismatch(InvalidArgument):
    """The target of a restore does not match the checkpoint.

    The attributes list every path concerned: those `missing` in the checkpoint, those `unexpected` because the
    target lacks them, and those `mismatched` in shape or dtype. `arguments` are those of the restore that the
    message suggests.
    """

    def __init__(
        self,
        checkpoint: str,
        missing: Sequence[str],
        unexpected: Sequence[str],
        mismatched: Sequence[str],
        arguments: Sequence[str] = ("only=…",),
    ) -> None:
        self.missing = list(missing)
        self.unexpected = list(unexpected)
        self.mismatched = list(mismatched)
        self.arguments = list(arguments)
        lines = [f"missing in the checkpoint: {p or 'the whole target, a single value'}" for p in missing]
        lines += [f"unexpected, not in the target: {p}" for p in unexpected]
        lines += [f"does not match: {m}" for m in mismatched]
        super().__init__(
            f"the target does not match {checkpoint}: {len(missing)} missing, {len(unexpected)} unexpected, "
            f"{len(mismatched)} of another shape or dtype; restore with a matching target, without one, "
            f"or with {' or '.join(arguments)}:{bullet_list(lines)}"
        )


class NotFinite(InvalidArgument):
    """Values to be encoded contain NaN or infinity, but the format has only finite values."""


class Misuse(TStoreError, RuntimeError):
    """A call is not permitted in this state, such as a write to a snapshot or to a closed transaction."""


class NotFound(TStoreError, LookupError):
    """A version, tag, array, chunk or object does not exist."""


class NotAStore(NotFound):
    """There is no store at the URL."""


class SnapshotExpired(NotFound):
    """Garbage collection removed the version, possibly while it was being read."""


class AlreadyExists(TStoreError):
    """The store, array, tag or object to be created already exists; it was not changed."""


class Conflict(TStoreError):
    """A concurrent change, usually a commit to the same chunks or metadata, prevents this transaction.

    `paths` lists the nodes or tags that both changes affect, if any, sorted; "" is the root group. This
    transaction has no visible effect.
    """

    def __init__(self, message: str, paths: Iterable[str]) -> None:
        self.paths = sorted(set(paths))
        lines = [path or "the root group" for path in self.paths]
        super().__init__(f"{message}:{bullet_list(lines)}" if lines else message)


class SourceCondemned(Conflict):
    """Garbage collection condemned chunks that this transaction reuses; `paths` lists their packs."""


class Inconsistent(TStoreError):
    """The fragments of a cooperative transaction contradict each other or lack chunks.

    `paths` lists the arrays or objects concerned, if any. The transaction has no visible effect.
    """

    def __init__(self, message: str, paths: Sequence[str]) -> None:
        self.paths = list(paths)
        super().__init__(f"{message}:{bullet_list(self.paths)}" if self.paths else message)


class Corrupt(TStoreError):
    """Stored bytes differ from what was committed (checksum, length or format)."""


class TimelineChanged(TStoreError):
    """The store was replaced while it was open, for example by a restored backup; open it again."""


class UnsupportedFormat(TStoreError):
    """The store or file needs a newer tstore, or a codec or dtype that is not supported or not installed."""


class Denied(TStoreError):
    """The operation is not permitted: permissions, a read-only folder, or a store opened with mode="r"."""


class StorageFull(TStoreError):
    """The disk, quota or file-size limit is exhausted; committed data is not affected."""


class Unavailable(TStoreError):
    """The storage did not respond, or reported a temporary failure."""


class Unreachable(Unavailable):
    """No connection could be made: the host name is unknown, or nothing listens at that address."""


class TemporaryFailure(Unavailable):
    """The storage responded that it can't serve the request now."""


class Throttled(TemporaryFailure):
    """The storage limits the rate of requests; `retry_after` is the delay in seconds that it asked for, if any."""

    def __init__(self, message: str, retry_after: float | None = None) -> None:
        self.retry_after = retry_after
        super().__init__(message)


class DeadlineExceeded(Unavailable, TimeoutError):
    """A wait of this host or of another timed out; `absent` lists the hosts that had not delivered fragments."""

    def __init__(self, message: str, absent: Sequence[int] = ()) -> None:
        self.absent = list(absent)
        super().__init__(message)


class CommitOutcomeUnknown(TStoreError):
    """Whether the commit took effect, or will do so, is unknown; nothing was deleted.

    Once the storage responds again, call `commit` of the transaction again: it returns the version, if the commit
    took effect, and otherwise commits. Or pass `transaction`, the id, to `store.outcome(…)`.
    """

    def __init__(self, message: str, transaction: str) -> None:
        self.transaction = transaction
        super().__init__(message)
