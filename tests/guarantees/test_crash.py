"""A writer killed at any moment leaves the old version or the new one."""

from __future__ import annotations

import os
import random
import signal
import threading
from pathlib import Path

import numpy as np
import pytest

import tstore.sync as blocking
from tests.support import forks, processes
from tests.support.polling import blocking_until

SIZE = 40_000
"""The number of values of an array: enough for several chunks in a pack."""

WRITER = """
import itertools, os
import numpy as np
import tstore.sync as tstore
[url] = arguments
store = tstore.open(url)
first = (tstore.steps(store) or [0])[-1] + 1
os.write(out, b"ready\\n")
for step in itertools.count(first):
    z = {i: np.full(2, step) for i in range(20)}
    tree = {"x": np.full(40_000, step), "y": np.full(3, step), "z": z, "step": step}
    version = tstore.save(store, tree, step)
    os.write(out, f"{step}\\n".encode())
    with store.transaction(f"after {step}") as tx:
        if step % 3:
            tx.create_array(f"extra/{step}", (2,), "int64", (2,)).write(step)
"""


def check(url: Path, acknowledged: int) -> int:
    """Check that the newest step is complete and was not acknowledged before `acknowledged`; return it."""
    store = blocking.open(url, "r")
    newest = (blocking.steps(store) or [0])[-1]
    assert newest in (acknowledged, acknowledged + 1)
    if newest:
        tree = blocking.restore(store)
        assert tree["step"] == newest
        for values in (tree["x"], tree["y"], *tree["z"].values()):
            assert (values == newest).all()
        assert tree["x"].shape == (SIZE,)
    return newest


@pytest.mark.parametrize("kills", [8, pytest.param(80, marks=pytest.mark.deep)])
def test_a_writer_killed_at_any_moment(tmp_path: Path, kills: int) -> None:
    """Each writer continues where the previous one was killed, while a reader checks all the time."""
    rng = random.Random(int(os.environ.get("TSTORE_CRASH_SEED", "0")))
    url = tmp_path / "s"
    blocking.open(url, "x")
    stop = threading.Event()
    seen: list[int] = []
    failures: list[BaseException] = []

    def watch() -> None:
        store = blocking.open(url, "r")
        try:
            while not stop.is_set():
                if not blocking.steps(store):
                    continue
                tree = blocking.restore(store)
                assert (tree["x"] == tree["step"]).all()
                assert tree["step"] >= (seen[-1] if seen else 0)
                seen.append(tree["step"])
        except BaseException as error:
            failures.append(error)

    reader = threading.Thread(target=watch)
    reader.start()
    acknowledged = 0
    hit = 0
    try:
        with forks.forks(WRITER) as server:
            for number in range(kills):
                out = tmp_path / f"out-{number}"
                os.mkfifo(out)
                # the kill happens between two acknowledgements, at any point of the save
                ready, told = threading.Event(), threading.Event()
                lines: list[int] = []

                def read(
                    out: Path = out,
                    lines: list[int] = lines,
                    ready: threading.Event = ready,
                    told: threading.Event = told,
                ) -> None:
                    with out.open() as pipe:
                        assert pipe.readline() == "ready\n"
                        ready.set()
                        for text in pipe:
                            lines.append(int(text))
                            told.set()

                collector = threading.Thread(target=read, daemon=True)
                collector.start()
                writer = server.start(out, url)
                assert ready.wait(30)
                if number % 2:
                    told.wait(30)
                    blocking_until(lambda lines=lines: failures or (seen and seen[-1] >= lines[0]))
                told.clear()
                told.wait(rng.uniform(0, 0.03))
                os.kill(writer, signal.SIGKILL)
                assert server.wait(writer) == -signal.SIGKILL
                collector.join(30)
                acknowledged = lines[-1] if lines else acknowledged
                newest = check(url, acknowledged)
                hit += newest == acknowledged
                acknowledged = newest
    finally:
        stop.set()
        reader.join(60)
    assert not failures, failures
    assert hit
    assert len(set(seen)) > 3
    report = blocking.open(url).verify()
    assert report.ok, report.faults
    tree = {"x": np.zeros(SIZE), "step": acknowledged + 1}
    blocking.save(url, tree, acknowledged + 1)  # the next writer needs no repair
    assert not blocking.restore(url)["x"].any()


DYING = """
    import asyncio, os, signal, sys
    import numpy as np
    import tstore
    from tstore.lab.conformance.faults import Faults
    url, stage, nth = sys.argv[1], sys.argv[2], int(sys.argv[3])

    class Deadly(Faults):
        seen = 0
        def die(self):
            Deadly.seen += 1
            if Deadly.seen == nth:
                os.kill(os.getpid(), signal.SIGKILL)
        def _match(self, call):
            if stage == call.operation or stage == f"{call.operation}:{call.key.partition('/')[0]}":
                self.die()
            return super()._match(call)
        async def create(self, key, data, durability):
            await super().create(key, data, durability)
            if stage == f"created:{key.partition('/')[0]}":
                self.die()

    async def main():
        opened = await tstore.open(url)
        store = tstore.Store(Deadly(opened.log.storage), opened.marker, "a")
        tree = {"x": np.random.default_rng(1).random(2_000_000), **{f"y{i}": np.full(3, i) for i in range(1000)}}
        await tstore.save(store, tree, 1)
    asyncio.run(main())
"""


def test_a_writer_killed_at_each_step_of_the_commit(tmp_path: Path) -> None:
    landed = {}
    stages = [
        "writer",
        "append",
        "finish",
        "flush",
        "create:txn",
        "created:txn",
        "create:commits",
        "created:commits",
    ]
    writers = {}
    for stage in stages:
        url = tmp_path / stage.replace(":", "-")
        blocking.save(url, {"x": np.zeros(3)}, 0)
        writers[stage] = processes.start(DYING, url, stage, 1)
    with processes.running(*writers.values()):
        for stage, writer in writers.items():
            processes.result(writer, -signal.SIGKILL)
            url = tmp_path / stage.replace(":", "-")
            store = blocking.open(url)
            landed[stage] = blocking.steps(store) == [0, 1]
            assert blocking.steps(store)[0] == 0
            assert not blocking.restore(store, 0)["x"].any()
            assert store.verify().ok
            if not landed[stage]:
                assert blocking.save(store, {"x": np.ones(3)}, 1) == 2
                assert blocking.restore(store)["x"].all()
    assert landed == {stage: stage == "created:commits" for stage in stages}


def test_leftovers_of_a_killed_writer_do_not_disturb_readers(tmp_path: Path) -> None:
    blocking.save(tmp_path / "s", {"x": np.arange(3)}, 0)
    for name in (".0123.tmp", "commits/.0123456789abcdef.tmp", "txn/.x.tmp"):
        path = tmp_path / "s" / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"half of somethi")
    (tmp_path / "s" / "txn" / "dead").mkdir()
    (tmp_path / "s" / "txn" / "dead" / "pack-1").write_bytes(bytes(1000))
    store = blocking.open(tmp_path / "s")
    assert store.verify().ok
    assert blocking.save(store, {"x": np.arange(4)}, 1) == 2
    assert blocking.restore(store)["x"].tolist() == [0, 1, 2, 3]
