"""Records and manifests: what the store's metadata objects hold, and their bytes; pure, no I/O.

Every metadata object is one frame:

    b"tstore"      6 bytes
    kind           1 byte    R record, M manifest, F fragment, T root (a whole tree)
    version        1 byte    of the format: 1; 2 of a record with a collection, 3 of one that drops tags: of these
                             an older tstore would miss what they mean for others
    body           msgpack
    check          16 bytes  xxh3-128, big-endian, of all bytes before it

A manifest is columnar: one row per chunk over all arrays of one writer, so that a million chunks are six
buffers and not a million objects. Columns are little-endian.
"""

from __future__ import annotations

import datetime
import functools
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec
import numpy as np

from tstore.chunks.table import CHECK_SIZE, ChunkTable, Span, as_checks, column, digest, gather
from tstore.errors import Corrupt, InvalidArgument, UnsupportedFormat
from tstore.layout import is_written

__all__ = [
    "INLINE_MANIFEST",
    "Alive",
    "Collection",
    "Fragment",
    "Manifest",
    "ObjectRef",
    "Part",
    "Record",
    "Root",
    "Stored",
    "check_of",
    "date_of",
    "decode",
    "encode",
    "reference",
]
INLINE_MANIFEST = 16 << 10
"""A manifest of up to so many bytes travels in the record or fragment that refers to it."""

_MAGIC = b"tstore"
_VERSION, _COLLECTING, _DROPPING = 1, 2, 3  # of which an older tstore would miss what others mean for it
_HEADER = len(_MAGIC) + 2

Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
"""A version, a host, or the length of an object."""

T = TypeVar("T", bound="_Body")


class _Body(msgspec.Struct, array_like=True, frozen=True):
    """What can stand in a frame."""


class ObjectRef(_Body, tag="object", frozen=True):
    """Where a metadata object lies and what its bytes must be."""

    key: str
    length: Count
    check: bytes

    def is_to(self, data: bytes) -> bool:
        """Whether these bytes have the length and the checksum that it names."""
        return len(data) == self.length and check_of(data) == self.check


class Manifest(_Body, tag="manifest", dict=True, frozen=True):
    """The nodes one writer touched and the chunks it wrote, as columns.

    `packs[i]` is the key of a pack, or "" for one small enough to travel here: the next of `inline`.
    Node i has the path `paths[i]`, the metadata `documents[document[i]]`, and the next `count[i]` rows of
    the chunk columns. `fresh[i]` tells that its metadata was created or changed: then its rows are all the
    chunks it has; otherwise they overlay those of earlier commits.
    """

    packs: tuple[str, ...]
    inline: tuple[bytes, ...]
    documents: tuple[bytes, ...]
    paths: tuple[str, ...]
    document: bytes  # u32
    fresh: bytes  # u8
    count: bytes  # u64
    index: bytes  # u64, the chunk's C-order number in its grid
    pack: bytes  # u32
    offset: bytes  # u64
    length: bytes  # u64
    checks: bytes  # 16 bytes per block

    @functools.cached_property
    def table(self) -> ChunkTable:
        """All chunk rows; raises `Corrupt` where columns and node counts do not fit each other."""
        carried = iter(self.inline)
        if self.packs.count("") != len(self.inline):
            raise Corrupt("a manifest does not hold the packs that should travel in it")
        table = ChunkTable(
            tuple(key or next(carried) for key in self.packs),
            column(self.index, "<u8"),
            column(self.pack, "<u4"),
            column(self.offset, "<u8"),
            column(self.length, "<u8"),
            as_checks(self.checks),
        )
        table.validate()
        if not all(map(is_written, filter(None, self.packs))):
            raise Corrupt("a manifest refers to a pack whose name no transaction gives")
        n, counts = len(self.paths), column(self.count, "<u8")
        fits = len(self.document) == 4 * n and len(self.fresh) == n and len(self.count) == 8 * n
        if not fits or counts.max(initial=0) > len(table) or int(counts.sum()) != len(table):
            raise Corrupt("the columns of a manifest do not fit each other")
        if n and int(column(self.document, "<u4").max()) >= len(self.documents):
            raise Corrupt("a manifest refers to a metadata document that it does not hold")
        return table

    def nodes(self) -> list[tuple[str, bytes, bool, Span]]:
        """Per node: path, document, fresh, and its rows."""
        table = self.table
        counts = column(self.count, "<u8")
        stops = np.cumsum(counts).tolist()
        rows = zip(
            self.paths, column(self.document, "<u4").tolist(), self.fresh, stops, counts.tolist(), strict=True
        )
        return [(path, self.documents[d], bool(f), Span(table, stop - n, stop)) for path, d, f, stop, n in rows]

    def reused(self, transaction: str) -> tuple[str, ...]:
        """The packs that it refers to and another transaction wrote."""
        own = f"txn/{transaction}/"
        return tuple(key for key in self.packs if key and not key.startswith(own))

    @staticmethod
    def of(nodes: Sequence[tuple[str, bytes, bool, Sequence[Span]]]) -> Manifest:
        """The manifest of these nodes: path, document, fresh, and their chunks (later spans overlay)."""
        documents: dict[bytes, int] = {}
        numbers = [documents.setdefault(document, len(documents)) for _, document, _, _ in nodes]
        table, counts = gather([spans for *_, spans in nodes])
        return Manifest(
            packs=tuple(p if isinstance(p, str) else "" for p in table.packs),
            inline=tuple(p for p in table.packs if isinstance(p, bytes)),
            documents=tuple(documents),
            paths=tuple(path for path, *_ in nodes),
            document=np.array(numbers, "<u4").tobytes(),
            fresh=bytes(fresh for _, _, fresh, _ in nodes),
            count=counts.astype("<u8").tobytes(),
            index=table.index.tobytes(),
            pack=table.pack.tobytes(),
            offset=table.offset.tobytes(),
            length=table.length.tobytes(),
            checks=table.checks.tobytes(),
        )


