"""Simulated hosts: a driver starts one process for each host and sends it commands.

1. `Job` starts the processes of one incarnation of a training job; a restarted job is another `Job`.
2. A command is one line of JSON on a host's standard input; its reply is one line on the standard output.
3. A host exits as soon as its input ends, because the job was closed or the driver died.

As in training, a host has copies of its own shards only. The weights come from a safetensors file.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from tstore import errors
from tstore.checkpoint.leaves import Shards
from tstore.checkpoint.restore import restore
from tstore.checkpoint.save import save
from tstore.checkpoint.structure import flatten, unflatten
from tstore.convert.safetensors import open_tensors
from tstore.core.storage.base import PackWriter, Storage
from tstore.core.storage.objects import Buffers, BufferStream, Durability, PutMode
from tstore.core.storage.wrapper import Wrapper
from tstore.core.store import open
from tstore.errors import DeadlineExceeded, TStoreError, Unavailable
from tstore.lab.hosts.forks import Forks
from tstore.lab.hosts.model import spec_for
from tstore.sharding import Mesh, P

__all__ = ["STRUCTURE", "Host", "Job", "Reply", "read_weights", "same_bits", "serve", "serve_commands"]

STRUCTURE = "structure"
"""The key of the structure document in a weights file's metadata; without a document, the tree is a flat dict."""

Values = npt.NDArray[Any]


class Reply(NamedTuple):
    """The reply of a host: a value, or the tstore error that the command raised."""

    host: int
    value: Any = None
    error: TStoreError | None = None

    def get(self) -> Any:
        """Return the value, or raise the error."""
        if self.error is not None:
            raise self.error
        return self.value


class Host:
    """The driver's side of one host process."""

    def __init__(self, number: int, forks: Forks) -> None:
        self.number = number
        self._forks = forks
        self._child = forks.children[number]
        self.pid = self._child.pid

    async def ask(self, command: str, **arguments: Any) -> Reply:
        """Send a command and return the reply; raise `Unavailable` if the process has ended."""
        line = b""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the process has ended
            self._child.writer.write(json.dumps({"command": command, **arguments}).encode() + b"\n")
            await self._child.writer.drain()
            line = await self._child.reader.readline()
        if not line:
            code = await asyncio.shield(self._child.exit_code)
            message = self._child.stderr().rpartition("\n")[2] or "it printed no error"
            raise Unavailable(f"the process of host {self.number} ended with code {code}: {message}")
        reply = json.loads(line)
        if "error" not in reply:
            return Reply(self.number, reply["value"])
        return Reply(self.number, error=_error(**reply["error"]))

    async def kill(self) -> None:
        """Kill the process with SIGKILL and wait for its end."""
        await self._forks.kill(self.number)


class Job:
    """The host processes of one incarnation of a job. They end with the `async with` block.

        async with Job(8) as job:
            sizes = await job.ask("load", weights=file, mesh={"data": 4, "model": 2})

    Each process calls `serve` of `module`, by default `tstore.lab.hosts.processes`.
    """

    def __init__(self, hosts: int, module: str = __name__) -> None:
        self._count = hosts
        self._module = module
        self._forks = Forks()
        self.hosts: list[Host] = []

    async def __aenter__(self) -> Self:
        try:
            await self._forks.start(self._module, self._count)
        except BaseException:
            await self._forks.close()
            raise
        self.hosts = [Host(number, self._forks) for number in range(self._count)]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._forks.close()

    async def ask(self, command: str, **arguments: Any) -> list[Any]:
        """Send the same command to every host and return the values of their replies, in the order of hosts.

        Raise the error of the first host that fails, as soon as it fails, and end all hosts: the others may be
        waiting for the one that failed.
        """

        async def value(host: Host) -> Any:
            return (await host.ask(command, **arguments)).get()

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(value(host)) for host in self.hosts]
        except BaseExceptionGroup as failures:
            await self._forks.close()
            raise failures.exceptions[0] from None
        return [task.result() for task in tasks]


def _error(kind: str, message: str, absent: Sequence[int]) -> TStoreError:
    """Return the error that a host reported."""
    error: type[TStoreError] = getattr(errors, kind, TStoreError)
    if error is DeadlineExceeded:
        return DeadlineExceeded(message, absent)
    return error.__new__(error, message)  # without `__init__`, since some constructors take other arguments


# ---- the host's side


