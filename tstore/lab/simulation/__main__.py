"""Simulate many hosts on a faulty store and check the promises of tstore.

python -m tstore.lab.simulation --seeds 10000        # many runs, on all cores
python -m tstore.lab.simulation --seed 17 --trace    # replay one run and print its events
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence

from tstore.lab.simulation.runs import simulate, simulate_many

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run many seeds, or one, and return the exit status: 1 if a run broke a promise."""
    parser = argparse.ArgumentParser(f"python -m {__package__}", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=1000, help="number of runs")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="run only this seed and print all broken promises")
    parser.add_argument("--trace", action="store_true", help="with --seed, print the events of the run")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="number of processes")
    options = parser.parse_args(arguments)
    if options.seed is not None:
        return _run_one(options.seed, trace=options.trace)
    started, runs, counts, broken = time.perf_counter(), 0, Counter[str](), 0
    for batch in simulate_many(range(options.first, options.first + options.seeds), options.processes):
        runs, counts, broken = runs + batch.runs, counts + batch.counts, broken + len(batch.broken)
        for outcome in batch.broken:
            print(f"\rseed {outcome.seed}: {outcome.violations[0]}", flush=True)
        if sys.stderr.isatty():
            print(f"\r{runs} of {options.seeds} runs, {broken} broken", end="", file=sys.stderr)
    seconds = time.perf_counter() - started
    made = ", ".join(f"{count} {kind}" for kind, count in counts.items())
    print(f"\r{runs} runs with {made}; {broken} broken; {runs / seconds:.0f} runs/s")
    return 1 if broken else 0


def _run_one(seed: int, *, trace: bool) -> int:
    outcome = simulate(seed)
    if trace:
        print("\n".join(outcome.trace))
    made = ", ".join(f"{count} {kind}" for kind, count in outcome.counts.items())
    print(f"seed {seed}: {made}; {len(outcome.violations)} violations")
    for violation in outcome.violations:
        print(violation)
    return 1 if outcome.violations else 0


if __name__ == "__main__":
    sys.exit(main())
