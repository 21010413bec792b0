"""Metadata objects (records, archives, manifests, fragments and roots) as bytes: msgpack in a frame; pure, no I/O.

`decode` checks all values. `decode_record` checks all but those of inline manifests. `encode` refuses every value
that `decode` would refuse.
"""

from __future__ import annotations

import heapq
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from operator import attrgetter
from typing import Annotated, Any, TypeVar
from uuid import UUID

import msgspec

from tstore.core.format.bounds import (
    COLLECTION_VALUES,
    LIVING_VALUES,
    MANIFEST_NODES,
    MAX_LIVING,
    METADATA_BYTES,
    METADATA_LEVELS,
    METADATA_VALUES,
    RECORD_BYTES,
    RECORD_VALUES,
    child_count,
    msgpack_excess_message,
)
from tstore.core.format.frame import (
    CHAINED,
    COLLECTING,
    COPYING,
    EXTENDING,
    PAGED,
    PLAIN,
    RETAGGING,
    SEGMENTED,
    body_of,
    seal,
    unseal,
)
from tstore.core.format.layout import ARCHIVE_EVERY, commit_key
from tstore.core.format.objects.object_ref import ObjectRef
from tstore.core.format.objects.records import (
    MAX_PARTS_READ,
    Collection,
    Fragment,
    LivingVersion,
    Part,
    Record,
    Root,
)
from tstore.core.format.objects.references import EXTENDS, Body, Manifest, Natural
from tstore.core.format.objects.wellformed import check_documents
from tstore.errors import Corrupt, InvalidArgument

__all__ = [
    "Archive",
    "ArchiveEnd",
    "collection_excess_message",
    "decode",
    "decode_record",
    "encode",
    "max_value_count",
    "memory_of",
]


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


T = TypeVar("T", bound=Body)

_TRAILING_DEFAULTS: dict[int, tuple[Any, ...]] = {18: (0,), 17: ({},), 16: ((),), 15: ((),), 12: (0, (), None)}
"""Trailing fields of a record that are omitted if they have these values, by the index of the first field."""

_NOT_CONVERTED = (bytes, bytearray, memoryview, date, datetime, time, timedelta, Decimal, UUID)
"""Types that msgspec must not convert to or from text when `encode` checks the values of a body."""

_FRAME_KINDS: dict[type[Body], bytes] = {
    Record: b"R",
    Archive: b"A",
    ArchiveEnd: b"A",
    Manifest: b"M",
    Fragment: b"F",
    Root: b"T",
}
_DECODERS: dict[type[Body], Any] = {kind: msgspec.msgpack.Decoder(kind) for kind in _FRAME_KINDS}


def _outline(kind: type[Body], **fields: Any) -> type[msgspec.Struct]:
    """Return a type that decodes only these fields of `kind` and leaves the others raw, to check sizes.

    A field that is absent is decoded as empty.
    """
    raw = (msgspec.Raw, msgspec.Raw(b"\x80"))
    listed = [(name, *((fields[name], ()) if name in fields else raw)) for name in kind.__struct_fields__]
    return msgspec.defstruct(f"{kind.__name__}Outline", listed, array_like=True, tag=kind.__struct_config__.tag)


_PartOutline = _outline(Part)
_OUTLINES: dict[type[Body], type[msgspec.Struct]] = {
    Record: _outline(
        Record,
        parts=Annotated[tuple[_PartOutline, ...], msgspec.Meta(max_length=MAX_PARTS_READ)],  # type: ignore[valid-type]
    ),
    Fragment: _outline(Fragment),
    Manifest: _outline(Manifest),
}
_COLLECTION: Any = msgspec.msgpack.Decoder(_outline(Collection))
_LIVING: Any = msgspec.msgpack.Decoder(_outline(LivingVersion))


_CHANGE_FIELDS = ("tags", "deleted", "manifests", "reused", "parts", "dropped", "tagged")
"""The fields that are empty in the record of a garbage collection."""


def _has_items(field: msgspec.Raw | tuple[Any, ...]) -> bool:
    return bool(child_count(memoryview(field)) if isinstance(field, msgspec.Raw) else field)


_NAME_FIELDS = ("tags", "deleted", "reused", "dropped", "tagged")
"""The lists and maps of names in a record or fragment."""

