"""What is asked of the ways to share a store, and the figures of each answer.

``cooperative``  all hosts save their parts of 1 GiB as one state: seconds until the last call has returned (and
                 host 0 has merged, where it must), and the share of them after the last host's bytes were written
``independent``  small commits for a while, each to a place of its own: how many a second, how long each took, how
                 many that were acknowledged are not there afterwards
``killed``       one of the hosts that save is killed in the middle, and the rest of its job as a launcher does;
                 the next attempt's hosts, which are there already, begin at once: seconds from the kill to its
                 commit

All ways of one question take turns, in an order that is rotated by one each round. Outside of the timed regions:
starting processes, emptying the folder, waiting for the disk, opening stores, making the arrays, what a process
does the first time (see ``writer_stores``), and making sure that free memory is there (see ``machine.Reserve``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench import machine
from bench.writers.peers import WAYS
from bench.writers.processes import HostError, Hosts
from bench.writers.stores import SIDE, SMALL, STATE

Row = dict[str, Any]
"""One measurement: question, way, hosts, tasks, durable, round, and its figures, or the error that ended it."""

COOPERATIVE = ("raw", "tstore-apart", "tstore", "ts-shared", "ts-merged", "icechunk")
INDEPENDENT = ("tstore", "ts-shared", "icechunk")
KILLED = ("tstore", "ts-shared", "ts-merged")

_KILL_AFTER = 0.1  # seconds; no way has saved a gigabyte by then


class Bench:
    """Measures in ``folder``; what it says goes to ``say``, and each row to ``rows`` as well."""

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        self.folder = folder
        self.rows: list[Row] = []
        self._say = say
        self._reserve = machine.Reserve()

    def cooperative(self, hosts: int, durable: bool, turn: int) -> None:
        """One round of all ways."""
        for name in _rotated(COOPERATIVE, turn):
            if WAYS[name].fsync or not durable:
                self._attempt("cooperative", name, hosts, 1, durable, turn, self._save)

    def independent(self, hosts: int, tasks: int, durable: bool, turn: int, seconds: float) -> None:
        """One round of all ways, in ``hosts`` processes of ``tasks`` tasks each."""

        def commit(name: str, hosts: int, tasks: int, durable: bool) -> Row:
            return self._commit(name, hosts, tasks, durable, seconds)

        for name in _rotated(INDEPENDENT, turn):
            way = WAYS[name]
            if (way.fsync or not durable) and (way.tasks or tasks == 1):
                self._attempt("independent", name, hosts, tasks, durable, turn, commit)

    def killed(self, hosts: int, turn: int) -> None:
        """One round of all ways, with fsync."""
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
        row: Row = {"question": question, "way": name, "hosts": hosts}
        row |= {"tasks": tasks, "durable": durable, "round": turn}
        self._say(f"{question}: {WAYS[name].title}, {hosts} hosts" + (f" × {tasks} tasks" if tasks > 1 else ""))
        machine.settle(self.folder)
        (self.folder / "store").mkdir()  # which `independent` has them enter
        try:
            row |= measure(name, hosts, tasks, durable)
        except (HostError, ImportError, ValueError) as error:
            row["error"] = str(error).splitlines()[0][:200]
            self._say(f"{question}: {name}: {row['error']}")
        self._reserve.release()
        self.rows.append(row)

    def _hosts(self, name: str, hosts: int, durable: bool) -> Hosts:
        return Hosts(hosts, WAYS[name], durable)

    def _save(self, name: str, hosts: int, tasks: int, durable: bool) -> Row:
        with self._hosts(name, hosts, durable) as job:
            self._rehearse(name, job, "rehearsal")
            self._enter(job, "store")
            job.ask("create", 0, of=[0])
            job.ask("open", 0)
            self._make_room()
            start, asked = job.together("save", 0)
            end, written = self._end(name, job, asked)
            job.ask("check")
        seconds = end - start
        return {"seconds": seconds, "gbps": STATE / 1e9 / seconds, "coordination": (end - written) / seconds}

    def _enter(self, job: Hosts, folder: str, side: int = SIDE) -> None:
        path = self.folder / folder
        path.mkdir(exist_ok=True)
        job.ask("enter", f"{path}", side)
        job.ask("hold")

    def _rehearse(self, name: str, job: Hosts, folder: str) -> None:
        """Has the hosts do all that is timed once, with a small state."""
        self._enter(job, folder, SMALL)
        job.ask("create", 0, of=[0])
        job.ask("open", 0)
        self._end(name, job, job.together("save", 0)[1])

    def _end(self, name: str, job: Hosts, asked: Sequence[int]) -> tuple[float, float]:
        saved = job.answers(asked)
        end = max(s.ended for s in saved)
        if WAYS[name].merges:
            [end] = job.ask("merge", [s.payload for s in saved], of=[0])
        return end, max(s.written for s in saved)

    def _commit(self, name: str, hosts: int, tasks: int, durable: bool, seconds: float) -> Row:
        with self._hosts(name, hosts, durable) as job:
            job.ask("enter", f"{self.folder}/store")
            job.ask("create", hosts * tasks, of=[0])
            job.ask("open", 0)
            start, asked = job.together("commit_for", seconds, tasks)
            writers = [writer for host in job.answers(asked) for writer in host]
            took = time.monotonic() - start
            made = [len(w.seconds) for w in writers]
            [lost] = job.ask("lost", made, of=[0])
        each = np.concatenate([w.seconds for w in writers]) * 1e3
        return {
            "rate": sum(made) / took,
            "p50_ms": float(np.quantile(each, 0.5)),
            "p99_ms": float(np.quantile(each, 0.99)),
            "fewest": min(made),
            "most": max(made),
            "commits": sum(made),
            "retries": sum(w.retries for w in writers),
            "lost": lost,
        }

    def _kill(self, name: str, hosts: int, tasks: int, durable: bool) -> Row:
        with self._hosts(name, hosts, durable) as job, self._hosts(name, hosts, durable) as after:
            self._rehearse(name, job, "rehearsal")
            self._rehearse(name, after, "rehearsal of the next")
            self._enter(job, "store")
            self._enter(after, "store")
            job.ask("create", 0, of=[0])
            job.ask("open", 0)
            after.ask("open", 1)
            self._make_room()
            start, _ = job.together("save", 0)
            time.sleep(max(0.0, start + _KILL_AFTER - time.monotonic()))
            killed = time.monotonic()
            for number in [hosts // 2, *range(hosts)]:
                job.kill(number)
            _, asked = after.together("save", 1)
            end, _ = self._end(name, after, asked)
            after.ask("check")
        return {"seconds": end - killed}

    def _make_room(self) -> None:
        self._reserve.take(STATE)
        self._reserve.release()


def _rotated(names: Sequence[str], by: int) -> Iterator[str]:
    yield from (names[(by + i) % len(names)] for i in range(len(names)))
