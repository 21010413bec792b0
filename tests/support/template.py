"""Processes that begin with everything imported: forks of a template, where a fresh interpreter takes a second.

Each is a child of the test process, ends as any interpreter does, and shares nothing with the others. What only a
fresh interpreter shows needs one: which modules are imported, what the memory begins with, `PYTHON…` variables.
"""

from __future__ import annotations

import ctypes
import functools
import os
import socket
import subprocess
import sys
import threading
from typing import Any

import msgspec

__all__ = ["Forked"]

_LOOP = """
import importlib, os, signal, socket, sys
import msgspec
import numpy, tstore, tstore.sync, tstore.service.server, tstore.cli.commands
import tstore.lab.demo, tstore.lab.conformance.faults
from tstore.lab.simulation.scenario import import_core

for name in tstore.__all__:  # which are imported when they are first used
    getattr(tstore, name), getattr(tstore.sync, name)
import_core()
for name in sys.argv[2:]:
    importlib.import_module(name)

assert len(os.listdir("/proc/self/task")) == 1  # a fork keeps only the thread that forks
signal.signal(signal.SIGINT, signal.SIG_IGN)
os.fsync, os.sync = os.fstat, os.getpid  # as in the process of the tests; a function here would keep all globals
requests = socket.socket(fileno=int(sys.argv[1]))
while True:
    request, fds, _, _ = socket.recv_fds(requests, 1 << 20, 3)
    if not request:
        os._exit(0)
    reading, writing = os.pipe()
    parent = os.fork()
    if parent == 0:
        child = os.fork()
        if child == 0:
            break
        os.write(writing, child.to_bytes(8))
        os._exit(0)
    os.waitpid(parent, 0)
    requests.sendall(os.read(reading, 8))
    for fd in (*fds, reading, writing):
        os.close(fd)

code, arguments, folder, environment = msgspec.msgpack.decode(request)
requests.close()
for number, fd in enumerate(fds):
    os.dup2(fd, number)
for fd in (*fds, reading, writing):
    os.close(fd)
if folder is not None:
    os.chdir(folder)
os.environ.clear()
os.environ.update(environment)
for name, mode, buffering in (("stdin", "r", -1), ("stdout", "w", -1), ("stderr", "w", 1)):
    old = getattr(sys, name)
    stream = open(old.fileno(), mode, buffering, old.encoding, old.errors, closefd=False)
    setattr(sys, name, stream)
    setattr(sys, f"__{name}__", stream)
sys.argv[:] = ["-c", *arguments]
signal.signal(signal.SIGINT, signal.default_int_handler)
_code = compile(code, "<string>", "exec")
for name in [name for name in globals() if not name.startswith("_")]:
    del globals()[name]
del name
exec(_code)
"""

_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER


class _Template:
    """The process that forks; a fork's parent ends at once, so that the fork becomes a child of this process."""

    def __init__(self, modules: tuple[str, ...]) -> None:
        self._socket, theirs = socket.socketpair()
        self._lock = threading.Lock()
        self._prctl = ctypes.CDLL(None).prctl
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-W", "error", "-c", _LOOP, str(theirs.fileno()), *modules],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )

    def fork(self, request: bytes, fds: list[int]) -> int:
        with self._lock:
            self._prctl(_SUBREAPER, 1, 0, 0, 0)
            try:
                socket.send_fds(self._socket, [request], fds)
                pid = self._socket.recv(8)
            finally:
                self._prctl(_SUBREAPER, 0, 0, 0, 0)
        assert pid, "the process that forks has ended"
        return int.from_bytes(pid)


@functools.cache
def _template(modules: tuple[str, ...]) -> _Template:
    return _Template(modules)


class Forked(subprocess.Popen[Any]):
    """A process that runs code as `python -W error -c` does, with tstore imported; `args` are its arguments.

    The template imports the `modules` too, once for all processes that name the same.
    """

    def __init__(self, code: str, *arguments: object, modules: tuple[str, ...] = (), **options: Any) -> None:
        self._code, self._modules = code, modules
        super().__init__(list(map(str, arguments)), **options)

    def _execute_child(self, args: list[str], *options: Any) -> None:
        """Fork the template, where `Popen` starts an interpreter."""
        folder, environment, pipes = options[4], options[5] or os.environ, options[9:15]
        request = (self._code, args, folder and os.fspath(folder), dict(environment))
        fds = [standard if fd == -1 else fd for standard, fd in enumerate((pipes[0], pipes[3], pipes[5]))]
        try:
            self.pid = _template(self._modules).fork(msgspec.msgpack.encode(request), fds)
            self._child_created = True
        finally:
            self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]