_SHORT_RECORD = 4 << 10  # bytes of a record whose values are not counted
_SHORT_METADATA = 1 << 10  # bytes of metadata whose keys are not checked before they are decoded
_SHORT_COLLECTION = 1 << 20  # bytes of a collection whose values are not counted: they take at most about 30 MiB
_ASCII = bytes(range(128))
_VALUE_BYTES = 96  # bytes of a string, a number or an empty container in memory


def _metadata(outline: Any) -> list[memoryview]:
    """Return the metadata in the outline of a record or fragment."""
    return [memoryview(holder.metadata) for holder in (outline, *getattr(outline, "parts", ()))]


def _names(outline: Any) -> list[memoryview]:
    """Return the lists and maps of names in the outline of a record or fragment."""
    return [memoryview(getattr(outline, name)) for name in _NAME_FIELDS if hasattr(outline, name)]


def memory_of(data: bytes) -> int:
    """Return about how many bytes the record in a frame takes in memory, without its collection.

    The record may take less: every byte above 0x7f is counted as a value's first byte, but may be inside a value.
    """
    if len(data) <= _SHORT_RECORD:
        return len(data)
    outline: Any = msgspec.msgpack.decode(body_of(data), type=_OUTLINES[Record])
    values = sum(len(bytes(part).translate(None, _ASCII)) for part in (*_names(outline), *_metadata(outline)))
    return len(data) - len(memoryview(outline.collection)) + _VALUE_BYTES * values


def max_value_count(data: bytes) -> int:
    """Return a quick upper bound on the number of a framed record's values, which `RECORD_VALUES` limits."""
    if len(data) <= _SHORT_RECORD:
        return len(data)
    outline = msgspec.msgpack.decode(body_of(data), type=_OUTLINES[Record])
    return sum(map(child_count, _names(outline))) + sum(map(len, _metadata(outline)))  # a value has a byte or more


def collection_excess_message(packed: bytes | memoryview) -> str:
    """Return the message for a msgpack collection that exceeds `COLLECTION_VALUES`, else ""."""
    if len(packed) <= _SHORT_COLLECTION:
        return ""
    collection = _COLLECTION.decode(packed)
    lists = (collection.expired, collection.tags, collection.transactions, collection.objects)
    alive = child_count(memoryview(collection.alive))
    count = LIVING_VALUES * alive + sum(child_count(memoryview(names)) for names in lists)
    largest: list[str] = []
    if alive <= MAX_LIVING and count <= COLLECTION_VALUES:  # with more, `count` exceeds COLLECTION_VALUES already
        values, largest = _count_within_living(collection.alive)
        count += values
    if count <= COLLECTION_VALUES:
        return ""
    versions = f" (the living versions with the most are {', '.join(largest)})" if largest else ""
    return f"more than {COLLECTION_VALUES:,} values{versions}; keep fewer versions, or expire fewer at once"


def _count_within_living(alive: msgspec.Raw) -> tuple[int, list[str]]:
    """Return the number of values in the lists of all living versions, and the three versions with the most.

    Only the lengths of each version's lists are read, one version at a time. Lists nested in these lists are not
    counted: the parser refuses the first of them.
    """
    count = 0
    largest = [(0, b"")] * 3  # the most values, and their versions, as a heap
    for entry in msgspec.msgpack.decode(alive, type=list[msgspec.Raw]):
        living = _LIVING.decode(entry)
        lists = (living.tags, living.metrics, living.dependencies)
        values = sum(child_count(memoryview(names)) for names in lists)
        count += values
        if values > largest[0][0]:
            heapq.heapreplace(largest, (values, bytes(living.version)))
    return count, [str(msgspec.msgpack.decode(version)) for _, version in sorted(largest, reverse=True) if version]


