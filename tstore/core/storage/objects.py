"""The terms of the storage interface: keys, buffers, durability, capabilities, entries of listings, and errors."""

from __future__ import annotations

import enum
import errno
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

from tstore.core.format.arguments import quote
from tstore.core.format.bounds import max_size_from_head
from tstore.core.runtime.pool import WORKERS
from tstore.errors import AlreadyExists, Corrupt, Denied, InvalidArgument, NotFound, StorageFull, Unavailable

__all__ = [
    "MAX_KEY_BYTES",
    "MAX_OBJECT_BYTES",
    "SHORT_OBJECT",
    "BufferStream",
    "Buffers",
    "Capabilities",
    "Durability",
    "Entry",
    "Keys",
    "Page",
    "PutMode",
    "Traffic",
    "Tuning",
    "checked_durability",
    "checked_key",
    "mapped_errors",
    "overlong",
    "prefixes_above",
    "raise_mapped",
    "read_limit",
    "too_short",
]

Buffers = Sequence[Any]
"""C-contiguous byte buffers."""

BufferStream = Iterable[Any]
"""Buffers that all stay valid, or an iterator, whose current buffer is valid until the next one is drawn."""

Keys = list[str]

MAX_KEY_BYTES = 1024
"""The maximum length of a key in bytes of UTF-8, as on S3 and GCS."""

MAX_OBJECT_BYTES = 256 << 20
"""The maximum size of an object that is read whole, unless its key implies another maximum (`format.bounds`)."""

SHORT_OBJECT = 1 << 20
"""The maximum size of an object that is read together with others; longer ones are read one at a time."""


def read_limit(key: str, max_size: int | None = None, head: bytes | bytearray = b"") -> int:
    """Return the maximum number of bytes to read of an object: `max_size`, or the bound of its key if tighter.

    Without `max_size` the maximum is the bound of the key, or `MAX_OBJECT_BYTES` if the key has none. The start of
    the object (`head`), if known, makes the bound of a record tighter.
    """
    limit = max_size_from_head(key, head)
    if max_size is None:
        return MAX_OBJECT_BYTES if limit is None else limit
    return max_size if limit is None else min(max_size, limit)


def overlong(label: str, max_size: int) -> Corrupt:
    """Return the error for an object (`label`) that is longer than its bound."""
    return Corrupt(
        f"{label} is longer than {max_size} bytes, more than an object of its kind can have; restore it from a "
        "copy of the store (for a record, run tstore repair), and find out what replaced it"
    )


def too_short(label: str, offset: int, end: int, total: int | None = None) -> Corrupt:
    """Return the error for an object (`label`) that ends before the end of the requested range."""
    after = "" if total is None else f" after {total} bytes"
    return Corrupt(
        f"{label}: expected bytes {offset} to {end}, but the object is cut short{after}; restore it from a copy "
        "of the store"
    )


def checked_key(key: str, url: str) -> str:
    """Return the key; raise `InvalidArgument` unless it is a relative path that every storage accepts."""
    if "\0" in key or "//" in (path := f"/{key}/") or "/." in path:
        raise InvalidArgument(
            f"{key!r} is not a valid object name in {url}: expected parts joined by '/', none of them empty or "
            "starting with a dot"
        )
    try:
        length = len(key.encode())
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"{key!r} is not a valid object name in {url}: it is not UTF-8") from error
    if length > MAX_KEY_BYTES:
        raise InvalidArgument(
            f"{key[:40]!r}… is not a valid object name in {url}: it is too long, {length} bytes; expected at "
            f"most {MAX_KEY_BYTES}"
        )
    return key


def prefixes_above(prefix: str) -> Iterator[str]:
    """Yield the shorter prefixes of a prefix that ends in "/", longest first: of "a/b/", these are "a/" and ""."""
    while prefix:
        prefix = prefix[: prefix.rfind("/", 0, -1) + 1]
        yield prefix


class Durability(enum.Enum):
    """What an acknowledged write survives."""

    FSYNC = "fsync"
    """The write survives a power failure."""
    NONE = "none"
    """The write survives the end of the process, but not a power failure; for benchmarks and scratch data."""


def checked_durability(value: Any) -> Durability:
    """Return the `Durability` with this value; raise `InvalidArgument` for any other value."""
    try:
        return Durability(value)
    except ValueError:
        raise InvalidArgument(f"durability={quote(value)}: expected 'fsync' or 'none'") from None


