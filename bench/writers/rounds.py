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
process (see `bench.writers.stores`), and providing free memory (see `machine.Reserve`).
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench import machine
from bench.processes import HostError, Hosts
from bench.writers.peers import CONTENDERS
from bench.writers.stores import SIDE, SMALL, STATE

Row = dict[str, Any]
"""One measurement: question, contender, hosts, tasks, durable, round, and its figures or error."""

COOPERATIVE = ("raw", "tstore-apart", "tstore", "ts-shared", "ts-merged", "icechunk")
INDEPENDENT = ("raw-files", "tstore", "ts-shared", "icechunk")
KILLED = ("tstore", "ts-shared", "ts-merged")

_KILL_AFTER = 0.1  # seconds; no contender has saved a gigabyte by then


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
        for name in _rotated(COOPERATIVE, turn):
            if CONTENDERS[name].fsync or not durable:
                self._attempt("cooperative", name, hosts, 1, durable, turn, self._save)

    def independent(self, hosts: int, tasks: int, durable: bool, turn: int, seconds: float) -> None:
        """Measure one round of all contenders, in `hosts` processes of `tasks` tasks each."""

        def commit(name: str, hosts: int, tasks: int, durable: bool) -> Row:
            return self._commit(name, hosts, tasks, durable, seconds)

        for name in _rotated(INDEPENDENT, turn):
            contender = CONTENDERS[name]
            if (contender.fsync or not durable) and (contender.tasks or tasks == 1):
                self._attempt("independent", name, hosts, tasks, durable, turn, commit)

    def killed(self, hosts: int, turn: int) -> None:
        """Measure one round of all contenders, with fsync."""
        for name in _rotated(KILLED, turn):
            self._attempt("killed", name, hosts, 1, True, turn, self._kill)

    def _attempt(
        self,
        question: str,
        name: str,
        hosts: int,
        tasks: int,
        durable: bool,
        turn: int,
        measure: Callable[[str, int, int, bool], Row],
    ) -> None:
        row: Row = {"question": question, "contender": name, "hosts": hosts}
        row |= {"tasks": tasks, "durable": durable, "round": turn}
        what = f"{question}: {CONTENDERS[name].title}, {hosts} hosts" + (f" × {tasks} tasks" if tasks > 1 else "")
        if time.monotonic() > self.end:
            self.skipped.append(what)
            return
        self._log(what)
        try:
            row |= measure(name, hosts, tasks, durable)
        except (HostError, ImportError, ValueError) as error:
            row["error"] = str(error).splitlines()[0][:200]
            self._log(f"{question}: {name}: {row['error']}")
        self._reserve.release()
        self.rows.append(row)

    def _hosts(self, name: str, hosts: int, durable: bool) -> Hosts:
        return Hosts(hosts, CONTENDERS[name], durable)

    def _save(self, name: str, hosts: int, tasks: int, durable: bool) -> Row:
        machine.clear(self.folder)
        with self._hosts(name, hosts, durable) as job:
            self._rehearse(name, job, "rehearsal")
            self._enter(job, "store")
            job.call("create", 0, hosts=[0])
            job.call("open", 0)
            self._make_room()
            start, numbers = job.call_at_once("save", 0)
            end, written = self._end(name, job, numbers)
            job.call("check")
        seconds = end - start
        return {"seconds": seconds, "gbps": STATE / 1e9 / seconds, "coordination": (end - written) / seconds}

    def _enter(self, job: Hosts, folder: str, side: int = SIDE) -> None:
        path = self.folder / folder
        path.mkdir(exist_ok=True)
        job.call("enter", f"{path}", side)
        job.call("generate")

    def _rehearse(self, name: str, job: Hosts, folder: str) -> None:
        """Run everything that is timed once, with a small state."""
        self._enter(job, folder, SMALL)
        job.call("create", 0, hosts=[0])
        job.call("open", 0)
        self._end(name, job, job.call_at_once("save", 0)[1])

    def _end(self, name: str, job: Hosts, numbers: Sequence[int]) -> tuple[float, float]:
        saved = job.results(numbers)
        end = max(s.ended for s in saved)
        if CONTENDERS[name].merges:
            [end] = job.call("merge", [s.payload for s in saved], hosts=[0])
        return end, max(s.written for s in saved)

    def _commit(self, name: str, hosts: int, tasks: int, durable: bool, seconds: float) -> Row:
        # the files of the others stay: ext4 without a journal reuses no inode within a minute of its deletion, and
        # looks at all of these whenever a file is created, which took more CPU than the commits
        folder = self.folder / f"commits-{len(self.rows)}"
        folder.mkdir(parents=True)
        os.sync()
        with self._hosts(name, hosts, durable) as job:
            job.call("enter", f"{folder}")
            job.call("create", hosts * tasks, hosts=[0])
            job.call("open", 0)
            cpu = -sum(job.call("cpu"))
            start, numbers = job.call_at_once("commit_for", seconds, tasks)
            writers = [writer for host in job.results(numbers) for writer in host]
            took = time.monotonic() - start
            cpu += sum(job.call("cpu"))
            made = [len(w.seconds) for w in writers]
            [lost] = job.call("lost", made, hosts=[0])
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

    def _kill(self, name: str, hosts: int, tasks: int, durable: bool) -> Row:
        machine.clear(self.folder)
        with self._hosts(name, hosts, durable) as job, self._hosts(name, hosts, durable) as after:
            self._rehearse(name, job, "rehearsal")
            self._rehearse(name, after, "rehearsal of the next")
            self._enter(job, "store")
            self._enter(after, "store")
            job.call("create", 0, hosts=[0])
            job.call("open", 0)
            after.call("open", 1)
            self._make_room()
            start, _ = job.call_at_once("save", 0)
            time.sleep(max(0.0, start + _KILL_AFTER - time.monotonic()))
            killed = time.monotonic()
            for number in [hosts // 2, *range(hosts)]:
                job.kill(number)
            _, numbers = after.call_at_once("save", 1)
            end, _ = self._end(name, after, numbers)
            after.call("check")
        return {"seconds": end - killed}

    def _make_room(self) -> None:
        self._reserve.acquire(STATE)
        self._reserve.release()


def _rotated(names: Sequence[str], by: int) -> Iterator[str]:
    yield from (names[(by + i) % len(names)] for i in range(len(names)))
