"""The questions that the benchmark of many writers measures, and their figures.

cooperative    All hosts save their parts of 1 GiB as one state: seconds until the last call has returned (and host
               0 has merged, if it must), and the share of this time after the last host's bytes were written.
independent    Small commits for some seconds, each of another chunk: their rate and latency, and the number of
               acknowledged commits that are lost.
killed         One host is killed while all save, and then the rest of the job, as a launcher does. The hosts of
               the next attempt, which run already, begin at once: seconds from the kill to the commit of that
               attempt.

All contenders of one question take turns, in an order that rotates by one each round. Not timed are: starting
processes, emptying the folder, syncing the disk, opening stores, generating the arrays, the first use in each
process (so each first runs everything once with a small state, since threads and pages shared by a fork are costs
of processes, not of stores), and providing free memory (see `machine.Reserve`).
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bench import machine
from bench.contender import Contender, Saved
from bench.peers.icechunk import Icechunk
from bench.peers.raw import RawFiles, RawOneThread
from bench.peers.tensorstore import TensorStoreMerged, TensorStoreShared
from bench.peers.tstore import TStore, TStoreApart
from bench.processes import HostError, Hosts, until
from bench.rounds import rotated
from bench.workloads import Weights

Row = dict[str, Any]
"""One measurement: question, contender, hosts, tasks, durable, round, and its figures or error."""

CONTENDERS: dict[str, type[Contender]] = {
    "raw": RawOneThread,
    "raw-files": RawFiles,
    "tstore": TStore,
    "tstore-apart": TStoreApart,
    "ts-shared": TensorStoreShared,
    "ts-merged": TensorStoreMerged,
    "icechunk": Icechunk,
}
COOPERATIVE = ("raw", "tstore-apart", "tstore", "ts-shared", "ts-merged", "icechunk")
INDEPENDENT = ("raw-files", "tstore", "ts-shared", "icechunk")
KILLED = ("tstore", "ts-shared", "ts-merged")

STATE = Weights("state", "1 GiB in 16 arrays of 4096×4096", 16, (4096, 4096), (4096, 4096))

_KILL_AFTER = 0.1  # seconds; no contender has saved a gigabyte by then


class Setting(NamedTuple):
    """What a row measures, without its question."""

    contender: str
    hosts: int
    tasks: int
    durable: bool
    round: int


class Committed(NamedTuple):
    """The latencies of one writer's small commits in seconds, and the number of retries."""

    seconds: list[float]
    retries: int


class WriterProcess:
    """One of `count` writers of a store; see `bench.processes.Hosts`."""

    def __init__(self, number: int, count: int, make: type[Contender], durable: bool) -> None:
        self._number = number
        self._contender = make(number, count, Path(), STATE, durable)

    def generate(self) -> None:
        """Generate this host's part of the state."""
        len(self._contender.arrays)

    def do(self, method: str, *arguments: Any) -> Any:
        """Call a method of the contender."""
        return getattr(self._contender, method)(*arguments)

    def save(self, start: float, attempt: int) -> Saved:
        """Save this host's part of the state, beginning at the time `start`."""
        until(start)
        return self._contender.save_part(attempt)

    def check(self) -> None:
        """Raise `ValueError` unless this host's part of the state reads back unchanged."""
        for name, part in self._contender.arrays.items():
            if not np.array_equal(self._contender.read_part(name), part):
                raise ValueError(f"{name} of host {self._number} is not what was saved")

    def commit_for(self, start: float, seconds: float, tasks: int) -> list[Committed]:
        """Make small commits from the time `start` on, at least one in each of `tasks` concurrent sequences."""

        async def all_of_them() -> list[Committed]:
            return await asyncio.gather(*[self._commit_until(n, start + seconds) for n in range(tasks)])

        until(start)
        return self._contender.runner.run(all_of_them())

    async def _commit_until(self, task: int, moment: float) -> Committed:
        writer = self._number + task  # unique, since there is only one host or only one task for each host
        latencies: list[float] = []
        retries = 0
        while (before := time.monotonic()) < moment or not latencies:
            retries += await self._contender.commit(writer, len(latencies))
            latencies.append(time.monotonic() - before)
        return Committed(latencies, retries)

    def cpu(self) -> float:
        """Return the CPU seconds of this process so far, of all its threads."""
        return time.process_time()


