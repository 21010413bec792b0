"""Metadata objects to bytes and back: each record, manifest, fragment and root is one frame around msgpack.

What is decoded is checked (`records`), and what readers would refuse is not encoded.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from tstore.errors import Corrupt, InvalidArgument
from tstore.format.bounds import METADATA_BYTES, METADATA_LEVELS, METADATA_VALUES, packed_excess
from tstore.format.collection_size import collection_excess
from tstore.format.frame import COLLECTING, DROPPING, PLAIN, SHORTEST, sealed, unsealed
from tstore.format.records import Fragment, Part, Record, Root
from tstore.format.references import Body, Manifest

__all__ = ["decode", "decode_record", "encode", "framed", "size_of"]

T = TypeVar("T", bound=Body)

_LATER = {16: ((),), 15: ((),), 12: (0, (), None)}
"""Fields at the end of a record that most do not use, by how many are before: left out where they are empty."""

_KINDS: dict[type[Body], bytes] = {Record: b"R", Manifest: b"M", Fragment: b"F", Root: b"T"}


def _outline(kind: type[Body], **fields: Any) -> type[msgspec.Struct]:
    """Return a form of a body in which all is left undecoded but these fields, which are empty where left out."""
    raw = (msgspec.Raw, msgspec.Raw(b"\x80"))
    listed = [(name, *((fields[name], ()) if name in fields else raw)) for name in kind.__struct_fields__]
    return msgspec.defstruct(f"{kind.__name__}Outline", listed, array_like=True)


_PartOutline = _outline(Part)
_OUTLINES: dict[type[Body], type[msgspec.Struct]] = {
    Record: _outline(Record, parts=tuple[_PartOutline, ...]),  # type: ignore[valid-type]
    Fragment: _outline(Fragment),
}


def _unpacked(packed: bytes | memoryview, kind: type[T]) -> T:
    """Return the body in msgpack; `Corrupt`. What may hold anything is measured before it is decoded."""
    try:
        if len(packed) > METADATA_VALUES and kind in _OUTLINES:
            outline = msgspec.msgpack.decode(packed, type=_OUTLINES[kind])
            if excess := collection_excess(memoryview(getattr(outline, "collection", b""))):
                raise Corrupt(f"a garbage collection has {excess}")
            for holder in (outline, *getattr(outline, "parts", ())):
                metadata = memoryview(holder.metadata)
                excess = packed_excess(metadata, METADATA_VALUES, METADATA_LEVELS)
                if excess or len(metadata) > METADATA_BYTES:
                    raise Corrupt(f"the metadata of a commit have {excess or f'{len(metadata):,} bytes'}")
        return msgspec.msgpack.decode(packed, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError) as error:
        raise Corrupt(f"an object does not parse: {error}") from error


def _parsed(packed: bytes | memoryview, kind: type[T]) -> T:
    body = _unpacked(packed, kind)
    body.validate()
    return body


def framed(body: T) -> tuple[bytes, T]:
    """Return the frame of a record, manifest, fragment or root, and the body that readers will find in it.

    An object that is created cannot be taken back: `InvalidArgument` where readers would refuse it.
    """
    version, fields = PLAIN, None
    if isinstance(body, Record):
        version = DROPPING if body.dropped else PLAIN if body.collection is None else COLLECTING
        fields = msgspec.structs.astuple(body)
        for before, later in _LATER.items():
            if fields[before:] != later:
                break
            fields = fields[:before]
    try:
        packed = msgspec.msgpack.encode(fields or body)
        return sealed(_KINDS[type(body)], version, packed), _parsed(packed, type(body))
    except (TypeError, ValueError, OverflowError, RecursionError, Corrupt) as error:  # msgspec's are ValueErrors
        name = type(body).__name__.lower()
        raise InvalidArgument(
            f"a {name} with these values could not be read again, nothing was written: {error}"
        ) from None


def size_of(body: Body) -> int:
    """Return about how many bytes the frame of a body has; it is not checked."""
    return SHORTEST + len(msgspec.msgpack.encode(body))


def encode(body: Body) -> bytes:
    """Return the frame of a record, manifest, fragment or root; `InvalidArgument` as `framed`."""
    return framed(body)[0]


def decode(data: bytes, kind: type[T]) -> T:
    """The body of a frame; `Corrupt` where a bit or a value is wrong, `UnsupportedFormat` where it is newer."""
    return _parsed(unsealed(data, _KINDS[kind]), kind)


def decode_record(data: bytes) -> Record:
    """The record in a frame, as `decode`; what its manifests say is checked when they are used."""
    record = _unpacked(unsealed(data, b"R"), Record)
    record.validate_own()
    return record
