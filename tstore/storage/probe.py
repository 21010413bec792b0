"""Does a backend really create exclusively? All that a store promises rests on it.

1. Several creates of one name, each with other bytes, are sent at once. At most one may be told that it has won,
   and then its bytes must be what is read.
2. A new store races for its own marker, so that nothing is left behind and no name is used that a server might
   refuse: the winner's marker is the store's.
3. A backend that does not claim to create exclusively (a file system that fsspec knows) races for names of its own
   below `txn/`, many times, and these are removed again.

A race can show that a backend lies, never that it does not: one that looks first and then writes may pass by luck.
`tstore.conformance` looks longer, also with racing processes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import NamedTuple

from tstore.errors import AlreadyExists, Denied, NotFound, TStoreError, Unavailable
from tstore.runtime import world
from tstore.storage.base import Backend, Durability

__all__ = ["RACERS", "Race", "prove", "race"]

RACERS = 8
"""Creates of one race for a new store."""

_ROUNDS = 12


class Race(NamedTuple):
    """How a race for one name ended."""

    stored: bytes
    ours: bool
    """Whether one of the racing creates made it, and not another process before them."""


async def race(backend: Backend, key: str, bodies: Sequence[bytes]) -> Race:
    """What stands under the key after as many creates as there are (distinct) bodies, all sent at once.

    Raises `Denied` where the backend lets more than one create win, or another's bytes replace the winner's: then
    what they made is removed, if that is permitted. Raises what the creates raised where none has landed.
    """
    creates = [backend.create(key, body, Durability.FSYNC) for body in bodies]
    results = await asyncio.gather(*creates, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, TStoreError):
            raise result
    won = [body for body, result in zip(bodies, results, strict=True) if result is None]
    try:
        stored = await backend.get(key)
    except NotFound as error:
        if won:
            raise await _refused(backend, key, bodies, f"{key} was created and then was not there") from error
        for result in results:
            if isinstance(result, TStoreError) and not isinstance(result, AlreadyExists):
                raise result from error
        raise Unavailable(f"{backend.url}: {key} is created and removed by others just now; try again") from error
    if len(won) > 1:
        told = f"{len(won)} of {len(bodies)} creates of {key} at once were told that they had won"
        raise await _refused(backend, key, bodies, told)
    if won and stored != won[0]:
        raise await _refused(backend, key, bodies, f"{key} was created, and other bytes took its place")
    return Race(stored, stored in bodies)


async def prove(backend: Backend) -> None:
    """Races that a backend must win that does not claim to create exclusively; `Denied` where it does not.

    One on which nothing may be created at all passes: there is nothing that could be overwritten.
    """
    folder = f"txn/{world.token(16)}"
    keys = [f"{folder}/pack-{number}" for number in range(_ROUNDS + 1)]
    try:
        await backend.create(keys[0], b"may this be created?", Durability.NONE)
    except Denied:
        return
    try:
        for key in keys[1:]:
            await race(backend, key, [f"racer {number}".encode() for number in range(RACERS)])
    finally:
        for key in (*keys, folder, "txn"):
            with contextlib.suppress(TStoreError):
                await backend.delete(key)


async def _refused(backend: Backend, key: str, bodies: Sequence[bytes], reason: str) -> Denied:
    left = ""
    try:
        if await backend.get(key) in bodies:
            await backend.delete(key)
    except NotFound:
        pass
    except TStoreError as error:
        left = f" {key} could not be removed again ({error})."
    return Denied(
        f"{backend.url} does not create exclusively: {reason}, so two jobs could overwrite each other's commits. "
        f"Nothing is stored here.{left} Use a local folder, S3, GCS or `tstore serve`; `tstore probe` tells more"
    )
