"""Races that detect storage whose creates are not exclusive. Every store needs exclusive creates.

1. In a race, several creates of one key, each with different bytes, are sent at once. At most one may succeed, and
   a read afterwards must return the bytes of that create.
2. Creating a store is a race for its marker, which stays as the winner wrote it. So nothing has to be deleted, and
   no key is used that a server might refuse.
3. On a storage that does not claim to create exclusively (an fsspec file system), `check_exclusive` runs many
   races for temporary keys below `txn/`.

A race can show that creates are not exclusive, never that they are: a storage that checks first and then writes
may pass by luck. `tstore.lab.conformance` tests longer, also with racing processes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import NamedTuple

from tstore.core.runtime import world
from tstore.core.storage.base import Storage
from tstore.core.storage.objects import Durability
from tstore.errors import AlreadyExists, Corrupt, Denied, NotFound, TStoreError, Unavailable

__all__ = ["RACERS", "Race", "check_exclusive", "race"]

RACERS = 8
"""The number of concurrent creates in a thorough race."""

_ROUNDS = 12


class Race(NamedTuple):
    """The outcome of a race for one key."""

    stored: bytes
    ours: bool
    """Whether one of the racing creates stored it, rather than an earlier create of another process."""


async def race(storage: Storage, key: str, bodies: Sequence[bytes]) -> Race:
    """Create one key with each of the (distinct) bodies at once, and return the outcome.

    If more than one create succeeds, or the winner's object is then missing or has a loser's bytes, delete the
    object (if permitted) and raise `Denied`. If it has bytes that no create sent, raise `Corrupt`. If no create
    succeeds and no object exists, raise the error of a create, or `Unavailable` if all found the key taken.
    """
    creates = [storage.create(key, body, Durability.FSYNC) for body in bodies]
    results = await asyncio.gather(*creates, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, TStoreError):
            raise result
    winners = [body for body, result in zip(bodies, results, strict=True) if result is None]
    try:
        stored = await storage.get(key)
    except NotFound as error:
        if winners:
            raise await _refusal(storage, key, bodies, f"{key} was created, but then did not exist") from error
        for result in results:
            if isinstance(result, TStoreError) and not isinstance(result, AlreadyExists):
                raise result from error
        raise Unavailable(f"{storage.url}: {key} is being created and deleted by others; try again") from error
    if len(winners) > 1:
        reason = f"{len(winners)} of {len(bodies)} concurrent creates of {key} succeeded"
        raise await _refusal(storage, key, bodies, reason)
    altered = [result for result in results if isinstance(result, Corrupt)]  # as the storage itself noticed
    if stored not in bodies and (winners or altered):
        raise Corrupt(
            f"{storage.url} does not store what it is sent: {len(bodies[0])} bytes were sent as {key}, but "
            f"{len(stored)} other bytes came back.{await _remove(storage, key, bodies)} Configure the server, and "
            "any proxy before it, to store bodies unchanged, then try again"
        )
    if winners and stored != winners[0]:
        raise await _refusal(storage, key, bodies, f"{key} was created, but then had the bytes of another create")
    return Race(stored, stored in bodies)


async def check_exclusive(storage: Storage) -> bool:
    """Return True after many races, or False if the storage is read-only; raise `Denied` if one shows a fault."""
    folder = f"txn/{world.token(16)}"
    keys = [f"{folder}/pack-{number}" for number in range(_ROUNDS + 1)]
    try:
        await storage.create(keys[0], b"a test whether creating is permitted", Durability.NONE)
    except Denied:
        return False
    try:
        for key in keys[1:]:
            await race(storage, key, [f"racer {number}".encode() for number in range(RACERS)])
    finally:
        for key in (*keys, folder, "txn"):
            with contextlib.suppress(TStoreError):
                await storage.delete(key)
    return True


async def _refusal(storage: Storage, key: str, bodies: Sequence[bytes], reason: str) -> Denied:
    """Delete the object if one of the creates stored it, and return the error of `race`."""
    return Denied(
        f"{storage.url} does not create exclusively: {reason}, so two jobs could overwrite each other's commits."
        f"{await _remove(storage, key, bodies)} Use a local folder, S3, GCS or `tstore serve`; run `tstore probe` "
        "for details"
    )


async def _remove(storage: Storage, key: str, bodies: Sequence[bytes]) -> str:
    """Delete the object if it contains one of the bodies; return a sentence about what could not be deleted."""
    try:
        stored = await storage.get(key)
        if not any(body in stored for body in bodies):
            return f" {key} was left, since it may be another's."
        await storage.delete(key)
    except NotFound:
        pass
    except TStoreError as error:
        return f" {key} could not be deleted ({error})."
    return ""
