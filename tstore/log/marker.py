"""The marker of a store: the small object that tells what it is, in which format, and which store."""

from __future__ import annotations

import datetime
from uuid import UUID

import msgspec
import xxhash

from tstore.errors import Corrupt, NotAStore, NotFound, UnsupportedFormat
from tstore.format.bounds import MARKER_BYTES
from tstore.runtime import world
from tstore.storage.base import Backend
from tstore.storage.probe import prove, race

__all__ = ["FORMAT_VERSION", "MARKER", "Marker", "create_marker", "read_marker"]

FORMAT_VERSION = 1
MARKER = "tstore.json"


class Marker(msgspec.Struct, frozen=True):
    """What the marker holds; `checksum` is empty as it is made, and in a marker of before there was one."""

    format: int
    uuid: UUID
    created: str = ""
    checksum: str = ""

    def encode(self) -> bytes:
        """Return the bytes of the object, with the checksum; they have been parsed once."""
        data = msgspec.json.encode(msgspec.structs.replace(self, checksum=self._digest()))
        Marker.decode(data)
        return data

    @property
    def _sound(self) -> bool:
        """Whether the checksum is that of the values, if there is one."""
        return self.checksum in ("", self._digest())

    @staticmethod
    def decode(data: bytes) -> Marker:
        """The marker in the bytes of the object, wherever that lies.

        Raises `UnsupportedFormat` (written by a newer tstore), `Corrupt`.
        """
        if len(data) > MARKER_BYTES:
            raise Corrupt(f"{MARKER} has {len(data)} bytes; expected at most {MARKER_BYTES}")
        try:
            written = msgspec.json.decode(data, type=_Format).format
            if written > FORMAT_VERSION:  # all else may be different there
                raise UnsupportedFormat(
                    f"{MARKER} has format version {written}; this tstore knows up to {FORMAT_VERSION}"
                )
            marker = msgspec.json.decode(data, type=Marker)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise Corrupt(f"{MARKER} does not parse ({error})") from error
        if not marker._sound:
            raise Corrupt(f"{MARKER} was changed, its checksum is of other values")
        return marker

    def _digest(self) -> str:
        """xxh3-128 of the values, one a line: what another version adds beside them can be passed over."""
        return xxhash.xxh3_128_hexdigest(f"{self.format}\n{self.uuid}\n{self.created}".encode())


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
        return Marker.decode(data)
    except UnsupportedFormat as error:
        raise UnsupportedFormat(f"{backend.url}: {error}: install a newer one") from error
    except Corrupt as error:
        raise Corrupt(f"{backend.url}: {error}; restore this small file from a copy") from error


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
    markers = [Marker(FORMAT_VERSION, UUID(world.token(16), version=4), now) for _ in range(racers)]
    ended = await race(backend, MARKER, [m.encode() for m in markers])
    return _decoded(backend, ended.stored), ended.ours