class Part(_Body, frozen=True):
    """One of several transactions that were committed as one record, as far as the record does not tell it."""

    transaction: str
    time: float
    message: str
    tags: tuple[str, ...]
    bytes_added: int
    facts: dict[str, Any]


class Alive(_Body, frozen=True):
    """What garbage collection must know of a version that lives.

    `replaces` tells that nothing older than itself and `holds` is part of it. `holds` are the objects of other
    transactions that the version needs, as far as no older version that lives wrote or holds them.
    """

    version: Count
    transaction: str
    time: float
    tags: tuple[str, ...]
    replaces: bool
    metrics: dict[str, float]
    holds: tuple[str, ...]


class Collection(_Body, dict=True, frozen=True):
    """What a gc decided: the versions that live after it, and what it condemned.

    `expired` are the versions that lived until then, `tags` those that named them. `transactions` are condemned
    with all their objects, `objects` one by one. A condemned object may be deleted once the record stands; a
    transaction that is condemned or re-uses a condemned pack can't be committed any more.
    """

    alive: tuple[Alive, ...]
    expired: tuple[Count, ...]
    tags: dict[str, Count]
    transactions: tuple[str, ...]
    objects: tuple[str, ...]

    @functools.cached_property
    def versions(self) -> frozenset[int]:
        """The versions that live."""
        return frozenset(a.version for a in self.alive)


class Record(_Body, frozen=True):
    """One commit. Its bytes depend on the version it becomes only where a gc came between.

    `replaces` tells that the tree consists of this commit's nodes alone. A void record (`void`) changes
    nothing: it was created to decide that a late request for its number can no longer land. `durable` tells
    that it and every commit before it survive a power failure. `collected` is the version of the newest gc before
    it, 0 for none; `reused` are the packs of other transactions that its manifests refer to. A record with a
    `collection` is a gc's, and changes nothing but tags. `parts` are the transactions that it is made of, where
    there are several; then its own id is no transaction's. The tags `dropped` name no version any more.
    """

    transaction: str
    base: Count
    time: float
    message: str = ""
    tags: tuple[str, ...] = ()
    replaces: bool = False
    deleted: tuple[str, ...] = ()
    manifests: tuple[ObjectRef | Manifest, ...] = ()
    bytes_added: int = 0
    void: bool = False
    facts: dict[str, Any] = {}
    durable: bool = True
    collected: Count = 0
    reused: tuple[str, ...] = ()
    collection: Collection | None = None
    parts: tuple[Part, ...] = ()
    dropped: tuple[str, ...] = ()

    @property
    def transactions(self) -> tuple[str, ...]:
        """The ids of all transactions that it commits."""
        return tuple(part.transaction for part in self.parts) if self.parts else (self.transaction,)

    def commits(self, transaction: str) -> bool:
        """Whether it is the commit of that transaction, or of several with that one among them."""
        return transaction == self.transaction or transaction in self.transactions


