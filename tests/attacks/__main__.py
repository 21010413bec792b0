"""`python -m tests.attacks`: run all known attacks on a server and on clients of tstore.

It starts the servers itself, on localhost only, and stops them. The exit status is 1 if an attack succeeded, and 3
if none did but some cases were not tried.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console

from tests.attacks.case import Case
from tests.attacks.children import Children
from tests.attacks.groups import NAMES, PRELOAD, groups
from tests.attacks.harness import Harness
from tests.attacks.runner import Group, Result, run, share, untried
from tests.attacks.sample_store import SampleStore
from tests.attacks.table import show
from tests.attacks.target import lay_out


async def attack(names: list[str], seconds: float, seed: int, console: Console) -> list[Result]:
    """Run the groups of these names, within about this many seconds in total.

    Groups that need no server mostly wait, so they run concurrently with others, except floods.
    """
    results = {name: Result(name) for name in names}
    chosen = [group for group in groups(seed) if group.name in names]
    alone = [group for group in chosen if not group.together]
    floods = sum(group.expected for group in alone if group.name == "floods")
    ends = time.monotonic() + seconds
    with tempfile.TemporaryDirectory(prefix="tstore-attacks-") as folder:
        bare, whole = Path(folder) / "bare", Path(folder) / "whole"
        bare.mkdir()
        lay_out(bare)
        sample = await SampleStore.make(whole / "store")

        async def begin(group: Group, most: float) -> None:
            harness = Harness(bare if group.bare else whole, sample, Children(PRELOAD), seed)
            if group.tls:
                harness.with_tls()

            def tell(case: Case, message: str) -> None:
                text = f"{group.name}: {case.name}: {message}"
                console.print(text, markup=False, highlight=False, soft_wrap=True)

            await run(group, harness, most, results[group.name], tell)

        async with asyncio.TaskGroup() as tasks:
            beside = [
                tasks.create_task(begin(group, max(seconds / 2, seconds - floods)))
                for group in chosen
                if group.together
            ]
            for at, group in enumerate(alone):
                if group.name == "floods" and beside:
                    await asyncio.wait(beside)
                later = sum(other.expected for other in alone[at + 1 :])
                await begin(group, share(ends - time.monotonic(), group.expected, later))
    return list(results.values())


def enough(names: list[str], seed: int) -> float:
    """Return the seconds that groups of these names need on a busy machine."""
    chosen = [group for group in groups(seed) if group.name in names]
    beside = sum(group.expected for group in chosen if group.together)
    return 60.0 + beside + 1.5 * sum(group.expected for group in chosen if not group.together)


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m tests.attacks", description=__doc__)
    parser.add_argument("--group", action="append", choices=NAMES, help="run this group only; repeatable")
    parser.add_argument(
        "--seconds", type=float, help="time for all groups together (default: what two slow cores need)"
    )
    parser.add_argument("--seed", type=int, default=0, help="random seed (default: 0)")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    parser.add_argument("--list", action="store_true", help="print the cases and the properties they try to break")
    options = parser.parse_args()
    names = options.group or list(NAMES)
    if options.list:
        for group in groups(options.seed):
            for case in group.cases if group.name in names else ():
                print(f"{group.name}: {case.name}: {case.does}; held: {case.held}")
        return 0
    seconds = enough(names, options.seed) if options.seconds is None else options.seconds
    results = asyncio.run(attack(names, seconds, options.seed, Console(stderr=True)))
    if options.json:
        print(json.dumps([result.document() for result in results]))
    else:
        show(results, Console())
    missing = untried(results, seconds)
    if missing:
        print(missing, file=sys.stderr)
    return 1 if any(result.broken for result in results) else 3 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
