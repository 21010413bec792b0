"""The marker of a store: the small object with its format version and identity."""

from __future__ import annotations

import datetime
from uuid import UUID

import msgspec
import xxhash

from tstore.core.format.bounds import MARKER_BYTES
from tstore.core.format.layout import MARKER, archive_end, archive_key, commit_key
from tstore.core.runtime import world
from tstore.core.storage.base import Storage
from tstore.core.storage.probe import RACERS, check_exclusive, race
from tstore.errors import AlreadyExists, Corrupt, InvalidArgument, NotAStore, NotFound, UnsupportedFormat

__all__ = [
    "FORMAT_VERSION",
    "Marker",
    "check_not_nested",
    "check_vacant",
    "create_marker",
    "marker_for",
    "read_marker",
    "require_marker",
]

FORMAT_VERSION = 1


class Marker(msgspec.Struct, frozen=True, omit_defaults=True):
    """The contents of the marker. `encode` sets `checksum`.

    `origin` is the uuid that the records of the store name as the id of their log, None if that is its own uuid: a
    copy of one version is a store with another uuid and with records of the store that was copied.
    """

    format: int
    uuid: UUID
    created: str = ""
    checksum: str = ""
    origin: UUID | None = None

    @property
    def log_id(self) -> bytes:
        """The log id in the records of the store."""
        return (self.origin or self.uuid).bytes

    def encode(self) -> bytes:
        """Return the bytes of the object, with their checksum; check that they can be decoded."""
        data = msgspec.json.encode(msgspec.structs.replace(self, checksum=self._digest()))
        Marker.decode(data)
        return data

    @staticmethod
    def decode(data: bytes) -> Marker:
        """Return the marker in these bytes; raise `UnsupportedFormat` if a newer tstore wrote it, or `Corrupt`."""
        if len(data) > MARKER_BYTES:
            raise Corrupt(f"{MARKER} has {len(data)} bytes; expected at most {MARKER_BYTES}")
        try:
            written = msgspec.json.decode(data, type=_FormatVersion).format
            if written > FORMAT_VERSION:  # its other fields may differ too
                raise UnsupportedFormat(
                    f"{MARKER} has format version {written}; this tstore reads up to {FORMAT_VERSION}"
                )
            marker = msgspec.json.decode(data, type=Marker)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise Corrupt(f"{MARKER} does not parse ({error})") from error
        if marker.checksum not in ("", marker._digest()):
            raise Corrupt(f"{MARKER} does not match its checksum: its values have changed")
        return marker

    def _digest(self) -> str:
        """Return the xxh3-128 of the values, one per line; fields that a later version adds are not covered."""
        values = [self.format, self.uuid, self.created, *([] if self.origin is None else [self.origin])]
        return xxhash.xxh3_128_hexdigest("\n".join(map(str, values)).encode())


class _FormatVersion(msgspec.Struct):
    format: int


async def read_marker(storage: Storage) -> Marker | None:
    """Return the marker or None; raise `UnsupportedFormat` if a newer tstore wrote it, or `Corrupt`."""
    try:
        data = await storage.get(MARKER)
    except NotFound:
        return None
    return _decode(storage, data)


def _decode(storage: Storage, data: bytes) -> Marker:
    try:
        return Marker.decode(data)
    except UnsupportedFormat as error:
        raise UnsupportedFormat(f"{storage.url}: {error}; install a newer one") from error
    except Corrupt as error:
        raise Corrupt(f"{storage.url}: {error}; restore it from a copy of the store") from error


async def require_marker(storage: Storage) -> Marker:
    """Return the marker of a store that must exist; raise `NotAStore`, and what `read_marker` raises."""
    if (marker := await read_marker(storage)) is not None:
        return marker
    hint = await _hint(storage)
    if not hint and storage.capabilities.native_io:
        try:
            hint = "it does not exist, or is empty; check the path" if await storage.empty() else ""
        except NotFound:
            hint = "it is a file, not a folder; check the path"
    raise NotAStore(f"{storage.url} is not a tstore store: it has no {MARKER}; {hint or 'check the path'}")


async def _hint(storage: Storage) -> str:
    """Return advice for a folder that is a store without its marker, or a Zarr v3 folder; "" for any other."""
    if await storage.sizes([commit_key(1), archive_key(archive_end(1))]):
        return f"it has records of commits, so restore {MARKER} from a copy of the store"
    if await storage.size("zarr.json") is None:
        return ""
    return (
        "it is a folder of Zarr: import it with tstore import, or open one of its arrays in place with "
        "tstore.open({'driver': 'zarr3', 'kvstore': 'file:///…'})"
    )


async def check_not_nested(storage: Storage) -> None:
    """Raise `InvalidArgument` if there is a store around the location of a new one."""
    if outer := await storage.enclosing(MARKER):
        raise InvalidArgument(
            f"{storage.url} is inside the store {outer}, whose verify and copy would ignore a store there; choose "
            "a folder beside that one (to hold several runs, give each its own store in a plain folder)"
        )


async def check_vacant(storage: Storage) -> None:
    """Raise `NotAStore` if the URL is not a folder, or the folder contains other files than those of a store.

    Raise `InvalidArgument` if there is a store around it.
    """
    try:
        empty = await storage.empty()
    except NotFound as error:
        raise NotAStore(
            f"{storage.url} is not a folder, so no store can be created there; choose another path"
        ) from error
    await check_not_nested(storage)
    if not empty and await read_marker(storage) is None:  # another host may just have created the marker
        raise NotAStore(
            f"{storage.url} contains other files but no {MARKER}, so no store can be created there; "
            + (await _hint(storage) or "choose an empty or a new folder")
        )


async def create_marker(storage: Storage, racers: int) -> tuple[Marker, bool]:
    """Create the marker of a store; return it, and whether this call created it. Call `check_vacant` first.

    Exactly one of `racers` concurrent creations, with different uuids, must succeed. Raise `Denied` if several
    do, or without permission.
    """
    if not storage.capabilities.conditional_create:
        await check_exclusive(storage)
    now = datetime.datetime.fromtimestamp(world.now(), datetime.UTC).isoformat(timespec="seconds")
    markers = [Marker(FORMAT_VERSION, UUID(world.token(16), version=4), now) for _ in range(racers)]
    outcome = await race(storage, MARKER, [m.encode() for m in markers])
    return _decode(storage, outcome.stored), outcome.ours


async def marker_for(storage: Storage, mode: str, *, deferred: bool) -> tuple[Marker | None, bool]:
    """Return the marker of a store to open in a mode, created if that allows it, and whether it is writable.

    If the creation is deferred, return None for a missing marker, unless the mode is "x".
    """
    if mode in ("r", "r+"):
        return await require_marker(storage), mode != "r"
    marker = await read_marker(storage)
    if marker is None:
        await check_vacant(storage)
        if deferred and mode == "a":
            return None, True
        # `create_marker` tests with racing creates that the storage creates objects exclusively. The test is
        # stricter for "x": several processes may try to create the store, and only one must succeed.
        marker, created = await create_marker(storage, RACERS if mode == "x" else 2)
        if mode == "x" and not created:
            raise AlreadyExists(f"{storage.url}: another process just created this store; open it with mode='a'")
    elif mode == "x":
        raise AlreadyExists(
            f"{storage.url} is already a store; choose an empty or new location, or open it with mode='a'"
        )
    elif not storage.capabilities.conditional_create:
        return marker, await check_exclusive(storage)
    return marker, True
