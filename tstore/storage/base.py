"""What a backend must be able to do: a small protocol over bytes by key.

Keys are relative, `/`-separated, and never `..`. Objects are immutable: `create` makes a new one or raises
`AlreadyExists`; `hint` alone may replace what stands there. Control calls are awaited. Packs carry the bulk
of the data; their writers and readers are blocking and called from the pool's threads, so that the event loop
is not crossed for each chunk.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from tstore.errors import Corrupt, InvalidArgument
from tstore.format.bounds import longest_of
from tstore.runtime.pool import WORKERS

__all__ = [
    "LONGEST",
    "LONGEST_KEY",
    "SHORT",
    "TOGETHER",
    "Backend",
    "BufferStream",
    "Buffers",
    "Capabilities",
    "Durability",
    "Keys",
    "Leading",
    "Offer",
    "PackReader",
    "PackWriter",
    "Transfer",
    "bound",
    "checked_key",
    "overlong",
]

Buffers = Sequence[Any]
"""Objects with the buffer protocol, C-contiguous, of bytes."""

BufferStream = Iterable[Any]
"""`Buffers`, all of them valid at once, or an iterator, each of whose buffers is valid until the next is drawn."""

Keys = list[str]

LONGEST_KEY = 1024
"""Bytes of a key, as on S3 and GCS."""

LONGEST = 256 << 20
"""Bytes of the longest object that is read whole where its name tells of no bound (`bounds`)."""

SHORT = 1 << 20
"""Bytes of an object of which many are read whole at once; longer ones are read one after the other."""

TOGETHER = 32 << 20
"""Bytes of the objects that `leading` reads together, beside the last of them."""


def bound(key: str, most: int | None = None, head: bytes | bytearray = b"") -> int:
    """Return the most bytes to read of an object: no more than its kind has, nor than the caller says.

    `head` is how it begins, as far as that is known.
    """
    kind = longest_of(key, head)
    if most is None:
        return LONGEST if kind is None else kind
    return most if kind is None else min(most, kind)


def overlong(where: str, most: int) -> Corrupt:
    """The error for an object that is longer than any of its kind."""
    return Corrupt(
        f"{where} is longer than {most} bytes, more than an object of its kind has, and was not read further; "
        "restore it from a copy of the store (for a record see tstore repair), and find out what put this in its "
        "place"
    )


def checked_key(key: str, where: str) -> str:
    """The key itself; `InvalidArgument` where it is no relative name, or one that a backend keeps for itself."""
    if "\0" in key or any(part == "" or part.startswith(".") for part in key.split("/")):
        raise InvalidArgument(
            f"{key!r} is not the name of an object in {where}: expected names joined by '/', none of them empty "
            "or with a dot in front"
        )
    try:
        length = len(key.encode())
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"{key!r} is not the name of an object in {where}: it is no UTF-8") from error
    if length > LONGEST_KEY:
        raise InvalidArgument(
            f"{key[:40]!r}… is not the name of an object in {where}: it is too long, {length} bytes; expected at "
            f"most {LONGEST_KEY}"
        )
    return key


class Durability(enum.Enum):
    """What an acknowledged write survives."""

    FSYNC = "fsync"
    """A power failure."""
    NONE = "none"
    """The end of the process, not of the machine's power: for benchmarks and scratch."""


def checked_durability(value: Any) -> Durability:
    """Return the durability that a caller names; `InvalidArgument` for any other value."""
    try:
        return Durability(value)
    except ValueError:
        raise InvalidArgument(f"durability {value!r}: expected 'fsync' or 'none'") from None


class Capabilities(NamedTuple):
    """What a backend really has; a store asks before it relies on one."""

    conditional_create: bool
    """`create` has exactly one winner among racing writers, in any process."""
    listing: bool
    ranges: bool
    """Parts of an object are read without the rest of it."""
    durable: bool
    """An answered write with `Durability.FSYNC` survives the end of process and machine."""


class Transfer(NamedTuple):
    """How a backend is read best."""

    streams: int
    """Reads under way at the same time."""
    batch: int
    """Bytes of one read, where as many that lie together are wanted."""
    piece: int
    """Bytes of one read of a longer stretch that goes to its place as it is stored."""
    gap: int
    """Bytes between what is wanted that are rather read too than left out by another read."""

    @property
    def waits(self) -> bool:
        """Whether requests mostly wait for a server, so that many at once take no longer than one."""
        return self.streams > WORKERS