def _check_size(packed: bytes | memoryview, kind: type[Body]) -> None:
    """Raise `Corrupt` if a body has too many bytes, names, living versions or values of metadata to be decoded."""
    if len(packed) <= _SHORT_RECORD or kind not in _OUTLINES:
        return
    outline: Any = msgspec.msgpack.decode(packed, type=_OUTLINES[kind])
    metadata = [] if kind is Manifest else [part for part in _metadata(outline) if len(part) > _SHORT_METADATA]
    for packed_metadata in metadata:
        excess = msgpack_excess_message(packed_metadata, METADATA_VALUES, METADATA_LEVELS)
        if excess or len(packed_metadata) > METADATA_BYTES:
            raise Corrupt(f"the metadata of a commit has {excess or f'{len(packed_metadata):,} bytes'}")
    if len(packed) <= METADATA_VALUES:
        return  # a value has a byte or more, so a body of so few bytes exceeds no bound
    if kind is Manifest:
        longest = max(child_count(memoryview(names)) for names in (outline.paths, outline.documents))
        if longest > MANIFEST_NODES:
            raise Corrupt(f"a manifest without pages has {longest:,} nodes or documents, over {MANIFEST_NODES:,}")
        return
    too_long = kind is Record and len(packed) > RECORD_BYTES
    if too_long and any(map(_has_items, attrgetter(*_CHANGE_FIELDS)(outline))):
        raise Corrupt(
            f"a record has {len(packed):,} bytes; only that of a garbage collection may have more than "
            f"{RECORD_BYTES:,}"
        )
    if excess := collection_excess_message(memoryview(getattr(outline, "collection", b""))):
        raise Corrupt(f"the record of a garbage collection has {excess}")
    name_count = sum(map(child_count, _names(outline)))
    excess = msgpack_excess_message(b"".join(_metadata(outline)), RECORD_VALUES, METADATA_LEVELS, name_count)
    if excess:
        raise Corrupt(f"the names and the metadata of a commit have {excess}")


def _unpack(packed: bytes | memoryview, kind: type[T]) -> T:
    try:
        _check_size(packed, kind)
        body: T = _DECODERS[kind].decode(packed)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError) as error:
        raise Corrupt(f"an object does not parse: {error}") from error
    return body


def _manifests_version(body: Body) -> int:
    """Return the format version that the manifests in a body, and its references to manifests, need."""
    listed = body.manifests if isinstance(body, Record) else (getattr(body, "manifest", body),)
    if isinstance(body, Root) and (body.parent or isinstance(body.manifest, ObjectRef)):
        return CHAINED
    if isinstance(body, Root) and body.base is not None:
        listed = (body.base,)
    return max([_manifest_version(manifest) for manifest in listed], default=PLAIN)


def _manifest_version(manifest: object) -> int:
    """Return the format version that a manifest, or a reference to one, needs."""
    if isinstance(manifest, Manifest):
        extends = max(manifest.replaces_node, default=0) >= EXTENDS
        return EXTENDING if extends else SEGMENTED if manifest.segments else PLAIN
    return PAGED if isinstance(manifest, ObjectRef) and manifest.pages else PLAIN


def encode(body: Body) -> bytes:
    """Return the frame of a body; raise `InvalidArgument` if readers would refuse it.

    A created object can never be replaced. So the types and values of the body are checked as decoding would check
    them, but without decoding the bytes.
    """
    frame_version, fields = PLAIN, None
    if isinstance(body, Record):
        retags = body.dropped or body.tagged
        frame_version = RETAGGING if retags else PLAIN if body.collection is None else COLLECTING
        if body.source:
            frame_version = COPYING
        fields = msgspec.structs.astuple(body)
        for index, defaults in _TRAILING_DEFAULTS.items():
            if fields[index:] != defaults:
                break
            fields = fields[:index]
    try:
        packed = msgspec.msgpack.encode(fields or body)
        _check_size(packed, type(body))
        values = msgspec.to_builtins(body, builtin_types=_NOT_CONVERTED)
        msgspec.convert(values, type(body), builtin_types=_NOT_CONVERTED)  # raises for a wrong type
        body.validate()
        if isinstance(body, Manifest):
            check_documents(body.documents)
        frame_version = max(frame_version, _manifests_version(body))
        return seal(_FRAME_KINDS[type(body)], frame_version, packed)
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError, Corrupt) as error:
        name = type(body).__name__.lower()
        raise InvalidArgument(f"a {name} with these values could not be read again: {error}") from None


def decode(data: bytes, kind: type[T]) -> T:
    """Return the body of a frame; raise `Corrupt`, or `UnsupportedFormat` for the frame of a newer tstore."""
    body = _unpack(unseal(data, _FRAME_KINDS[kind]), kind)
    body.validate()
    return body


def decode_record(data: bytes) -> Record:
    """Return the record in a frame as `decode` does; its inline manifests are checked when they are used."""
    record = _unpack(unseal(data, b"R"), Record)
    record.validate_shallow()
    return record
