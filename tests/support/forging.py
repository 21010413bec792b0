"""Forged metadata objects: frames with valid checksums and any content."""

from __future__ import annotations

from typing import Any

import msgspec
import xxhash

from tstore.format.objects.records import Fragment, Record, Root
from tstore.format.objects.references import Manifest

KINDS = {Record: b"R", Manifest: b"M", Fragment: b"F", Root: b"T"}


def forged(body: Any, **fields: Any) -> bytes:
    """Return the frame of a body with some fields replaced by values that may have the wrong type."""
    values = [fields.get(name, getattr(body, name)) for name in body.__struct_fields__]
    if body.__struct_config__.tag is not None:
        values.insert(0, body.__struct_config__.tag)
    version = 2 if isinstance(body, Record) and body.collection is not None else 1
    return sealed(KINDS[type(body)] + bytes([version]), msgspec.msgpack.encode(values))


def sealed(kind: bytes, packed: bytes) -> bytes:
    """Return packed msgpack in a frame; `kind` is its letter and format version."""
    data = b"tstore" + kind + packed
    return data + xxhash.xxh3_128_digest(data)
