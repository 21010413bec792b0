"""How much memory the collection in a gc's record takes, told before it is decoded; pure."""

from __future__ import annotations

import msgspec

from tstore.format.bounds import ALIVE_VALUES, COLLECTION_VALUES, MOST_ALIVE, contained

__all__ = ["collection_excess"]

_SHORT = 1 << 20
"""Bytes of which no more than about 30 MiB can be made, so that nothing is counted."""


class _Decided(msgspec.Struct, array_like=True):
    alive: msgspec.Raw
    expired: msgspec.Raw
    tags: msgspec.Raw
    transactions: msgspec.Raw
    objects: msgspec.Raw


class _Living(msgspec.Struct, array_like=True):
    version: msgspec.Raw
    transaction: msgspec.Raw
    time: msgspec.Raw
    tags: msgspec.Raw
    replaces: msgspec.Raw
    metrics: msgspec.Raw
    holds: msgspec.Raw


_LIVING = msgspec.msgpack.Decoder(_Living)


def collection_excess(packed: bytes | memoryview) -> str:
    """Say how a collection in msgpack goes beyond `COLLECTION_VALUES`, "" where it does not.

    The versions that live are looked at one by one, and of each only how many names it has: a list of lists is no
    list of names, which the parser tells with the first of them.
    """
    if len(packed) <= _SHORT:
        return ""
    decided = msgspec.msgpack.decode(packed, type=_Decided)
    lists = (decided.expired, decided.tags, decided.transactions, decided.objects)
    alive = contained(memoryview(decided.alive))
    count = ALIVE_VALUES * alive + sum(contained(memoryview(names)) for names in lists)
    if alive <= MOST_ALIVE and count <= COLLECTION_VALUES:
        for entry in msgspec.msgpack.decode(decided.alive, type=list[msgspec.Raw]):
            living = _LIVING.decode(entry)
            for names in (living.tags, living.metrics, living.holds):
                count += contained(memoryview(names))
    if count > COLLECTION_VALUES:
        return f"more than {COLLECTION_VALUES:,} values: keep fewer versions, or let fewer expire at once"
    return ""
