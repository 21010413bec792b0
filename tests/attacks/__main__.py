"""`python -m tests.attacks`: everything that is known to try against a server and a client of tstore.

It starts the servers itself, on this machine's loopback alone, and ends them; exit status 1 if anything broke.
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
from tests.attacks.groups import PRELOAD, SHARES, groups
from tests.attacks.judge import Group, Result, run
from tests.attacks.specimen import Specimen
from tests.attacks.stage import Stage
from tests.attacks.table import show
from tests.attacks.target import lay_out


async def attack(names: list[str], seconds: float, seed: int, console: Console) -> list[Result]:
    """Run the groups of these names, within about so many seconds together.

    Those that need no server mostly wait, so they run beside the others, but not beside floods.
    """
    results = {name: Result(name) for name in names}
    wanted = [group for group in groups(seed) if group.name in names]
    left, shares = seconds, sum(SHARES[group.name] for group in wanted)
    with tempfile.TemporaryDirectory(prefix="tstore-attacks-") as folder:
        bare, whole = Path(folder) / "bare", Path(folder) / "whole"
        bare.mkdir()
        lay_out(bare)
        specimen = await Specimen.make(whole / "store")

        async def begin(group: Group, share: float) -> None:
            stage = Stage(bare if group.bare else whole, specimen, Children(PRELOAD), seed)
            if group.tls:
                stage.with_tls()

            def tell(case: Case, message: str) -> None:
                text = f"{group.name}: {case.name}: {message}"
                console.print(text, markup=False, highlight=False, soft_wrap=True)

            await run(group, stage, share, results[group.name], tell)

        async with asyncio.TaskGroup() as tasks:
            beside = [tasks.create_task(begin(group, seconds / 2)) for group in wanted if group.together]
            for group in wanted:
                if group.together:
                    continue
                if group.name == "floods" and beside:
                    await asyncio.wait(beside)
                began = time.monotonic()
                await begin(group, left * SHARES[group.name] / shares)
                left, shares = left - (time.monotonic() - began), shares - SHARES[group.name]
    return list(results.values())


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m tests.attacks", description=__doc__)
    parser.add_argument("--group", action="append", choices=list(SHARES), help="run this group only; repeatable")
    parser.add_argument("--seconds", type=float, default=300, help="for all groups together (default: 300)")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn at random (default: 0)")
    parser.add_argument("--json", action="store_true", help="print the outcome as JSON")
    parser.add_argument("--list", action="store_true", help="print the cases, and what holds if they fail")
    asked = parser.parse_args()
    names = asked.group or list(SHARES)
    if asked.list:
        for group in groups(asked.seed):
            for case in group.cases if group.name in names else ():
                print(f"{group.name}: {case.name}: {case.does}; held: {case.held}")
        return 0
    results = asyncio.run(attack(names, asked.seconds, asked.seed, Console(stderr=True)))
    if asked.json:
        print(json.dumps([result.document() for result in results]))
    else:
        show(results, Console())
    return 1 if any(result.broken for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