class Leading(NamedTuple):
    """What stands under the first of many names, up to the first that is free."""

    objects: list[bytes]
    broken: bool
    """Whether something stands under the name right behind the free one."""
    cut: bool = False
    """Whether they are long, so that there may be more under the next names."""


class Offer(Protocol):
    """Bytes that are to become one object, under one of several names: others may take a name first."""

    async def create(self, key: str) -> None:
        """Makes the object, as `Backend.create` does; after `AlreadyExists` another name can be tried."""

    async def withdraw(self) -> None:
        """Gives back what was prepared for an object that was not made. Called at the end of each offer."""


class PackWriter(Protocol):
    """An object that is written in positioned pieces, by one thread at a time, and then finished."""

    key: str

    def reserve(self, size: int) -> None:
        """Prepares room for that many more bytes; `StorageFull` where there is none."""

    def append(self, buffers: BufferStream, size: int) -> int | None:
        """Append the buffers (`size` bytes in all) and return their offset.

        Return None, and draw nothing, where the object is full: finish it and begin another.
        """

    def finish(self) -> None:
        """Ends the object; no more can be appended. It is complete once its folder has been settled."""

    def discard(self) -> None:
        """Gives the object up; what was written may be deleted."""


class PackReader(Protocol):
    """Positioned reads of one object."""

    def read_into(self, offset: int, buffers: Buffers, size: int) -> None:
        """Fills the buffers (`size` bytes in all) from `offset`; `Corrupt` where the object is shorter.

        `NotFound` where it is gone.
        """


class Backend(Protocol):
    """Bytes by key under one URL."""

    @property
    def url(self) -> str:
        """Where they are, without any secret."""

    @property
    def capabilities(self) -> Capabilities:
        """What it has, as far as that is known yet."""

    @property
    def transfer(self) -> Transfer:
        """How its packs are read best."""

    async def get(self, key: str, most: int | None = None) -> bytes:
        """The whole object; `NotFound`.

        `Corrupt` where it is longer than `most` bytes, or than its kind ever is (`bound`); no more are received.
        """

    async def size(self, key: str) -> int | None:
        """The object's length in bytes, None where it does not exist."""

    async def create(self, key: str, data: bytes, durability: Durability) -> None:
        """Makes the object, all of it or nothing; `AlreadyExists` where the key is taken.

        `CommitOutcomeUnknown` is never raised here: a backend whose reply was lost raises `Unavailable`,
        and the caller reads back.
        """

    async def leading(self, keys: Iterable[str]) -> Leading:
        """The objects of the first keys, up to the first that does not exist; `broken` only if the next does.

        They are two at least, if there are, and `cut` once they have more than `TOGETHER` bytes. `Corrupt`.
        """

    def offer(self, data: bytes, durability: Durability) -> Offer:
        """A new object that has no name yet; what each try needs alike is done once."""

    async def hint(self, key: str, data: bytes) -> None:
        """Puts the object in place of whatever stands there; its loss must cost nothing."""

    async def empty(self) -> bool:
        """Whether nothing at all lies under the URL."""

    async def list(self, prefix: str) -> Keys:
        """The keys that begin with the prefix, sorted."""

    async def folders(self, prefix: str) -> Keys:
        """The names, or rests of names, that stand in front of the next `/` behind the prefix, sorted."""

    async def age(self, prefix: str) -> float | None:
        """Seconds since an object below the folder `prefix` was last written, by the store's clock.

        None where nothing is there.
        """

    async def delete(self, key: str) -> None:
        """Removes the object, or a folder in which no object is left; no error where it does not exist."""

    async def settle(self, prefix: str, durability: Durability) -> None:
        """Returns when all finished packs under the folder `prefix` are complete, and durable if asked.

        Raises what went wrong with one of them.
        """

    async def flush(self) -> None:
        """Makes durable all that any process has written here before, whatever its durability."""

    async def sweep(self) -> None:
        """Removes what creates left beside the objects that ended long ago before they had made theirs."""

    def writer(self, key: str, durability: Durability) -> PackWriter:
        """A writer of the new object `key`. Blocking."""

    def upload(self, key: str, size: int, durability: Durability) -> PackWriter:
        """A writer of the new object `key` of `size` bytes, which appears whole when it is finished, or never.

        Finishing raises `AlreadyExists` where the key is taken by then. Blocking.
        """

    def reader(self, key: str) -> PackReader:
        """A reader of the object; `NotFound`, if not here then from its first read. Blocking."""

    async def close(self) -> None:
        """Releases what is held open."""
