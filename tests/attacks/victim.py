"""A client that applies every verb to a hostile store: a coroutine function for a child process."""

from __future__ import annotations

import datetime
import resource
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np

import tstore
from tests.attacks.sample_store import digest_of
from tstore.core.store import Store
from tstore.errors import TStoreError

__all__ = ["OPENING", "READING", "WRITING", "visit"]

READING = ("restore", "arrays", "history", "steps", "verify", "gc", "transactions", "diff")
OPENING = ("restore",)
WRITING = ("save",)

_SHOWN = 200


async def _arrays(store: Store) -> None:
    snapshot = await store.snapshot()
    for path in snapshot.paths():
        try:
            array = await snapshot.array(path)
            repr((array, array.shape, array.dtype, array.attributes, array.chunks))
            await array[tuple(slice(0, 1) for _ in array.shape)].read()
        except TStoreError:
            continue


async def _history(store: Store) -> None:
    async for commit in store.history():
        repr(commit)


async def _diff(store: Store) -> None:
    repr(await store.diff(await store.log.reader.newest() - 1))


_VERBS: dict[str, Callable[[Store], Awaitable[Any]]] = {
    "restore": tstore.restore,
    "arrays": _arrays,
    "history": _history,
    "steps": tstore.steps,
    "verify": lambda store: store.verify(),
    "gc": lambda store: store.collect(abandoned=datetime.timedelta(0), dry_run=True),
    "transactions": lambda store: store.pending(),
    "diff": _diff,
    "save": lambda store: tstore.save(store, {"w": np.zeros(9000)}, 12345),
}


async def visit(
    tell: Callable[[Any], None], url: str, options: dict[str, Any] | None, verbs: tuple[str, ...]
) -> dict[str, str]:
    """Open a store and apply verbs; return for each "", or the kind and text of a `TStoreError`.

    Any other exception is raised. `tell` is called with each verb before it begins.
    """
    outcomes: dict[str, str] = {}
    tell("open")
    try:
        store = await tstore.open(url, "r+" if "save" in verbs else "r", storage_options=options)
    except TStoreError as error:
        return {"open": _told(error)}
    async with store:
        for verb in verbs:
            tell(verb)
            try:
                result = await _VERBS[verb](store)
                outcomes[verb] = digest_of(result) if verb == "restore" else ""
                repr(result)
            except TStoreError as error:
                outcomes[verb] = _told(error)
    tell(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10)
    return outcomes


def _told(error: TStoreError) -> str:
    return f"{type(error).__name__}: {error}"[:_SHOWN]
