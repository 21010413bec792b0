"""The demonstration of `tstore demo`: save, crash, restart, restore and quantize, with real processes.

1. Eight host processes, each with its shards of a model on a mesh {data: 4, model: 2}, save a step as one commit.
2. They save the next step. One host writes half of its bytes and is then killed with SIGKILL. The others wait for
   it until their deadline and fail: the step does not exist, and the previous one still restores bit for bit.
3. The job is restarted as eight new processes with a new attempt, and saves the step.
4. Three other processes restore the step, each a third of every array, and compare it with the source bit for bit.
5. The step is quantized to e4m3 and to e3m2, each a new commit.

Nothing is simulated. Only the moment of the kill is chosen: the host reports when it has written half.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import secrets
import shlex
import shutil
import tempfile
import time
from collections.abc import AsyncIterator
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

import tstore
from tstore.checkpoint.structure import flatten
from tstore.convert.safetensors import Writer, open_tensors
from tstore.core.format.plain_text import format_size, pluralize
from tstore.core.maintenance.contents import contents
from tstore.core.storage.connect import connect
from tstore.errors import Corrupt, DeadlineExceeded, Inconsistent, InvalidArgument
from tstore.lab.hosts.model import advance, transformer
from tstore.lab.hosts.processes import STRUCTURE, Job, read_weights, same_bits

__all__ = ["demo"]

MESH = {"data": 4, "model": 2}
HOSTS = 8
RESTORE_MESH = {"hosts": 3}
VICTIM = 5
FORMATS = ("e4m3", "e3m2")

_KILLED_TIMEOUT = 2.0  # seconds that the other hosts wait for the killed one
_SAVE_TIMEOUT = 120.0  # seconds that hosts wait for a slow one

Tensors = dict[str, npt.NDArray[Any]]
Document: TypeAlias = dict[str, Any]
"""The results of the demo, as JSON values."""


class Progress(Protocol):
    """The output of the demo: what it is doing, and what it has done."""

    def doing(self, what: str) -> None:
        """Show what is being done."""

    def done(self, what: str) -> None:
        """Show what has been done."""


async def demo(
    store: str | None = None, *, model: str | None = None, size: int = 100_000_000, progress: Progress
) -> Document:
    """Run the demo and return the document of its results; the store remains, by default in a temporary folder.

    `model` is a safetensors file; by default a transformer of `size` bytes is generated. Raise
    `AlreadyExists` if there is a store at the URL. If the store, the file or a host fails, raise its error and
    remove the temporary folder. No process or temporary file remains in any case.
    """
    if store is not None and store.startswith("memory:"):
        raise InvalidArgument(f"{store}: eight processes can't share a store in memory; pass a folder")
    folder = tempfile.mkdtemp(prefix="tstore-demo-") if store is None else store
    try:
        with tempfile.TemporaryDirectory(prefix="tstore-weights-") as weights:
            return await _Demo(folder, store is None, weights, progress).run(model, size)
    except BaseException:
        if store is None:
            shutil.rmtree(folder, ignore_errors=True)
        raise


class _Demo:
    """One run of the demo: its store, its weights, and the commits made so far."""

    def __init__(self, store: str, temporary: bool, weights: str, progress: Progress) -> None:
        self._store = store
        self._temporary = temporary
        self._progress = progress
        self._files = [os.path.join(weights, f"{i}.safetensors") for i in range(2)]  # one for each step
        self._job_id = secrets.token_hex(4)
        self._starts = 0
        self._attempt = ""
        self._size = 0
        self._commits: list[Document] = []

    async def run(self, model: str | None, size: int) -> Document:
        started = time.perf_counter()
        await (await tstore.open(self._store, "x")).close()
        step = 0
        self._progress.doing("preparing the weights")
        name = await asyncio.to_thread(self._prepare_weights, model, size, step)
        tensors, _ = read_weights(self._files[0])
        self._size = sum(a.nbytes for a in tensors.values())
        mesh = " × ".join(f"{axis}={length}" for axis, length in MESH.items())
        arrays = f"{pluralize(len(tensors), 'array')}, {format_size(self._size)}"
        self._progress.done(f"{name}: {arrays}, sharded over {HOSTS} hosts by the mesh {mesh}")
        async with self._new_job() as job:
            await self._save(job, step, self._files[0])
            killed = await self._kill_during_save(job, step + 1, tensors)
        self._progress.doing(f"starting the job again: {HOSTS} new host processes")
        async with self._new_job() as job:
            await self._save(job, step + 1, self._files[1])
        restored = await self._restore(step + 1)
        async with await tstore.open(self._store) as opened:
            for format in FORMATS:
                await self._quantize(opened, step + 1, format)
            self._progress.doing("verifying every checksum")
            report = await opened.verify()
            if not report.ok:
                raise Corrupt(f"{self._store} is damaged: {'; '.join(report.faults[:3])}")
        checked = f"{pluralize(report.chunks, 'chunk')}, {format_size(report.bytes)}"
        self._progress.done(f"verified: {checked}, no fault")
        return {
            "store": connect(self._store).url,
            "temporary": self._temporary,
            "model": name,
            "arrays": len(tensors),
            "bytes": self._size,
            "mesh": MESH,
            "hosts": HOSTS,
            "killed": killed,
            "restored": restored,
            "commits": self._commits,
            "chunks_verified": report.chunks,
            "seconds": time.perf_counter() - started,
            "try_next": self._suggestions(step + 1),
        }

    def _prepare_weights(self, model: str | None, size: int, step: int) -> str:
        """Write the weights of both steps to files that every host can map; return the name of the model."""
        if model is not None:
            tensors, _ = open_tensors(model)
            os.symlink(os.path.abspath(model), self._files[0])
            _write_safetensors(self._files[1], _next_weights(tensors, step + 1))
            return os.path.basename(model)
        tree = {**transformer(size), "step": np.int64(step)}
        for file, state in zip(self._files, (tree, advance(tree, step + 1)), strict=True):
            document, leaves = flatten(state)
            _write_safetensors(file, leaves, {STRUCTURE: json.dumps(document)})
        return "a generated transformer"

    @contextlib.asynccontextmanager
    async def _new_job(self) -> AsyncIterator[Job]:
        """Start the job with new host processes and a new attempt."""
        self._progress.doing(f"starting {HOSTS} host processes")
        self._attempt = f"demo-{self._job_id}.{self._starts}"
        self._starts += 1
        async with Job(HOSTS) as job:
            yield job

    def _save_arguments(self, step: int, timeout: float) -> dict[str, Any]:
        return {"store": self._store, "step": step, "attempt": self._attempt, "timeout": timeout}

    async def _save(self, job: Job, step: int, weights: str) -> None:
        await job.ask("load", weights=weights, mesh=MESH)
        self._progress.doing(f"{HOSTS} hosts save step {step}")
        started = time.perf_counter()
        replies = await job.ask("save", **self._save_arguments(step, _SAVE_TIMEOUT))
        seconds = time.perf_counter() - started
        versions = {reply["version"] for reply in replies}
        if len(versions) != 1:
            raise Inconsistent(f"the hosts saw several commits of step {step}: versions {sorted(versions)}", [])
        row = await self._commit_row(versions.pop(), None, seconds)
        self._commits.append(row)
        self._progress.done(
            f"{HOSTS} hosts saved step {step} at the same moment: one commit, version {row['version']}"
        )

    async def _kill_during_save(self, job: Job, step: int, previous: Tensors) -> Document:
        """Kill a host during a save, and check that the step does not exist and the previous one restores."""
        await job.ask("load", weights=self._files[1], mesh=MESH)
        self._progress.doing(f"{HOSTS} hosts save step {step}; host {VICTIM} will be killed halfway")
        arguments = self._save_arguments(step, _KILLED_TIMEOUT)

        async def kill_halfway() -> int:
            victim = job.hosts[VICTIM]
            written = int((await victim.ask("save", **arguments, halt=True)).get()["written"])
            await victim.kill()
            return written

        survivors = [host.ask("save", **arguments) for host in job.hosts if host.number != VICTIM]
        written, *replies = await asyncio.gather(kill_halfway(), *survivors)
        failures = [reply.error for reply in replies if isinstance(reply.error, DeadlineExceeded)]
        if len(failures) != HOSTS - 1:
            other = next(r for r in replies if not isinstance(r.error, DeadlineExceeded))
            raise other.error or Inconsistent(f"host {other.host} saved step {step} without host {VICTIM}", [])
        # a host whose deadline comes early may also name hosts that are only slow
        absent = sorted(set.intersection(*[set(e.absent) for e in failures]))
        self._progress.done(
            f"host {VICTIM} was killed with SIGKILL after writing {format_size(written)} of step {step}; "
            f"the other {len(failures)} waited {_KILLED_TIMEOUT:g} s, then failed with "
            f"{type(failures[0]).__name__}, which names host {', '.join(map(str, absent))}"
        )
        steps = await tstore.steps(self._store)
        self._progress.doing(f"restoring step {step - 1}")
        tree = await tstore.restore(self._store, step - 1)
        restored = flatten(tree)[1]
        equal = restored.keys() == previous.keys() and all(same_bits(restored[p], previous[p]) for p in restored)
        if step in steps or not equal:
            raise Corrupt(
                f"{self._store}: a killed save took effect; the steps are {steps}, step {step - 1} equal: {equal}"
            )
        self._progress.done(f"step {step} does not exist; step {step - 1} still restores, bit for bit")
        return {
            "step": step,
            "host": VICTIM,
            "written": written,
            "survivors": len(failures),
            "absent": absent,
            "error": "DeadlineExceeded",
            "message": str(failures[0]),
            "steps_after": steps,
            "previous_step": step - 1,
            "previous_step_equal": equal,
        }

    async def _restore(self, step: int) -> Document:
        count = RESTORE_MESH["hosts"]
        self._progress.doing(f"{count} other hosts restore step {step}")
        async with Job(count) as job:
            await job.ask("ready")  # so that all start together
            arguments = {"store": self._store, "step": step, "weights": self._files[1], "mesh": RESTORE_MESH}
            replies = await job.ask("restore", **arguments)
        differing = sorted({path for reply in replies for path in reply["differing"]})
        if differing:
            raise Corrupt(f"{self._store}: step {step} was restored with other values: {', '.join(differing[:5])}")
        seconds = max(reply["seconds"] for reply in replies)
        size = sum(reply["bytes"] for reply in replies)
        self._progress.done(f"{count} hosts restored step {step}, a third each: equal to the source, bit for bit")
        counts = {"hosts": count, "mesh": RESTORE_MESH, "arrays": replies[0]["arrays"], "bytes": size}
        return {"step": step, **counts, "equal": True, "seconds": seconds, "gb_per_s": size / seconds / 1e9}

    async def _quantize(self, store: tstore.Store, step: int, format: str) -> None:
        self._progress.doing(f"quantizing step {step} to {format}")
        started = time.perf_counter()
        report = await tstore.quantize(store, format, at=f"step/{step}")
        row = await self._commit_row(report.version, report.sqnr, time.perf_counter() - started)
        self._commits.append(row)
        bits = f"{row['bits_per_value']:.2f} bits/value"
        self._progress.done(f"quantized to {format}: version {row['version']}, {bits}")

    async def _commit_row(self, version: int, sqnr: float | None, seconds: float) -> Document:
        async with await tstore.open(self._store, "r") as store:
            arrays = contents(await store.snapshot(version))
            commit = await anext(c async for c in store.history() if c.version == version)
        stored = sum(a.stored_bytes for a in arrays)
        return {
            "version": version,
            "tag": commit.tag or "",
            "bytes_added": commit.bytes_added,
            "bytes_stored": stored,
            "bits_per_value": 8 * stored / sum(a.size for a in arrays),
            "sqnr_db": sqnr if sqnr is not None and math.isfinite(sqnr) else None,
            "seconds": seconds,
            "gb_per_s": self._size / seconds / 1e9,
        }

    def _suggestions(self, step: int) -> list[str]:
        url = shlex.quote(self._store)
        return [
            f"tstore log {url}",
            f"tstore view {url}",
            f"tstore ls {url} --at step/{step}/{FORMATS[0]}",
            f"tstore verify {url}",
            f"tstore export {url} out.safetensors --at step/{step}/{FORMATS[0]}",
            *([f"rm -r {url}"] if self._temporary else []),
        ]


def _write_safetensors(file: str, tensors: Tensors, metadata: dict[str, str] | None = None) -> None:
    with Writer(file, {n: (a.dtype, a.shape) for n, a in tensors.items()}, metadata) as out:
        for name, array in tensors.items():
            out.write(name, array)


def _next_weights(tensors: Tensors, step: int) -> Tensors:
    """Return the weights of the next step: embeddings and integers unchanged, others perturbed by about 1%."""
    trainable = {n: a for n, a in tensors.items() if _is_float(a) and "embed" not in n}
    new = advance({"params": trainable}, step)["params"]
    return {n: new[n].astype(a.dtype, copy=False) if n in new else a for n, a in tensors.items()}


def _is_float(array: npt.NDArray[Any]) -> bool:
    return array.dtype.name in ("float16", "bfloat16", "float32", "float64")
