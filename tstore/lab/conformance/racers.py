"""Processes that race to create the same objects.

1. One process starts, makes a request so that all modules are imported, and forks the racers: a race of eight
   costs one start of Python.
2. Each racer connects, requests a missing object, and reports that it is ready.
3. Once all are ready, they start together. Each tries to create every key with its own bytes, and reports the keys
   that it created.

The URL, and the options with their secrets, are passed on standard input, never on the command line.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tstore.core.storage.connect import connect
from tstore.core.storage.objects import Durability
from tstore.errors import AlreadyExists, TStoreError, Unavailable

__all__ = ["RaceOutcome", "race_from_stdin", "race_processes"]

_START = (
    "import os, sys; sys.path[:] = sys.argv.pop(1).split(os.pathsep); "
    "from tstore.lab.conformance.racers import race_from_stdin; race_from_stdin()"
)
_TIMEOUT = 120.0  # seconds


class RaceOutcome(NamedTuple):
    """The outcome of a race for one key."""

    winners: list[bytes]
    """The bytes of the creates that succeeded."""
    stored: bytes
    """The bytes read afterwards."""
    racers: int


async def race_processes(
    url: str, options: Mapping[str, Any], keys: Sequence[str], racers: int
) -> dict[str, list[bytes]]:
    """Race to create each key; return the winners' bytes by key. Raise `Unavailable` if a process failed."""
    task = {"url": url, "options": dict(options), "keys": list(keys), "racers": racers}
    path = os.pathsep.join(p for p in sys.path if p)
    try:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", _START, path),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
    except OSError as error:
        raise Unavailable(f"{url}: the racing processes could not be started: {error}") from error
    try:
        communication = process.communicate(json.dumps(task).encode())
        output, errors = await asyncio.wait_for(communication, _TIMEOUT)
    except TimeoutError as error:
        raise Unavailable(f"{url}: racing processes did not end within {_TIMEOUT:.0f} s") from error
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    results = [json.loads(line) for line in output.splitlines()]
    if len(results) != racers:
        last = errors.decode(errors="replace").strip().rpartition("\n")[2]
        raise Unavailable(f"{url}: {racers - len(results)} of {racers} racing processes failed: {last}")
    return {key: [_body(n, key) for n, created in results if key in created] for key in keys}


def race_from_stdin() -> None:
    """Run the process started by `_START`: read one task, race, and write a line for each racer."""
    task = json.loads(sys.stdin.read())
    with contextlib.suppress(TStoreError):
        asyncio.run(_preload(task))  # an error is ignored here, since the racers report it
    ready_reader, ready_writer = os.pipe()  # each racer writes a byte when it is ready
    gate_reader, gate_writer = os.pipe()  # closing the writer starts the race
    children = []
    for number in range(task["racers"]):
        child = os.fork()
        if child == 0:
            os.close(gate_writer)
            status = 1
            try:
                asyncio.run(_race(number, task, ready_writer, gate_reader))
                status = 0
            except BaseException as error:
                os.write(2, f"{type(error).__name__}: {error}\n".encode())
            finally:
                os._exit(status)
        children.append(child)
    os.close(ready_writer)
    os.close(gate_reader)
    for _ in range(task["racers"]):
        if not os.read(ready_reader, 1):
            break  # the remaining racers have died
    os.close(gate_writer)
    for child in children:
        os.waitpid(child, 0)


async def _preload(task: dict[str, Any]) -> None:
    """Make one request, so that all modules it needs are imported before the fork."""
    storage = connect(task["url"], task["options"])
    try:
        await storage.size(f"{task['keys'][0]}-ready")
    finally:
        await storage.close()


async def _race(number: int, task: dict[str, Any], ready_writer: int, gate_reader: int) -> None:
    storage = connect(task["url"], task["options"])
    try:
        await storage.size(f"{task['keys'][0]}-ready")
        os.write(ready_writer, b".")
        os.close(ready_writer)
        os.read(gate_reader, 1)  # returns when the parent closes the other end
        created = []
        for key in task["keys"]:
            try:
                await storage.create(key, _body(number, key), Durability.NONE)
                created.append(key)
            except AlreadyExists:
                pass
        os.write(1, json.dumps([number, created]).encode() + b"\n")
    finally:
        await storage.close()


def _body(number: int, key: str) -> bytes:
    return f"{number} made {key}; ".encode() * 20
