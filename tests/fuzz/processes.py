"""Worker processes of the fuzzer, some of which are killed while they work.

A process reads pickled tasks from its standard input and replies with the number of its operations on its standard
output. It records events in a journal file, which survives a kill.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from tests.fuzz.journal import Fault, Journal
from tests.fuzz.verbs import VERBS
from tests.fuzz.worker import Place, Worker
from tstore.lab.simulation.scenario import override_constants

__all__ = ["WorkerProcesses", "serve"]

_KILLED = 0.4  # share of the rounds in which a process is killed
_PATIENCE = 240.0
_START_CODE = (
    "import os, sys; sys.path[:] = sys.argv.pop(1).split(os.pathsep); "
    "from tests.fuzz.processes import serve; serve()"
)


class WorkerProcesses:
    """Worker processes, which are replaced after a kill."""

    def __init__(self, count: int) -> None:
        self.counts: Counter[str] = Counter()
        self._count = count
        self._members: list[subprocess.Popen[bytes]] = []

    async def round(self, name: str, place: Place, choice: random.Random, operations: int) -> list[Any]:
        """Run a round in all processes at once and return its events; one process may be killed."""
        self.counts.clear()
        while len(self._members) < self._count:
            self._members.append(_start())
        files = [place.scratch / f"{name}.{i}.journal" for i in range(self._count)]
        for file, member in zip(files, self._members, strict=True):
            assert member.stdin is not None
            pickle.dump((file.stem, place, choice.random(), file, operations), member.stdin)
            member.stdin.flush()
        victim = choice.randrange(self._count) if choice.random() < _KILLED else None
        if victim is not None:
            await asyncio.sleep(choice.uniform(0.02, 1.5))
            self._members[victim].kill()
            self.counts["kill"] += 1
        replies = await asyncio.gather(*[asyncio.to_thread(_reply, member) for member in self._members])
        events: list[Any] = []
        for number, (file, counts) in enumerate(zip(files, replies, strict=True)):
            if counts is not None:
                self.counts.update(counts)
            elif number != victim:
                self._members[number].kill()
                events.append(Fault("process", "died", f"status {self._members[number].wait()}"))
            if file.exists():
                events += Journal.read(file)
                file.unlink()
        if victim is not None:
            _end(self._members.pop(victim))
        return events

    def close(self) -> None:
        """End the processes."""
        for member in self._members:
            _end(member)


def _start() -> subprocess.Popen[bytes]:
    path = os.pathsep.join(p for p in sys.path if p)
    command = [sys.executable, "-c", _START_CODE, path]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def _reply(member: subprocess.Popen[bytes]) -> dict[str, int] | None:
    """Return the number of operations of a process in a round, by name; None if the process ended."""
    assert member.stdout is not None
    try:
        counts: dict[str, int] = pickle.load(member.stdout)
    except (EOFError, pickle.UnpicklingError):
        return None
    return counts


def _end(member: subprocess.Popen[bytes]) -> None:
    member.kill()
    member.wait()
    for pipe in (member.stdin, member.stdout):
        assert pipe is not None
        with contextlib.suppress(BrokenPipeError):
            pipe.close()


def serve() -> None:
    """Run tasks from standard input until it ends."""
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # so that other output cannot pass for a reply
    while True:
        try:
            task = pickle.load(sys.stdin.buffer)
        except EOFError:
            os._exit(0)
        pickle.dump(asyncio.run(asyncio.wait_for(_work(*task), _PATIENCE)), replies)
        replies.flush()


async def _work(name: str, place: Place, seed: float, file: Path, operations: int) -> dict[str, int]:
    worker = Worker(name, place, Journal(file), random.Random(seed), alone=False)
    with override_constants(**place.constants):
        await worker.work(VERBS, operations)
        await worker.close()
    return worker.counts
