"""The processes of `jax.distributed` that save or restore together."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import re
import secrets
from collections.abc import AsyncIterator, Iterator
from typing import Any, NamedTuple

import jax
from jax.experimental import multihost_utils

from tstore.core.format.arguments import checked_commit_timeout
from tstore.core.runtime import pool
from tstore.core.snapshot import Snapshot
from tstore.core.steps import chosen_snapshot
from tstore.core.store import Store, opened
from tstore.core.transactions.attempts import Attempt
from tstore.errors import DeadlineExceeded, Misuse, Unavailable

__all__ = ["Processes", "agreed_number", "agreed_snapshot", "any_process"]

_FAILED = "failed: "


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

        Without `attempt`, all processes must make the same calls, because each counts its saves.
        """
        if host is not None or hosts is not None:
            return Processes(host or 0, 1 if hosts is None else hosts, attempt)
        if jax.process_count() == 1:
            return Processes(0, 1, None)
        if attempt is None:
            url = store.url if isinstance(store, Store) else str(store)
            token = _job_token(_client())
            attempt = str(Attempt(token).next_save(url, jax.process_index(), step))
        return Processes(jax.process_index(), jax.process_count(), attempt)


def _client() -> Any:
    """Return the client of the job's coordination service, through which processes wait with a deadline."""
    # the client has no public name; this is how the module itself gets it
    client = multihost_utils.distributed.global_state.client  # type: ignore[attr-defined]
    if client is None:
        raise Misuse(
            f"{jax.process_count()} processes can't agree without jax.distributed; call "
            "jax.distributed.initialize(), or pass a step to restore, and host, hosts and attempt to save"
        )
    return client


@functools.cache
def _job_token(client: Any) -> str:
    """Return a random token that all processes of this job share, and no other job uses."""
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # another process was first
        client.key_value_set("tstore/token", secrets.token_hex(12))
    with _errors_mapped("save", 10):
        token: str = client.blocking_key_value_get("tstore/token", 10_000)
    return token


def job_token() -> str:
    """Return the token of this start of the job; a random one for a job of one process."""
    token: str = _job_token(_client()) if jax.process_count() > 1 else secrets.token_hex(12)
    return token


@functools.cache
def _numbers(client: Any, purpose: str) -> Iterator[int]:
    """Return the numbers of the exchanges for one purpose."""
    return itertools.count()


def exchange(purpose: str, word: str | None, timeout: float | None) -> dict[int, str]:
    """Return the words of the processes that pass one; all processes make this call, and wait for each other.

    Raise `DeadlineExceeded`, in all processes, if some do not make it within `timeout` seconds.
    """
    if jax.process_count() == 1:
        return {} if word is None else {0: word}
    client, seconds = _client(), checked_commit_timeout(timeout)
    number = next(_numbers(client, purpose))
    key = f"tstore/{purpose}/{number}"
    with _errors_mapped(purpose, seconds):
        if word is not None:
            client.key_value_set(f"{key}/{jax.process_index()}", word)
        client.wait_at_barrier(key, round(seconds * 1000))
        words = {int(path.rpartition("/")[2]): word for path, word in client.key_value_dir_get(f"{key}/")}
        if jax.process_index() == 0:  # all processes have read the words of the exchange before
            client.key_value_delete(f"tstore/{purpose}/{number - 1}/")
    return words


@contextlib.contextmanager
def _errors_mapped(purpose: str, seconds: float) -> Iterator[None]:
    """Map the errors of the coordination service to those of tstore, of which some name the absent hosts."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        text = str(error)
        if not text.startswith("DEADLINE_EXCEEDED"):
            reason = text.splitlines()[0].rstrip(".")
            raise Unavailable(
                f"{purpose}: the coordination service of jax.distributed failed ({reason}); start the job again"
            ) from error
        listed = text.partition("timed out task names")[2]
        absent = sorted(map(int, re.findall(r"(?:^|task:)(\d+)$", listed, re.MULTILINE)))
        raise DeadlineExceeded(
            f"{purpose}: hosts {absent} of {jax.process_count()} did not make this call within {seconds:g} s; "
            "make it again on all hosts, with a longer timeout if they are only slow",
            absent,
        ) from error


def any_process(decision: bool, timeout: float | None) -> bool:
    """Return whether the decision of any process is True; all processes make this call."""
    return bool(exchange("should_save", "save" if decision else None, timeout))


async def agreed_number(purpose: str, number: int | None, failure: Exception | None, timeout: float | None) -> Any:
    """Return the number that the first process passes; raise in all processes if one has a `failure`."""
    word = str(number) if jax.process_index() == 0 else None
    if failure is not None:
        word = f"{_FAILED}{failure}"
    words = await pool.run(exchange, purpose, word, timeout)
    if failure is not None:
        raise failure
    for host, word in words.items():
        if word.startswith(_FAILED):
            raise Unavailable(f"{purpose}: host {host} has found no step: {word.removeprefix(_FAILED)}")
    return None if words[0] == "None" else int(words[0])


@contextlib.asynccontextmanager
async def agreed_snapshot(
    store: str | os.PathLike[str] | Store, step: int | None, at: int | str | None
) -> AsyncIterator[tuple[Store, Snapshot]]:
    """Open a store for the block; return it with the snapshot to restore.

    With neither a step nor `at`, this is the snapshot that the first process chose.
    """
    alone = step is not None or at is not None or jax.process_count() == 1
    async with contextlib.AsyncExitStack() as stack:
        version, failure = None, None
        try:
            opened_store = await stack.enter_async_context(opened(store, "r"))
            snapshot = await chosen_snapshot(opened_store, step, at)
            version = snapshot.version
        except Exception as error:  # reported to the other processes
            if alone:
                raise
            failure = error
        if not alone:
            version = await agreed_number("restore", version, failure, None)
            snapshot = await opened_store.snapshot(version)
        yield opened_store, snapshot
