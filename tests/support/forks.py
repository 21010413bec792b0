"""Cheap test processes, forked from one that has imported everything and has no threads."""

from __future__ import annotations

import contextlib
import json
import subprocess
import textwrap
import threading
from collections.abc import Iterator

from tests.support import processes

_SERVER = """
    import importlib, json, os, signal, sys
    import numpy, tstore, tstore.sync, tstore.lab.conformance.faults
    import tstore.lab.demo  # imports that are lazy elsewhere
    from tstore.lab.simulation.scenario import import_core
    for name in tstore.__all__:
        getattr(tstore, name), getattr(tstore.sync, name)
    import_core()
    code = compile(sys.argv[1], "job", "exec")
    for name in sys.argv[2:]:
        importlib.import_module(name)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    waiting, arrived = os.pipe()  # each process that waits at the gate writes a byte
    gate, latch = os.pipe()  # closing the latch opens the gate

    def ready():
        os.write(arrived, b".")
        os.read(gate, 1)

    print("ready", flush=True)
    for text in sys.stdin:
        order = json.loads(text)
        if order["do"] == "wait":
            print(json.dumps(os.waitstatus_to_exitcode(os.waitpid(order["pid"], 0)[1])), flush=True)
            continue
        if order["do"] == "release":
            for _ in range(order["count"]):
                os.read(waiting, 1)
            os.close(latch)
            os.close(gate)
            gate, latch = os.pipe()
            print(0, flush=True)
            continue
        pid = os.fork()
        if pid == 0:
            status = 1
            os.close(latch)
            try:
                out = os.open(order["out"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
                exec(code, {"arguments": order["arguments"], "out": out, "ready": ready})
                status = 0
            except BaseException as error:
                os.write(2, f"{type(error).__name__}: {error}\\n".encode())
            finally:
                os._exit(status)
        print(json.dumps(pid), flush=True)
"""


class Forks:
    """Starts processes that run one piece of code, and waits for them; each appends lines to a file atomically."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._lock = threading.Lock()

    def start(self, out: object, *arguments: object) -> int:
        """Start a process and return its pid.

        Its code has the variables `arguments`, `out`, the descriptor of its file, and `ready`, a function that
        waits until the process is released.
        """
        return self._ask({"do": "fork", "out": str(out), "arguments": arguments})

    def release(self, count: int) -> None:
        """Wait until this many processes are ready, and let all of them go on at the same moment."""
        self._ask({"do": "release", "count": count})

    def wait(self, pid: int) -> int:
        """Wait for a process and return its exit status, which is negative if a signal ended it."""
        return self._ask({"do": "wait", "pid": pid})

    def _ask(self, order: dict[str, object]) -> int:
        with self._lock:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(order, default=str) + "\n")
            self._process.stdin.flush()
            return int(processes.line(self._process))


@contextlib.contextmanager
def forks(code: str, *modules: str) -> Iterator[Forks]:
    """Provide processes that run the code, forked after tstore and these modules are imported."""
    server = processes.start(_SERVER, textwrap.dedent(code), *modules)
    with processes.running(server):
        assert processes.line(server) == "ready"
        yield Forks(server)
