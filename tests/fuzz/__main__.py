"""Apply random operations to real stores and compare them with a model.

Without worker processes and a server, an episode runs in virtual time and one thread, so that a seed repeats it.
"""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import itertools
import random
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Mapping, Sequence

from tests.fuzz.episode import Episode
from tests.fuzz.journal import Fault
from tests.fuzz.places import STORAGES, place
from tstore.core.runtime.pool import without_threads
from tstore.core.runtime.world import World, use_world
from tstore.lab.simulation.scenario import override_constants
from tstore.lab.simulation.virtual import VirtualLoop

__all__ = ["main"]

_HANGS = 900.0  # seconds per episode, after which the process prints all stacks and exits


def main(arguments: Sequence[str] | None = None) -> int:
    """Run episodes for some time and return the exit status: 1 if a store differed from the model."""
    parser = argparse.ArgumentParser("python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="total duration")
    parser.add_argument("--seed", type=int, default=0, help="seed of all episodes")
    parser.add_argument("--episode", type=int, help="run only the episode of this number")
    parser.add_argument("--processes", type=int, default=0, help="worker processes, besides this process")
    parser.add_argument("--tasks", type=int, default=3, help="concurrent workers in this process")
    parser.add_argument("--storage", choices=STORAGES, default="local", help="kind of storage")
    parser.add_argument("--rounds", type=int, default=8, help="rounds per episode")
    parser.add_argument("--operations", type=int, default=40, help="operations per worker and round")
    parser.add_argument("--odd", type=int, default=1, help="calls with odd arguments after each round")
    parser.add_argument("--archive-every", type=int, help="number of records per archive; they are archived early")
    parser.add_argument("--go-on", action="store_true", help="continue with the next episode after a fault")
    options = parser.parse_args(arguments)
    if options.processes and options.storage == "memory":
        parser.error("memory:// is not shared between processes; choose another --storage")
    if options.archive_every and options.storage == "serve":
        parser.error("a server archives records by its own constants; choose another --storage")
    constants = {"ARCHIVE_EVERY": options.archive_every, "ROOT_EVERY": 8} if options.archive_every else {}
    with override_constants(**constants):
        return _run_all(options, constants)


def _run_all(options: argparse.Namespace, constants: Mapping[str, int]) -> int:
    counts: Counter[str] = Counter()
    faults: dict[tuple[str, str], list[str]] = {}
    started, episodes = time.monotonic(), 0
    for number in itertools.count() if options.episode is None else (options.episode,):
        if time.monotonic() - started > options.seconds and episodes:
            break
        episode = _run(options, constants, number)
        episodes += 1
        counts.update(episode.counts)
        for fault in (*episode.faults, *episode.odd_faults):
            _tell(options, number, episode, fault, faults.setdefault((fault.verb, fault.kind), []))
        if sys.stderr.isatty():
            print(f"\r{sum(counts.values())} operations, {len(faults)} faults", end="", file=sys.stderr)
        if faults and not options.go_on:
            break
    summary = ", ".join(f"{verb} {count}" for verb, count in sorted(counts.items()))
    print(f"{episodes} episodes with {sum(counts.values())} operations: {summary}")
    for (verb, kind), seen in sorted(faults.items(), key=lambda item: -len(item[1])):
        print(f"fault: {verb}: {kind}, {len(seen)} times, first in episode {seen[0]}")
    return 1 if faults else 0


def _run(options: argparse.Namespace, constants: Mapping[str, int], number: int) -> Episode:
    with place(options.storage) as (location, quiesce):
        seed = f"{options.seed} {number}"
        replaceable = options.storage == "local"
        episode = Episode(
            seed,
            location._replace(constants=constants),
            options.processes,
            tasks=options.tasks,
            replaceable=replaceable,
            quiesce=quiesce,
        )
        faulthandler.dump_traceback_later(_HANGS, exit=True, file=2)
        work = episode.run(options.rounds, options.operations, options.odd)
        is_simulated = not options.processes and options.storage != "serve"
        try:
            if is_simulated:
                with asyncio.Runner(loop_factory=VirtualLoop) as runner:
                    runner.run(_run_in_virtual_time(work, seed))
            else:
                asyncio.run(work)
        except Exception as error:
            error.add_note(f"in episode {number} of seed {options.seed}")
            raise
        finally:
            faulthandler.cancel_dump_traceback_later()
    return episode


class _SeededWorld(World):
    """Identifiers and jitter drawn from a seed, so that a run with several tasks can be repeated."""

    def __init__(self, seed: str) -> None:
        self._random = random.Random(seed)

    def token(self, size: int) -> str:
        return self._random.randbytes(size).hex()

    def uniform(self, low: float, high: float) -> float:
        return self._random.uniform(low, high)


async def _run_in_virtual_time(work: Awaitable[None], seed: str) -> None:
    """Await work without threads: waits take no time, and blocking calls are made at once."""
    with use_world(_SeededWorld(seed)), without_threads(_proceed):
        await work


async def _proceed() -> None:
    """Let a blocking call be made now."""


def _tell(options: argparse.Namespace, number: int, episode: Episode, fault: Fault, seen: list[str]) -> None:
    """Count a fault, and print its first occurrence in full."""
    seen.append(str(number))
    if len(seen) > 1:
        return
    print(f"seed {options.seed}, episode {number}: {fault.verb}: {fault.kind}: {fault.text}", flush=True)
    if not options.go_on:
        print("the last operations: " + ", ".join(episode.last[-20:]))


if __name__ == "__main__":
    sys.exit(main())