class PutMode(enum.Enum):
    """What `Storage.put` does if the key exists."""

    CREATE = "create"
    """Raise `AlreadyExists`; exactly one of any number of racing writers wins."""
    REPLACE = "replace"
    """Replace the object."""


class Capabilities(NamedTuple):
    """What a storage can do; a store checks a capability before it relies on it."""

    conditional_create: bool
    """A create has exactly one winner among racing writers in any process."""
    listing: bool
    """Objects can be listed by prefix."""
    ranges: bool
    """Part of an object can be read without the rest."""
    durable: bool
    """An acknowledged write with `Durability.FSYNC` survives a crash of the process or the machine."""
    folders: bool = False
    """A folder remains when its last object is deleted; `delete` of its key removes it."""
    native_io: bool = False
    """The storage implements writers, readers, uploads, listings and `flush`; those of `Storage` are not used."""


class Tuning(NamedTuple):
    """How to schedule reads of packs."""

    streams: int
    """The number of concurrent reads."""
    batch: int
    """The bytes of a read that covers many neighbouring chunks."""
    piece: int
    """The bytes of a read of one part of a long chunk that needs no decoding."""
    gap: int
    """The longest gap between two chunks, in bytes, that costs less to read than a second request would."""

    @property
    def latency_bound(self) -> bool:
        """Whether requests mostly wait for a server, so that many at once take no longer than a single request."""
        return self.streams > WORKERS


class Entry(NamedTuple):
    """An object's key and metadata."""

    key: str
    size: int
    age: float | None = None
    """Seconds since it was written, by the storage's clock; None if unknown."""


class Page(NamedTuple):
    """One page of a listing, in key order."""

    entries: list[Entry]
    folders: list[str]
    """With `delimiter="/"`: the common prefixes of deeper keys, each ending in `/`."""


class Traffic(NamedTuple):
    """Requests made since a store was opened, and the object bytes they carried.

    `requests` and `failed` count by operation: "get", "read", "head", "create", "replace", "list" (each page),
    "delete", "enclosing" (once for a new store), "sync" and "sweep". Every attempt counts. A request has failed
    unless it returned its result, or showed that the object is missing or already exists.
    """

    requests: dict[str, int]
    failed: dict[str, int]
    bytes_read: int
    bytes_written: int


# a context manager made from a generator takes three times as long
class mapped_errors:
    """Map an OSError in the block to an error of `Storage` whose message says what to do."""

    __slots__ = ("_action", "_path")

    def __init__(self, action: str, path: str) -> None:
        self._action = action
        self._path = path

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError):
            raise_mapped(self._action, self._path, error)


def raise_mapped(action: str, path: str, error: OSError) -> NoReturn:
    """Raise the error that `mapped_errors` does."""
    failure = f"can't {action} {path}: {error.strerror or error}"
    match error.errno:
        case errno.ENOTDIR:
            raise NotFound(
                f"{failure}: there is a file at that path or in place of a folder above it; pass another path"
            ) from error
        case errno.ENOENT if action in ("create", "write"):
            raise NotFound(f"{failure}; pass a path in a folder that exists") from error
        case errno.ENOENT:
            raise NotFound(f"{failure}; pass a path that exists") from error
        case errno.EEXIST:
            raise AlreadyExists(f"{failure}; choose another name") from error
        case errno.ENXIO:
            failure = f"can't {action} {path}: it is not a regular file"
            raise Corrupt(f"{failure}; restore it from a copy of the store") from error
        case errno.EISDIR | errno.ENAMETOOLONG | errno.ELOOP:
            raise InvalidArgument(f"{failure}; pass another path") from error
        case errno.EACCES | errno.EPERM | errno.EROFS:
            raise Denied(f"{failure}; check the owner, the permissions and whether it is read-only") from error
        case errno.ENOSPC | errno.EDQUOT | errno.EFBIG:
            raise StorageFull(f"{failure}; free space or raise the limit, then repeat") from error
        case errno.EMFILE | errno.ENFILE:
            raise Unavailable(f"{failure}; raise the limit of open files (ulimit -n)") from error
        case _:
            raise Unavailable(f"{failure}; try again, or check the disk") from error
