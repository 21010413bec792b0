"""The processes of a job that save or restore together, as `jax.distributed` has them."""

from __future__ import annotations

import functools
import os
import secrets
import threading
from typing import NamedTuple

import jax
import numpy as np
import numpy.typing as npt
from jax.experimental import multihost_utils

from tstore.errors import NotFound
from tstore.runtime import pool
from tstore.saved_steps import chosen_snapshot
from tstore.snapshot import Snapshot
from tstore.store import Store

__all__ = ["Processes", "agreed_snapshot", "any_process", "broadcast_number"]


class Processes(NamedTuple):
    """This process, `host` of `hosts`, and the attempt in which they save, None if this process saves alone."""

    host: int
    hosts: int
    attempt: str | None

    @staticmethod
    def saving(
        store: str | os.PathLike[str] | Store,
        step: int,
        host: int | None,
        hosts: int | None,
        attempt: str | None,
    ) -> Processes:
        """Return the processes that save a step, by default all of `jax.distributed`.

        Without `attempt`, all processes must make this call, because the first call in a job exchanges a token.
        """
        if host is not None or hosts is not None:
            return Processes(host or 0, 1 if hosts is None else hosts, attempt)
        if jax.process_count() == 1:
            return Processes(0, 1, None)
        if attempt is None:
            url = store.url if isinstance(store, Store) else str(store)
            attempt = f"{_job_token()}.{_count(url, str(step))}"
        return Processes(jax.process_index(), jax.process_count(), attempt)


_lock = threading.Lock()
_counts: dict[tuple[str, str], int] = {}


def _job_token() -> str:
    with _lock:
        return _broadcast_token()


@functools.cache
def _broadcast_token() -> str:
    """Return a random token that all processes of this job have, and no other job."""
    return _broadcast(np.frombuffer(secrets.token_bytes(12), np.uint8)).tobytes().hex()


def _count(url: str, step: str) -> int:
    """Return how often this process has saved a step, so that no two saves are one attempt.

    All processes make the same saves, so they count the same.
    """
    with _lock:
        _counts[url, step] = count = _counts.get((url, step), 0) + 1
    return count


def _broadcast(values: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Return the values that the first process passes."""
    return np.asarray(multihost_utils.broadcast_one_to_all(values))


def any_process(decision: bool) -> bool:
    """Return whether the decision of any process is True; all processes make this call."""
    if jax.process_count() == 1:
        return decision
    return bool(np.any(multihost_utils.process_allgather(np.array(decision, np.uint8))))


def broadcast_number(number: int | None) -> int | None:
    """Return the number that the first process passes; all processes make this call."""
    if jax.process_count() == 1:
        return number
    text = f"{-1 if number is None else number:020d}"  # digits, because JAX may have no integers of 64 bits
    chosen = int(_broadcast(np.frombuffer(text.encode(), np.uint8)).tobytes())
    return None if chosen < 0 else chosen


async def agreed_snapshot(store: Store, step: int | None, at: int | str | None) -> Snapshot:
    """Return the snapshot to restore; with neither a step nor `at`, the one that the first process chose."""
    if step is not None or at is not None or jax.process_count() == 1:
        return await chosen_snapshot(store, step, at)
    version = None
    try:
        if jax.process_index() == 0:
            version = (await chosen_snapshot(store, None, None)).version
    finally:  # the others wait for this, whatever happened
        version = await pool.run(broadcast_number, version)
    if version is None:
        raise NotFound(f"{store.url}: the first process could not choose a checkpoint; see its error")
    return await store.snapshot(version)
