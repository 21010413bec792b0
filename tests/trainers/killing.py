"""Training that is killed at random moments and begun again, in forked processes."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import random
import signal
import socket
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.forks import forks

KILLS = int(os.environ.get("TSTORE_KILLS", "1"))
"""How often a run is killed."""

STEPS = 10 + 10 * KILLS
"""How many steps a run has."""

Train = Callable[[Callable[[int, float], None]], None]
"""Trains, and reports the loss of each step."""


def losses(train: Train, kills: int = 0, ranks: int = 1, seed: int = 0) -> dict[int, float]:
    """Return the loss of each step of a training that is killed so often: first one rank, then the others.

    A step that is repeated must have the same loss, to the last bit.
    """
    reported: dict[int, float] = {}
    chance = random.Random(seed)
    while True:
        reader, writer = os.pipe()
        environment = _environment(ranks)
        pids = [
            _forked(train, reader, writer, environment | _rank(rank) if environment else {})
            for rank in range(ranks)
        ]
        os.close(writer)
        left, is_killed = chance.randrange(4, STEPS // kills) if kills else -1, False
        with os.fdopen(reader) as lines:
            for line in lines:
                step, loss = json.loads(line)
                assert reported.setdefault(step, loss) == loss, f"step {step}: {loss}, and {reported[step]} before"
                left -= 1
                if not left:  # lines that were written before the kill may follow
                    is_killed = True
                    kills -= 1
                    for pid in chance.sample(pids, ranks):
                        os.kill(pid, signal.SIGKILL)
        statuses = {os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids}
        if not is_killed:
            assert statuses == {0}, f"the training ended with {statuses}"
            return reported


def _forked(train: Train, reader: int, writer: int, environment: dict[str, str]) -> int:
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.close(reader)
            os.environ.update(environment)
            is_first = environment.get("RANK", "0") == "0"
            train(lambda step, loss: is_first and os.write(writer, f"[{step}, {loss!r}]\n".encode()))
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return pid


def _environment(ranks: int) -> dict[str, str]:
    """Return what torchrun sets for all ranks, nothing for one."""
    if ranks == 1:
        return {}
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    return {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "TORCHELASTIC_RUN_ID": "tests",
        "GROUP_RANK": "0",
    }


def _rank(rank: int) -> dict[str, str]:
    return {"RANK": str(rank), "LOCAL_RANK": str(rank)}


_CODE = """
    import os, sys
    from tests.trainers.killing import call
    call(out, *arguments)
"""


def call(out: int, log: str, folder: str, module: str, name: str, arguments: dict[str, Any]) -> None:
    """Write what a function of a module returns, or the error that it raises, to a file."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.chdir(folder)
    os.environ["OMP_NUM_THREADS"] = "1"
    warnings.simplefilter("ignore")  # those of the frameworks
    try:
        result = {"result": getattr(importlib.import_module(module), name)(**arguments)}
    except Exception as error:
        traceback.print_exc()
        result = {"error": f"{type(error).__name__}: {error}"}
    sys.stdout.flush()
    os.write(out, json.dumps(result).encode())


class Jobs:
    """Calls functions of a module in forked processes, in which its framework is imported."""

    def __init__(self, server: Any, module: str, folder: Path) -> None:
        self._server, self._module, self._folder = server, module, folder
        self._count = 0

    def __call__(self, name: str, **arguments: Any) -> Any:
        """Return what the function returns; raise an `AssertionError` with its log if it raises."""
        result, log = self._run(name, arguments)
        assert "error" not in result, f"{result.get('error')}\n{log[-5000:]}"
        return result["result"]

    def error(self, name: str, **arguments: Any) -> str:
        """Return the error that the function raises."""
        result, log = self._run(name, arguments)
        assert "error" in result, log[-5000:]
        return str(result["error"])

    def _run(self, name: str, arguments: dict[str, Any]) -> tuple[dict[str, Any], str]:
        self._count += 1
        out, log = (self._folder / f"{self._count}.{end}" for end in ("json", "log"))
        folder = self._folder / str(self._count)
        folder.mkdir()
        pid = self._server.start(out, str(log), str(folder), self._module, name, arguments)
        status = self._server.wait(pid)
        text = log.read_text(errors="replace") if log.exists() else ""
        assert status == 0, f"{name} ended with {status}\n{text[-5000:]}"
        return json.loads(out.read_text()), text


@contextlib.contextmanager
def jobs(module: str, factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    """Provide calls of the functions of a module."""
    with forks(_CODE, module) as server:
        yield Jobs(server, module, factory.mktemp("jobs"))
