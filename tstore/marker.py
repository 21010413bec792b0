"""The marker of a store: the small object that tells what it is, in which format, and which store."""

from __future__ import annotations

import datetime
import uuid

import msgspec

from tstore import world
from tstore.errors import Corrupt, NotAStore, NotFound, UnsupportedFormat
from tstore.kv.base import Backend
from tstore.kv.probe import prove, race

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
    return _decoded(backend, data)


def _decoded(backend: Backend, data: bytes) -> Marker:
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


async def create_marker(backend: Backend, racers: int) -> tuple[Marker, bool]:
    """The marker of a new store, and whether this call made it, not another process meanwhile.

    So many creates race for it, each with another uuid: a backend on which not exactly one wins is refused.
    Raises `NotAStore` where other files are, `Denied`.
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
    if not backend.capabilities.conditional_create:
        await prove(backend)
    now = datetime.datetime.fromtimestamp(world.now(), datetime.UTC).isoformat(timespec="seconds")
    markers = [Marker(FORMAT_VERSION, str(uuid.UUID(world.token(16), version=4)), now) for _ in range(racers)]
    ended = await race(backend, MARKER, [msgspec.json.encode(m) for m in markers])
    return _decoded(backend, ended.stored), ended.ours