class Stored(NamedTuple):
    """A record, and the checksum that its bytes end in."""

    record: Record
    check: bytes


_LATER = {16: ((),), 15: ((),), 12: (0, (), None)}
"""Defaults of the fields that records of older stores do not have, by how many are before; left out at the end."""


class Fragment(_Body, frozen=True):
    """What one host of a cooperative transaction contributes."""

    transaction: str
    host: Count
    hosts: Count
    base: Count
    message: str
    tags: tuple[str, ...]
    replaces: bool
    deleted: tuple[str, ...]
    manifest: ObjectRef | Manifest
    bytes_added: int
    structure: bytes
    facts: dict[str, Any] = {}
    durable: bool = True


class Root(_Body, frozen=True):
    """The whole tree and all tags as of one version; `record` is the checksum of the record of that version."""

    version: Count
    record: bytes
    tags: dict[str, Count]
    manifest: Manifest


_KINDS: dict[type[_Body], bytes] = {Record: b"R", Manifest: b"M", Fragment: b"F", Root: b"T"}


def encode(body: _Body) -> bytes:
    """Return the frame of a record, manifest, fragment or root.

    An object that is created cannot be taken back, so what was encoded is parsed here: `InvalidArgument` where it
    could not be read again.
    """
    version, fields = _VERSION, None
    if isinstance(body, Record):
        version = _DROPPING if body.dropped else _VERSION if body.collection is None else _COLLECTING
        fields = msgspec.structs.astuple(body)
        for before, later in _LATER.items():
            if fields[before:] != later:
                break
            fields = fields[:before]
    try:
        packed = msgspec.msgpack.encode(fields or body)
        msgspec.msgpack.decode(packed, type=type(body))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:  # msgspec's errors are ValueErrors
        name = type(body).__name__.lower()
        raise InvalidArgument(
            f"a {name} with these values could not be read again, nothing was written: {error}"
        ) from None
    data = _MAGIC + _KINDS[type(body)] + bytes([version]) + packed
    return data + digest(data)


def decode(data: bytes, kind: type[T]) -> T:
    """The body of a frame; `Corrupt` where a bit is wrong, `UnsupportedFormat` where it is newer."""
    if data[: len(_MAGIC)] != _MAGIC or len(data) < _HEADER + CHECK_SIZE:
        raise Corrupt(f"expected an object of tstore, found {len(data)} bytes that begin with {data[:8]!r}")
    if digest(memoryview(data)[:-CHECK_SIZE]) != data[-CHECK_SIZE:]:
        raise Corrupt(f"the checksum of an object of {len(data)} bytes does not match: bits have changed")
    found, version = data[len(_MAGIC) : len(_MAGIC) + 1], data[len(_MAGIC) + 1]
    if version > _DROPPING:
        raise UnsupportedFormat(
            f"an object has format version {version}; this tstore reads up to {_DROPPING}: install a newer one"
        )
    if found != _KINDS[kind]:
        raise Corrupt(f"expected an object of kind {_KINDS[kind].decode()}, found {found!r}")
    try:
        return msgspec.msgpack.decode(memoryview(data)[_HEADER:-CHECK_SIZE], type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Corrupt(f"an object does not parse: {error}") from error


def date_of(time: float) -> datetime.datetime:
    """Return the date of a record's time, the nearest where its writer's clock was beyond the calendar."""
    try:
        return datetime.datetime.fromtimestamp(time, datetime.UTC)
    except (ValueError, OverflowError, OSError):
        nearest = datetime.datetime.max if time > 0 else datetime.datetime.min
        return nearest.replace(tzinfo=datetime.UTC)


def check_of(data: bytes) -> bytes:
    """Return the checksum that a frame ends in, which is not compared with its bytes here."""
    return data[-CHECK_SIZE:]


def reference(key: str, data: bytes) -> ObjectRef:
    """The reference by which another object names these bytes."""
    return ObjectRef(key, len(data), check_of(data))
