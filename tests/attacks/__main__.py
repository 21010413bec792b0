"""`python -m tests.attacks`: everything that is known to try against a server and a client of tstore.

It starts the servers itself, on this machine's loopback alone, and ends them; exit status 1 if anything broke.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "support"))

from rich.console import Console

from tests.attacks.case import Case
from tests.attacks.children import Children
from tests.attacks.groups import PRELOAD, SHARES, groups
from tests.attacks.judge import Result, run
from tests.attacks.specimen import Specimen
from tests.attacks.stage import Stage
from tests.attacks.table import show
from tests.attacks.target import lay_out


async def attack(names: list[str], seconds: float, seed: int, console: Console) -> list[Result]:
    """Run the groups of these names, within about so many seconds together."""
    children = Children(PRELOAD)
    results: dict[str, Result] = {}
    wanted = [group for group in groups(seed) if group.name in names]
    left, shares = seconds, sum(SHARES[group.name] for group in wanted)
    with tempfile.TemporaryDirectory(prefix="tstore-attacks-") as folder:
        bare, whole = Path(folder) / "bare", Path(folder) / "whole"
        bare.mkdir()
        lay_out(bare)
        specimen = await Specimen.make(whole / "store")
        for group in wanted:
            result = results.setdefault(group.name, Result(group.name))
            stage = Stage(bare if group.bare else whole, specimen, children, seed)
            if group.tls:
                stage.with_tls()
            spent = result.seconds

            def tell(case: Case, message: str, name: str = group.name) -> None:
                console.print(f"{name}: {case.name}: {message}", markup=False, highlight=False, soft_wrap=True)

            await run(group, stage, left * SHARES[group.name] / shares, result, tell)
            left, shares = left - (result.seconds - spent), shares - SHARES[group.name]
    return list(results.values())


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m tests.attacks", description=__doc__)
    parser.add_argument("--group", action="append", choices=list(SHARES), help="run this group only; repeatable")
    parser.add_argument("--seconds", type=float, default=180, help="for all groups together (default: 180)")
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
