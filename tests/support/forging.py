"""Forged metadata objects: frames with valid checksums and any content."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import xxhash

from tstore.core.format.frame import LINK_SIZE, NO_RECORD, Link, check_of, linked
from tstore.core.format.layout import MARKER, commit_key
from tstore.core.format.objects.records import Fragment, Record, Root
from tstore.core.format.objects.references import Manifest
from tstore.core.log.marker import Marker
from tstore.core.storage.base import Storage
from tstore.core.storage.objects import Durability
from tstore.errors import NotFound

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
    data = b"tstore" + kind + packed + (bytes(LINK_SIZE) if kind[:1] == b"R" else b"")
    return data + xxhash.xxh3_128_digest(data)


async def placed(storage: Storage, version: int, data: bytes) -> bytes:
    """Return the frame of a record with the link that the record of a version of a store has."""
    log_id = Marker.decode(await storage.get(MARKER)).log_id
    before = await storage.get(commit_key(version - 1)) if version > 1 else NO_RECORD
    return linked(data, Link(log_id, version - 1, check_of(before)))


async def place(storage: Storage, version: int, data: bytes) -> None:
    """Create the record of a version, with the link that it must have."""
    await storage.create(commit_key(version), await placed(storage, version, data), Durability.NONE)


def placed_in(folder: Path, version: int, data: bytes) -> bytes:
    """Do what `placed` does, for the store in a folder."""
    log_id = Marker.decode((folder / MARKER).read_bytes()).log_id
    before = (folder / commit_key(version - 1)).read_bytes() if version > 1 else NO_RECORD
    return linked(data, Link(log_id, version - 1, check_of(before)))


async def rewrite(storage: Storage, version: int, data: bytes) -> None:
    """Replace the record of a version, and set the links of it and of all later ones to what is there now."""
    while True:
        await storage.replace(commit_key(version), await placed(storage, version, data))
        version += 1
        try:
            data = await storage.get(commit_key(version))
        except NotFound:
            return