class _Worker:
    """The shards and the commands of one host process."""

    def __init__(self, number: int, count: int, report_halt: Callable[[int], None]) -> None:
        self._number = number
        self._count = count
        self._report_halt = report_halt
        self._tree: Any = None
        self._size = 0

    async def load(self, weights: str, mesh: Mapping[str, int]) -> dict[str, int]:
        """Load this host's shards of the weights, which replace those loaded before; return their size."""
        tensors, document = read_weights(weights)
        device_mesh = Mesh(mesh)
        leaves = {path: self._shards(array, device_mesh) for path, array in tensors.items()}
        self._tree = unflatten(document, leaves)
        parts = [v for leaf in leaves.values() if isinstance(leaf, Shards) for _, v in leaf.parts]
        self._size = sum(v.nbytes for v in parts if v is not None)
        return {"bytes": self._size}

    async def save(
        self, store: str, step: int, attempt: str, timeout: float, halt: bool = False
    ) -> dict[str, float]:
        """Save the shards and return the version and the seconds; with `halt`, hang after half of the bytes."""
        async with await open(store) as opened:
            if halt:
                opened.log.storage = _HaltingStorage(opened.log.storage, self._size // 2, self._report_halt)
            started = time.perf_counter()
            version = await save(
                opened, self._tree, step, host=self._number, hosts=self._count, attempt=attempt, timeout=timeout
            )
            return {"version": version, "seconds": time.perf_counter() - started}

    async def ready(self) -> None:
        """Do nothing; the reply shows that the process has started."""

    async def restore(self, store: str, step: int, weights: str, mesh: Mapping[str, int]) -> dict[str, Any]:
        """Restore this host's rows of a step, and compare them bit for bit with the weights.

        Return the number of arrays and bytes, the seconds, and up to 20 paths of arrays that differ.
        """
        tensors, document = read_weights(weights)
        device_mesh = Mesh(mesh)
        target = {path: self._target(array, device_mesh) for path, array in tensors.items()}
        started = time.perf_counter()
        tree = await restore(store, step, target=unflatten(document, target))
        seconds = time.perf_counter() - started
        size, differing = 0, []
        for path, leaf in flatten(tree)[1].items():
            pairs = leaf.parts if isinstance(leaf, Shards) else [((), leaf)]
            for index, values in pairs:
                assert values is not None
                size += values.nbytes
                if not same_bits(values, tensors[path][index]):
                    differing.append(path)
        return {"arrays": len(target), "bytes": size, "seconds": seconds, "differing": differing[:20]}

    def _shards(self, array: Values, mesh: Mesh) -> Values | Shards:
        spec = spec_for(array.shape)
        if not any(spec):
            return np.array(array)  # replicated; `save` has one of the hosts write it
        views = Shards.of(array, mesh, spec, self._number)
        copies = [(index, np.array(values)) for index, values in views.parts]
        return Shards(views.shape, views.dtype, copies, shard_shape=views.shard_shape)

    def _target(self, array: Values, mesh: Mesh) -> Values | Shards:
        if array.ndim == 0:
            return np.empty((), array.dtype)
        return Shards.wanted(array.shape, array.dtype, mesh, P(mesh.axes), self._number)


def read_weights(file: str) -> tuple[dict[str, Values], Sequence[Any]]:
    """Return the arrays of a weights file by path, and the document that describes their tree."""
    tensors, metadata = open_tensors(file)
    if STRUCTURE not in metadata:
        document, tensors = flatten(tensors)
        return tensors, document
    return tensors, json.loads(metadata[STRUCTURE])


def same_bits(a: Values, b: Values) -> bool:
    """Return whether two arrays have the same dtype, shape and bits: NaN equals itself, 0.0 differs from -0.0."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    mine, other = (np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in (a, b))
    return np.array_equal(mine, other)


class _HaltingStorage(Wrapper):
    """A storage that hangs the process once `limit` bytes of packs are written, or else before the fragment."""

    def __init__(self, inner: Storage, limit: int, report_halt: Callable[[int], None]) -> None:
        super().__init__(inner)
        self._limit = limit
        self._report_halt = report_halt
        self._written = 0
        self._lock = threading.Lock()

    async def put(
        self, key: str, buffers: Buffers, mode: PutMode, durability: Durability = Durability.FSYNC
    ) -> None:
        if "/part-" in key:
            self._halt()  # the fragment follows the packs, which were too short to reach the limit
        await super().put(key, buffers, mode, durability)

    def writer(self, key: str, durability: Durability) -> PackWriter:
        return _HaltingPack(super().writer(key, durability), self)

    def count_written(self, size: int) -> None:
        """Count bytes of packs, and halt at the limit."""
        with self._lock:
            self._written += size
            if self._written >= self._limit:
                self._halt()

    def _halt(self) -> None:
        """Report the bytes written, then wait until the process is killed."""
        self._report_halt(self._written)
        threading.Event().wait()


class _HaltingPack:
    def __init__(self, pack: PackWriter, storage: _HaltingStorage) -> None:
        self.key = pack.key
        self._storage = storage
        self._append = pack.append
        self.finish = pack.finish
        self.discard = pack.discard

    def append(self, buffers: BufferStream, size: int) -> int | None:
        offset = self._append(buffers, size)
        self._storage.count_written(size)
        return offset


def serve(number: int, count: int) -> None:
    """Run a host that loads, saves and restores its shards of weights, until its input ends."""
    serve_commands(_Worker, number, count)


def serve_commands(
    make_worker: Callable[[int, int, Callable[[int], None]], object], number: int, count: int
) -> None:
    """Run host `number` of `count`: reply to the commands on standard input, which call methods of a worker.

    `make_worker` takes the number, the count, and a function. A worker that halts calls this function with the
    number of bytes that it has written.
    """
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # other output goes to standard error, so that it is not taken for a reply
    worker = make_worker(number, count, lambda written: reply(value={"written": written}))
    commands: queue.SimpleQueue[str] = queue.SimpleQueue()

    def reply(**fields: Any) -> None:
        replies.write(json.dumps(fields) + "\n")

    def listen() -> None:
        for line in sys.stdin:
            commands.put(line)
        os._exit(0)

    threading.Thread(target=listen, daemon=True).start()
    with asyncio.Runner() as runner:
        while True:
            command = json.loads(commands.get())
            try:
                reply(value=runner.run(getattr(worker, command.pop("command"))(**command)))
            except TStoreError as error:
                absent = error.absent if isinstance(error, DeadlineExceeded) else []
                reply(error={"kind": type(error).__name__, "message": str(error), "absent": absent})
