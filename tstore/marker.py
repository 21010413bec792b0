"""The marker of a store: the small object that tells what it is, in which format, and which store."""

from __future__ import annotations

import datetime
import uuid

import msgspec

from tstore import world
from tstore.errors import AlreadyExists, Corrupt, NotAStore, NotFound, UnsupportedFormat
from tstore.kv.base import Backend, Durability

__all__ = ["FORMAT_VERSION", "MARKER", "Marker", "create_marker", "read_marker"]

FORMAT_VERSION = 1
MARKER = "tstore.json"


class Marker(msgspec.Struct):
    """What the marker holds."""

    format: int
    uuid: str
    created: str = ""


class _Format(msgspec.Struct):
    format: int


async def read_marker(backend: Backend) -> Marker | None:
    """The marker, None where there is none.

    Raises `UnsupportedFormat` (written by a newer tstore), `Corrupt`.
    """
    try:
        data = await backend.get(MARKER)
    except NotFound:
        return None
    try:
        written = msgspec.json.decode(data, type=_Format).format
        if written > FORMAT_VERSION:  # all else may be different there
            raise UnsupportedFormat(
                f"{backend.url} has format version {written}; this tstore knows up to {FORMAT_VERSION}: "
                "install a newer one"
            )
        return msgspec.json.decode(data, type=Marker)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Corrupt(
            f"{backend.url}: {MARKER} does not parse ({error}); restore this small file from a copy"
        ) from error


async def create_marker(backend: Backend) -> tuple[Marker, bool]:
    """The marker of a new store, and whether this call made it, not another process meanwhile.

    Raises `NotAStore` where other files are.
    """
    try:
        empty = await backend.empty()
    except NotFound as error:
        raise NotAStore(f"{backend.url} is no folder, so it can't be a store; choose another path") from error
    if not empty and await read_marker(backend) is None:  # another host may have made it just now
        raise NotAStore(
            f"{backend.url} holds other files and no {MARKER}, so it is not made a store; choose an empty or "
            "a new folder"
        )
    now = datetime.datetime.fromtimestamp(world.now(), datetime.UTC).isoformat(timespec="seconds")
    marker = Marker(FORMAT_VERSION, str(uuid.UUID(world.token(16), version=4)), now)
    try:
        await backend.create(MARKER, msgspec.json.encode(marker), Durability.FSYNC)
    except AlreadyExists:
        return await read_marker(backend) or marker, False
    return marker, True
