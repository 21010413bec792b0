"""Jobs in tiers that are killed at random moments, with disks wiped and packs damaged at random between starts."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

import tstore
from tests.tiers.test_tiers import flip, job
from tstore.core.steps import saved_steps
from tstore.tiers.holders import METADATA

STARTS = 4


async def parts(folder: Path, hosts: int, damaged: set[Path]) -> list[tuple[int, int, int]]:
    """Return the step, host and number of hosts of each part that the disks of these hosts hold whole."""
    found = []
    for marker in (path for host in range(hosts) for path in folder.glob(f"local{host}/*/*/tstore.json")):
        async with await tstore.open(marker.parent, "r") as store:
            for step in await saved_steps(store):
                record = await store.log.reader.record(step.version)
                reused = {marker.parent / key for key in record.reused}
                own = marker.parent / "txn" / record.transaction
                part = record.metadata[METADATA]
                if not any(pack in reused or pack.parent == own for pack in damaged):
                    found.append((step.step, part["host"], part["hosts"]))
    return found


def expected(held: list[tuple[int, int, int]], alive: set[int], durable: list[int]) -> int | None:
    """Return the newest step that counts and is whole somewhere."""
    whole = {s for s, _, of in held if {host for step, host, _ in held if step == s} == set(range(of))}
    return max((whole | set(durable)) & alive, default=None)


@pytest.mark.deep
@pytest.mark.parametrize("seed", range(20))
async def test_every_start_goes_on_from_the_newest_whole_step(tmp_path: Path, seed: int) -> None:
    choose = random.Random(seed)
    alive: set[int] = set()
    highest, resumed = 0, None
    damaged: set[Path] = set()
    for start in range(STARTS):
        hosts = choose.choice([2, 3, 3, 4])
        held = await parts(tmp_path, hosts, damaged)
        durable = (await tstore.steps(tmp_path / "durable")) if start else []
        wanted = expected(held, alive, durable)
        with job(tmp_path, f"start-{start}", hosts, peers=1, durable_every=choose.choice([4, 1000])) as running:
            resumed = running.all("restore")
            assert resumed == wanted, (seed, start, resumed, wanted, sorted(held), sorted(alive), durable)
            alive = {step for step in alive if resumed is not None and step <= resumed}
            for _ in range(choose.randint(1, 5)):
                highest += 1
                alive.add(highest)
                running.save(highest, copied=choose.random() < 0.3)
            if choose.random() < 0.5:
                highest += 1
                alive.add(highest)
                running.tell("save", highest)  # killed in the middle
        for _ in range(choose.randint(0, 2)):
            host = choose.randrange(hosts)
            packs = sorted(set(tmp_path.glob(f"local{host}/*/*/txn/*/pack-*")) - damaged)
            if choose.random() < 0.25 or not packs:
                shutil.rmtree(tmp_path / f"local{host}", ignore_errors=True)
                continue
            damaged.add(pack := choose.choice(packs))
            choose.choice([flip, Path.unlink, lambda path: path.write_bytes(path.read_bytes()[:-1])])(pack)
