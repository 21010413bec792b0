"""Processes forked from a launcher that has already imported their module, so that each starts in milliseconds.

1. The driver, through `Forks`, starts the launcher: a Python process that imports a module and forks. Each child
   calls the module's `serve(number, count)`.
2. A child has a socket to the driver as standard input and output, and a file as standard error.
3. The launcher kills the children whose numbers it reads from its input. It reports each child that has ended.
4. When the driver closes that input or dies, the launcher kills all children and exits.

The launcher leads a separate process group, so that Ctrl-C reaches the driver alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import os
import select
import signal
import socket
import struct
import sys
import tempfile
import traceback
from collections.abc import Sequence
from typing import IO, NoReturn

from tstore.errors import Unavailable

__all__ = ["Child", "Forks", "launch"]

_START = (
    "import os, sys; sys.path[:] = sys.argv.pop(1).split(os.pathsep); "
    "from tstore.lab.hosts.forks import launch; launch()"
)
_NUMBER = struct.Struct("i")


class Child:
    """The driver's view of a forked process."""

    def __init__(
        self, pid: int, channel: tuple[asyncio.StreamReader, asyncio.StreamWriter], log: IO[bytes]
    ) -> None:
        self.pid = pid
        self.reader, self.writer = channel
        self.exit_code: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        """The exit status, once the process has ended; the negative number of a signal that killed it."""
        self._log = log

    def stderr(self) -> str:
        """Return what the process has written to standard error."""
        self._log.seek(0)
        return self._log.read().decode(errors="replace").strip()

    async def close(self) -> None:
        """Close the socket and the file of standard error."""
        self.writer.close()
        with contextlib.suppress(OSError):
            await self.writer.wait_closed()
        self._log.close()


class Forks:
    """The launcher and its children."""

    def __init__(self) -> None:
        self.children: list[Child] = []
        self._launcher: asyncio.subprocess.Process | None = None
        self._watch: asyncio.Task[None] | None = None

    async def start(self, module: str, count: int) -> None:
        """Start `count` children, each of which runs `serve` of the module; raise `Unavailable` if that fails."""
        with contextlib.ExitStack() as on_error, contextlib.ExitStack() as remote_ends:
            pairs = [socket.socketpair() for _ in range(count)]
            logs = [on_error.enter_context(tempfile.TemporaryFile()) for _ in range(count)]
            for local, remote in pairs:
                on_error.enter_context(local)
                remote_ends.enter_context(remote)
            descriptors = [f.fileno() for (_, remote), log in zip(pairs, logs, strict=True) for f in (remote, log)]
            path = os.pathsep.join(sys.path)
            self._launcher = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-c", _START, path, module, *map(str, descriptors)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                process_group=0,
                pass_fds=descriptors,
            )
            remote_ends.close()
            assert self._launcher.stdout is not None
            assert self._launcher.stderr is not None
            line = await self._launcher.stdout.readline()
            if not line:
                stderr = (await self._launcher.stderr.read()).decode(errors="replace").strip()
                last_line = stderr.rpartition("\n")[2]
                raise Unavailable(f"processes of {module} could not be started: {last_line}")
            for pid, (local, _), log in zip(json.loads(line), pairs, logs, strict=True):
                self.children.append(Child(pid, await asyncio.open_unix_connection(sock=local), log))
            on_error.pop_all()
        self._watch = asyncio.create_task(self._record_exits(self._launcher.stdout))

    async def kill(self, number: int) -> None:
        """Kill a child with SIGKILL and wait for its end."""
        assert self._launcher is not None
        assert self._launcher.stdin is not None
        exit_code = self.children[number].exit_code
        if not exit_code.done():
            self._launcher.stdin.write(_NUMBER.pack(number))
        await asyncio.shield(exit_code)

    async def close(self) -> None:
        """End the launcher and its children, and wait for their end."""
        if self._launcher is not None:
            assert self._launcher.stdin is not None
            self._launcher.stdin.close()
            await self._launcher.wait()
        if self._watch is not None:
            await self._watch
        for child in self.children:
            await child.close()

    async def _record_exits(self, reports: asyncio.StreamReader) -> None:
        """Record the exit status of each child that the launcher reports."""
        while line := await reports.readline():
            number, exit_code = json.loads(line)
            self.children[number].exit_code.set_result(exit_code)
        for child in self.children:
            if not child.exit_code.done():  # the launcher was killed before it reported this child
                child.exit_code.set_result(-signal.SIGKILL)


# ---- the launcher


def launch() -> None:
    """Run the launcher; its arguments are a module, and the descriptors of a socket and a file for each child."""
    module, *arguments = sys.argv[1:]
    importlib.import_module(module)
    descriptors = [int(argument) for argument in arguments]
    child_ended, wakeup = os.pipe()  # Python writes a byte to it at each SIGCHLD, which ends the `select`
    os.set_blocking(wakeup, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakeup)
    alive: dict[int, int] = {}  # the number of each child by process id
    for number in range(len(descriptors) // 2):
        if (pid := os.fork()) == 0:
            _become_child(module, number, descriptors, [child_ended, wakeup])
        alive[pid] = number
    for descriptor in descriptors:
        os.close(descriptor)
    os.write(1, json.dumps(list(alive)).encode() + b"\n")
    while True:
        ready, _, _ = select.select([0, child_ended], [], [])
        if child_ended in ready:
            os.read(child_ended, 4096)
            _reap(alive, os.WNOHANG)
        if 0 in ready:
            data = os.read(0, 4096)  # only whole numbers, since short writes to a pipe are atomic
            doomed = {number for (number,) in _NUMBER.iter_unpack(data)} if data else set(alive.values())
            for pid, number in alive.items():
                if number in doomed:
                    os.kill(pid, signal.SIGKILL)
            if not data:
                _reap(alive, 0)
                return


def _reap(alive: dict[int, int], options: int) -> None:
    """Report the children that have ended; unless `options` is `WNOHANG`, wait until all have ended."""
    while alive:
        pid, status = os.waitpid(-1, options)
        if pid == 0:
            return
        with contextlib.suppress(OSError):  # the driver has died
            os.write(1, json.dumps([alive.pop(pid), os.waitstatus_to_exitcode(status)]).encode() + b"\n")


def _become_child(module: str, number: int, descriptors: Sequence[int], pipe: Sequence[int]) -> NoReturn:
    exit_code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        channel, log = descriptors[2 * number : 2 * number + 2]
        os.dup2(channel, 0)
        os.dup2(channel, 1)
        os.dup2(log, 2)
        for descriptor in (*descriptors, *pipe):
            os.close(descriptor)
        sys.modules[module].serve(number, len(descriptors) // 2)
        exit_code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(exit_code)
