"""The command `python -m tstore.fuzz`."""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import itertools
import sys
import time
from collections import Counter
from collections.abc import Sequence

from tstore.fuzz.episode import Episode
from tstore.fuzz.journal import Fault
from tstore.fuzz.places import BACKENDS, place

__all__ = ["main"]

_HANGS = 300.0  # seconds of one episode after which the stacks are printed and the process ends


def main(arguments: Sequence[str] | None = None) -> int:
    """Run episodes for some time; return 1 where a store was not as the model has it."""
    parser = argparse.ArgumentParser("python -m tstore.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--episode", type=int, help="only the episode of this number")
    parser.add_argument("--processes", type=int, default=0, help="processes that work at once, beside this one's")
    parser.add_argument("--tasks", type=int, default=3, help="at once in this process; of 1 a seed tells all")
    parser.add_argument("--backend", choices=BACKENDS, default="local")
    parser.add_argument("--rounds", type=int, default=8, help="of each episode")
    parser.add_argument("--operations", type=int, default=40, help="of each worker in a round")
    parser.add_argument("--odd", type=int, default=6, help="calls with odd arguments after each round")
    parser.add_argument("--go-on", action="store_true", help="after a fault, with the next episode")
    options = parser.parse_args(arguments)
    if options.processes and options.backend == "memory":
        parser.error("processes have no memory in common; choose another backend")
    counted: Counter[str] = Counter()
    faults: dict[tuple[str, str], list[str]] = {}
    started, episodes = time.monotonic(), 0
    for number in itertools.count() if options.episode is None else (options.episode,):
        if time.monotonic() - started > options.seconds and episodes:
            break
        episode = _run(options, number)
        episodes += 1
        counted.update(episode.counted)
        for fault in (*episode.faults, *episode.refused):
            _tell(options, number, episode, fault, faults.setdefault((fault.verb, fault.kind), []))
        if sys.stderr.isatty():
            print(f"\r{sum(counted.values())} operations, {len(faults)} faults", end="", file=sys.stderr)
        if faults and not options.go_on:
            break
    summary = ", ".join(f"{verb} {count}" for verb, count in sorted(counted.items()))
    print(f"{episodes} episodes with {sum(counted.values())} operations: {summary}")
    for (verb, kind), seen in sorted(faults.items(), key=lambda item: -len(item[1])):
        print(f"fault: {verb}: {kind}, {len(seen)} times, first in episode {seen[0]}")
    return 1 if faults else 0


def _run(options: argparse.Namespace, number: int) -> Episode:
    with place(options.backend) as (where, quiesce):
        seed = f"{options.seed} {number}"
        replaceable = options.backend == "local"
        episode = Episode(
            seed, where, options.processes, tasks=options.tasks, replaceable=replaceable, quiesce=quiesce
        )
        faulthandler.dump_traceback_later(_HANGS, exit=True, file=2)
        try:
            asyncio.run(episode.run(options.rounds, options.operations, options.odd))
        except Exception as error:
            error.add_note(f"in episode {number} of seed {options.seed}")
            raise
        finally:
            faulthandler.cancel_dump_traceback_later()
    return episode


def _tell(options: argparse.Namespace, number: int, episode: Episode, fault: Fault, seen: list[str]) -> None:
    """Print a fault in full when it is met for the first time."""
    seen.append(str(number))
    if len(seen) > 1:
        return
    print(f"seed {options.seed}, episode {number}: {fault.verb}: {fault.kind}: {fault.text}", flush=True)
    if not options.go_on:
        print("the last operations: " + ", ".join(episode.last[-20:]))


if __name__ == "__main__":
    sys.exit(main())