class Bench:
    """Runs measurements in a folder, appends their rows to `rows`, and reports progress to `log`.

    After the time `end`, by `time.monotonic`, it begins none, and appends them to `skipped`.
    """

    def __init__(self, folder: Path, log: Callable[[str], None], end: float = math.inf) -> None:
        self.folder = folder
        self.rows: list[Row] = []
        self.end = end
        self.skipped: list[str] = []
        self._log = log
        self._reserve = machine.Reserve()

    def cooperative(self, hosts: int, durable: bool, turn: int) -> None:
        """Measure one round of all contenders."""
        for name in rotated(COOPERATIVE, turn):
            if durable in CONTENDERS[name].durabilities:
                self._attempt("cooperative", self._save, Setting(name, hosts, 1, durable, turn))

    def independent(self, hosts: int, tasks: int, durable: bool, turn: int, seconds: float) -> None:
        """Measure one round of all contenders, in `hosts` processes of `tasks` tasks each."""
        for name in rotated(INDEPENDENT, turn):
            if durable in CONTENDERS[name].durabilities and (CONTENDERS[name].tasks or tasks == 1):
                setting = Setting(name, hosts, tasks, durable, turn)
                self._attempt("independent", partial(self._commit, seconds=seconds), setting)

    def killed(self, hosts: int, turn: int) -> None:
        """Measure one round of all contenders, with fsync."""
        for name in rotated(KILLED, turn):
            self._attempt("killed", self._kill, Setting(name, hosts, 1, True, turn))

    def _attempt(self, question: str, measure: Callable[[Setting], Row], of: Setting) -> None:
        row: Row = {"question": question, **of._asdict()}
        what = f"{question}: {CONTENDERS[of.contender].title}, {of.hosts} hosts"
        what += f" × {of.tasks} tasks" if of.tasks > 1 else ""
        if time.monotonic() > self.end:
            self.skipped.append(what)
            return
        self._log(what)
        try:
            row |= measure(of)
        except (HostError, ImportError, ValueError) as error:
            row["error"] = str(error).splitlines()[0][:200]
            self._log(f"{question}: {of.contender}: {row['error']}")
        self._reserve.release()
        self.rows.append(row)

    def _job(self, of: Setting) -> Hosts:
        return Hosts(of.hosts, WriterProcess, CONTENDERS[of.contender], of.durable)

    def _save(self, of: Setting) -> Row:
        machine.clear(self.folder)
        with self._job(of) as job:
            self._rehearse(of, job, "rehearsal")
            self._enter(job, "store")
            job.call("do", "begin", 0, hosts=[0])
            job.call("do", "join", 0)
            self._make_room()
            start, numbers = job.call_at_once("save", 0)
            end, written = self._end(of, job, numbers)
            job.call("check")
        seconds = end - start
        figures = {"seconds": seconds, "gbps": STATE.nbytes / 1e9 / seconds}
        return figures | {"coordination": (end - written) / seconds}

    def _enter(self, job: Hosts, folder: str, work: Weights = STATE) -> None:
        path = self.folder / folder
        path.mkdir(exist_ok=True)
        job.call("do", "enter", path, work)
        job.call("generate")

    def _rehearse(self, of: Setting, job: Hosts, folder: str) -> None:
        """Run everything that is timed once, with a small state."""
        self._enter(job, folder, STATE.small())
        job.call("do", "begin", 0, hosts=[0])
        job.call("do", "join", 0)
        self._end(of, job, job.call_at_once("save", 0)[1])

    def _end(self, of: Setting, job: Hosts, numbers: Sequence[int]) -> tuple[float, float]:
        saved = job.results(numbers)
        end = max(s.ended for s in saved)
        if CONTENDERS[of.contender].merges:
            [end] = job.call("do", "merge", [s.payload for s in saved], hosts=[0])
        return end, max(s.written for s in saved)

    def _commit(self, of: Setting, seconds: float) -> Row:
        # the files of the others stay: ext4 without a journal reuses no inode within a minute of its deletion, and
        # looks at all of these whenever a file is created, which took more CPU than the commits
        folder = self.folder / f"commits-{len(self.rows)}"
        folder.mkdir(parents=True)
        os.sync()
        with self._job(of) as job:
            job.call("do", "enter", folder, STATE)
            job.call("do", "begin", of.hosts * of.tasks, hosts=[0])
            job.call("do", "join", 0)
            cpu = -sum(job.call("cpu"))
            start, numbers = job.call_at_once("commit_for", seconds, of.tasks)
            writers = [writer for host in job.results(numbers) for writer in host]
            took = time.monotonic() - start
            cpu += sum(job.call("cpu"))
            made = [len(w.seconds) for w in writers]
            [lost] = job.call("do", "lost", made, hosts=[0])
        each = np.concatenate([w.seconds for w in writers]) * 1e3
        return {
            "rate": sum(made) / took,
            "cpu_ms": 1e3 * cpu / sum(made),
            "p50_ms": float(np.quantile(each, 0.5)),
            "p99_ms": float(np.quantile(each, 0.99)),
            "fewest": min(made),
            "most": max(made),
            "commits": sum(made),
            "retries": sum(w.retries for w in writers),
            "lost": lost,
        }

    def _kill(self, of: Setting) -> Row:
        machine.clear(self.folder)
        with self._job(of) as job, self._job(of) as after:
            self._rehearse(of, job, "rehearsal")
            self._rehearse(of, after, "rehearsal of the next")
            self._enter(job, "store")
            self._enter(after, "store")
            job.call("do", "begin", 0, hosts=[0])
            job.call("do", "join", 0)
            after.call("do", "join", 1)
            self._make_room()
            start, _ = job.call_at_once("save", 0)
            time.sleep(max(0.0, start + _KILL_AFTER - time.monotonic()))
            killed = time.monotonic()
            for number in [of.hosts // 2, *range(of.hosts)]:
                job.kill(number)
            _, numbers = after.call_at_once("save", 1)
            end, _ = self._end(of, after, numbers)
            after.call("check")
        return {"seconds": end - killed}

    def _make_room(self) -> None:
        self._reserve.acquire(STATE.nbytes)
        self._reserve.release()
