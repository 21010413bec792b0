"""SIGKILL at every kind of system call of the protocol, and at random moments while others write and read.

After each kill nothing acknowledged is lost, nothing is half visible, verification finds nothing, and the next
writer needs no repair. The processes are real; they are forked from one that has imported tstore.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest

import tstore.sync as tstore
from tests.support import forks, http_server
from tests.support.polling import blocking_until
from tstore.errors import DeadlineExceeded
from tstore.lab.simulation.scenario import override_constants

SLOTS = 3
HOSTS = 3
ROOT = 8
"""How many versions there are from one root to the next, here and in the processes that are killed."""
INLINE = 1 << 10
"""The longest manifest inside a record, in bytes, at both places: that of 30 arrays is an object of its own."""

# A process that dies before its n-th call of a kind, or in the middle of its n-th write of a kind (a torn write).
# A kind is whether the call comes before the creation of its record ("data") or from then on ("commit"), its name,
# and the folder or file at the top of the store that it changes. Dying after a call is the same as dying before
# the next one. A process that does not die reports how many calls of each kind it made.
MORTAL = """
import json, os, signal, threading
from collections import Counter
url, job, kind, nth, torn = arguments
lock, calls, committing = threading.Lock(), Counter(), False

def mortal(name):
    call = getattr(os, name)
    def counted(*given, **named):
        global committing
        if name == "open" and not given[1] & os.O_CREAT:
            return call(*given, **named)
        path = given[1] if name in ("link", "replace") else given[0]
        path = path if isinstance(path, str) else os.readlink(f"/proc/self/fd/{path}")
        top = os.path.relpath(path, url).split("/")[0]
        with lock:
            committing = committing or (name == "open" and given[0].startswith(f"{url}/commits/"))
            this = f"{'commit' if committing else 'data'} {name} {top if top[0] != '.' else '.'}"
            calls[this] += 1
            mine = (this, calls[this]) == (kind, nth)
        if mine and torn:
            data = b"".join(bytes(b) for b in given[1])
            call(given[0], [data[: len(data) // 2]], given[2])
        if mine:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*given, **named)
    setattr(os, name, counted)

for name in ("open", "mkdir", "posix_fallocate", "pwritev", "ftruncate", "fsync", "link", "unlink", "replace"):
    mortal(name)

import numpy as np
import tstore.sync as tstore
from tstore.lab.simulation.scenario import override_constants

with override_constants(ROOT_EVERY=8, INLINE_MANIFEST_BYTES=1 << 10):
    if job == "small":
        with tstore.open(url).transaction("small") as tx:
            tx.array("x")[1:3].write(1)
    elif job in ("save", "first"):
        many = {f"b{i}": np.full(3, 1) for i in range(30)}
        tstore.save(url, {"x": np.ones(40_000), **many}, 1)
    elif job == "overwrite":  # in the background
        tstore.save_async(url, {"x": np.ones(40_000)}, 0, overwrite=True).wait()
    elif job == "group":
        rows = slice(2, 3)
        w = tstore.Shards((3, 2000), "int64", [((rows, slice(0, 2000)), np.full((1, 2000), 2))])
        tstore.save(url, {"w": w}, 1, host=2, hosts=3, attempt="a", timeout=20)
os.write(out, json.dumps(calls).encode() + b"\\n")
"""


def empty(url: Path) -> None:
    """Leave no store: the killed process is the first to write."""


def zeros(url: Path) -> None:
    """Make a store such that the next commit also writes a root and the hint."""
    with tstore.open(url) as store:
        tstore.save(store, {"x": np.zeros(4)}, 0, durability="none")
        for _ in range(ROOT - 2):
            with store.transaction(durability="none"):
                pass


def all_but_one(url: Path) -> None:
    """Make a store where two of three hosts have delivered their fragments and exited."""
    for host in range(HOSTS - 1):
        rows = slice(host, host + 1)
        w = tstore.Shards((HOSTS, 2000), "int64", [((rows, slice(0, 2000)), np.full((1, 2000), host))])
        with pytest.raises(DeadlineExceeded):
            tstore.save(url, {"w": w}, 1, host=host, hosts=HOSTS, attempt="a", timeout=0.01)


def check_small(url: Path) -> bool:
    store = tstore.open(url)
    values = store.snapshot().array("x").read().tolist()
    assert values in ([0, 0, 0, 0], [0, 1, 1, 0])
    assert store.snapshot().version == ROOT - 1 + any(values)
    with store.transaction("next") as tx:
        tx.array("x")[0].write(5)
    assert store.snapshot().array("x").read().tolist() == [5, *values[1:]]
    return any(values)


def check_save(url: Path) -> bool:
    store = tstore.open(url)
    steps = tstore.steps(store)
    assert steps in ([0], [0, 1], [1], [])
    if 0 in steps:
        assert not tstore.restore(store, 0)["x"].any()
    if 1 in steps:
        tree = tstore.restore(store, 1)
        assert len(tree) == 31
        assert list(url.glob("txn/*/manifest*"))
        assert all((values == 1).all() for values in tree.values())
    tstore.save(store, {"x": np.full(40_000, 2.0)}, 2)
    assert (tstore.restore(store)["x"] == 2).all()
    return 1 in steps


def check_overwrite(url: Path) -> bool:
    store = tstore.open(url)
    values = tstore.restore(store, 0)["x"]
    assert values.tolist() in ([0.0] * 4, [1.0] * 40_000)
    assert tstore.steps(store) == [0]
    tstore.save(store, {"x": np.full(3, 2.0)}, 0, overwrite=True)
    assert (tstore.restore(store)["x"] == 2).all()
    return len(values) > 4


def check_group(url: Path) -> bool:
    store = tstore.open(url)
    landed = tstore.steps(store) == [1]
    if not landed:
        [state] = store.pending()
        if state.absent:  # no fragment was delivered: the job restarts with another attempt
            assert state.absent == (2,)
            w = np.repeat(np.arange(HOSTS), 2000).reshape(HOSTS, 2000)
            tstore.save(store, {"w": w}, 1)
        else:
            assert store.finish("step/1" if state.heartbeats else state.transaction) == 1
    assert (tstore.restore(store)["w"] == np.arange(HOSTS)[:, None]).all()
    return landed


JOBS: dict[str, tuple[Callable[[Path], None], Callable[[Path], bool]]] = {
    "small": (zeros, check_small),
    "save": (zeros, check_save),
    "first": (empty, check_save),
    "overwrite": (zeros, check_overwrite),
    "group": (all_but_one, check_group),
}


@pytest.fixture(autouse=True, scope="module")
def frequent_roots() -> Iterator[None]:
    with override_constants(ROOT_EVERY=ROOT, INLINE_MANIFEST_BYTES=INLINE):
        yield


@pytest.fixture(scope="module")
def mortals() -> Iterator[forks.Forks]:
    with forks.forks(MORTAL) as processes:
        yield processes


@pytest.mark.parametrize("each", [False, pytest.param(True, marks=pytest.mark.deep)], ids=["ends", "each"])
@pytest.mark.parametrize("job", JOBS)
def test_killed_at_each_kind_of_system_call(tmp_path: Path, mortals: forks.Forks, job: str, each: bool) -> None:
    """Before the first and the last call of each kind, or before every call."""
    prepare, check = JOBS[job]
    prepare(tmp_path / "before")
    landed = Counter[bool]()

    def run(name: str, kind: str, nth: int, torn: bool) -> int:
        """Run the job, check the store, and return the exit status."""
        url = tmp_path / name
        if (tmp_path / "before").exists():
            shutil.copytree(tmp_path / "before", url)
        status = mortals.wait(mortals.start(tmp_path / "out", url, job, kind, nth, torn))
        committed = check(url)
        assert tstore.open(url).verify().ok
        shutil.rmtree(url)
        assert committed if status == 0 else not (committed and kind.startswith("data"))
        landed[committed] += status != 0
        return status

    assert run("whole", "", 0, False) == 0
    calls: dict[str, int] = json.loads((tmp_path / "out").read_text())
    assert {kind.split()[1] for kind in calls} >= {"open", "pwritev", "fsync"}
    for kind, count in calls.items():
        for nth in range(1, count + 1) if each else sorted({1, count}):
            for torn in (False, True) if kind.split()[1] == "pwritev" else (False,):
                status = run(f"{kind}-{nth}-{torn}".replace(" ", "-"), kind, nth, torn)
                assert status == -signal.SIGKILL or (nth > 1 and status == 0)  # threads race each other
    assert landed[True] > 0, landed  # some died after the commit
    assert landed[False] > 3, landed


# A writer that counts: each commit sets the writer's arrays, and its cell of a shared one, to the next number.
COUNTER = """
import itertools, os
import numpy as np
import tstore.sync as tstore
from tstore.lab.simulation.scenario import override_constants
url, slot = arguments
with override_constants(ROOT_EVERY=8, INLINE_MANIFEST_BYTES=1 << 10):
    store = tstore.open(url)
    first = int(store.snapshot().array(f"own/{slot}").read()[0]) + 1
    os.write(out, f"began {first}\\n".encode())
    for number in itertools.count(first):
        tx = store.transaction(f"{slot} {number}")
        tx.array(f"own/{slot}").write(number)
        tx.array(f"big/{slot}")[: 10_000].write(number)
        tx.array("shared")[slot].write(number)
        os.write(out, f"{number} {tx.commit()}\\n".encode())
"""


@pytest.mark.parametrize("kills", [4, pytest.param(100, marks=pytest.mark.deep)])
def test_killed_at_random_moments_while_others_write_and_read(tmp_path: Path, kills: int) -> None:
    rng = random.Random(int(os.environ.get("TSTORE_CRASH_SEED", "0")))
    url = tmp_path / "s"
    with tstore.open(url) as store, store.transaction("") as tx:
        tx.create_array("shared", (SLOTS,), "int64").write(0)
        for slot in range(SLOTS):
            tx.create_array(f"own/{slot}", (4,), "int64").write(0)
            tx.create_array(f"big/{slot}", (20_000,), "int64", (5_000,)).write(0)
    stop, failures, seen = threading.Event(), list[BaseException](), set[int]()

    def watch() -> None:
        try:
            store = tstore.open(url, "r")
            while not stop.is_set():
                seen.add(consistent(store))
        except BaseException as error:
            failures.append(error)

    reader = threading.Thread(target=watch)
    reader.start()
    last = [0] * SLOTS
    acknowledged: list[dict[int, int]] = [{} for _ in range(SLOTS)]
    with forks.forks(COUNTER) as server:
        outs = [tmp_path / f"out-{slot}" for slot in range(SLOTS)]
        pids = [server.start(out, url, slot) for slot, out in enumerate(outs)]
        try:
            for _ in range(kills):
                slot = rng.randrange(SLOTS)
                blocking_until(lambda slot=slot: outs[slot].exists() and outs[slot].read_bytes())
                time.sleep(rng.uniform(0, 0.04))
                os.kill(pids[slot], signal.SIGKILL)
                assert server.wait(pids[slot]) == -signal.SIGKILL
                took(outs[slot], acknowledged[slot], last, slot)
                outs[slot].unlink()
                pids[slot] = server.start(outs[slot], url, slot)
            blocking_until(lambda: len(seen) > 3 or failures)
            for out in outs:
                blocking_until(
                    lambda out=out: out.exists() and out.read_bytes().count(b"\n") > 1
                )  # it has committed
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
                server.wait(pid)
            stop.set()
            reader.join(60)
    for slot, out in enumerate(outs):
        took(out, acknowledged[slot], last, slot)
    assert not failures, failures
    assert len(seen) > 3
    store = tstore.open(url)
    consistent(store)
    history = list(store.history())
    for slot in range(SLOTS):
        numbers = {int(c.message.split()[1]): c.version for c in history if c.message.startswith(f"{slot} ")}
        counts = [int(c.message.split()[1]) for c in history if c.message.startswith(f"{slot} ")]
        assert sorted(counts) == list(range(1, len(counts) + 1))  # each number once, without gaps
        assert acknowledged[slot].items() <= numbers.items()  # nothing acknowledged is lost
        assert acknowledged[slot]
    assert sum(map(len, acknowledged)) > kills // 10
    report = store.verify()
    assert report.ok, report.faults
    with store.transaction("next") as tx:
        tx.array("shared").write(-1)


def took(out: Path, acknowledged: dict[int, int], last: list[int], slot: int) -> None:
    """Record what a writer acknowledged, and check that it started after all earlier acknowledged numbers."""
    began, *lines = (out.read_text() if out.exists() else "").splitlines() or [f"began {last[slot] + 1}"]
    first = int(began.split()[1])
    assert first in (last[slot] + 1, last[slot] + 2)  # one may have died before it reported
    last[slot] = first - 1
    for text in lines:
        number, version = map(int, text.split())
        acknowledged[number] = version
        last[slot] = number


def consistent(store: tstore.Store) -> int:
    """Check that the arrays of each writer in the newest snapshot are from one commit; return its version."""
    snapshot = store.snapshot()
    shared = snapshot.array("shared").read()
    for slot in range(SLOTS):
        assert (snapshot.array(f"own/{slot}").read() == shared[slot]).all()
        big = snapshot.array(f"big/{slot}").read()
        assert (big[:10_000] == shared[slot]).all()
        assert not big[10_000:].any()
    return snapshot.version


CLIENT = """
import os
import numpy as np
import tstore.sync as tstore
url, token, number = arguments
store = tstore.open(url, storage_options={"token": token})
os.write(out, b"ready\\n")
for turn in range(10_000):
    values = np.full((3, 40_000 if turn % 2 else 4), number * 10_000 + turn)
    with store.transaction(tag=f"{number}-{turn}") as tx:
        w = tx.create_array(f"{number}/{turn}", values.shape, values.dtype, (1, values.shape[1]))
        for row in range(3):
            w[row].write(values[row])
    os.write(out, f"{turn} {tx.version}\\n".encode())
"""


@pytest.mark.parametrize("kills", [3, pytest.param(30, marks=pytest.mark.deep)])
def test_clients_of_a_server_killed_at_random_moments(tmp_path: Path, kills: int) -> None:
    """What the server acknowledged stays, nothing else is half visible, and a gc cleans up."""
    rng, told = random.Random(0), 0
    with (
        http_server.serving(tmp_path / "s", tokens=f"admin {http_server.ADMIN}") as server,
        forks.forks(CLIENT) as clients,
        tstore.open(server.url, storage_options={"token": http_server.ADMIN}) as store,
    ):
        for number in range(kills):
            out = tmp_path / f"out-{number}"
            client = clients.start(out, server.url, http_server.ADMIN, number)
            lines = 1 + rng.randrange(3)
            blocking_until(lambda out=out, lines=lines: out.exists() and out.read_text().count("\n") >= lines)
            time.sleep(rng.random() * 0.03)
            os.kill(client, signal.SIGKILL)
            assert clients.wait(client) == -signal.SIGKILL
            _, *acknowledged = out.read_text().splitlines()
            versions = {tag: v for tag, v in store.tags().items() if tag.startswith(f"{number}-")}
            assert len(versions) - len(acknowledged) in (0, 1)
            for line in acknowledged:
                turn, version = line.split()
                assert versions[f"{number}-{turn}"] == int(version)
            for turn in range(len(versions)):
                values = store.snapshot().array(f"{number}/{turn}").read()
                assert values.shape[0] == 3
                assert (values == number * 10_000 + turn).all()
            told += len(acknowledged)
        assert store.snapshot().version >= told
        assert store.verify().ok
        report = store.collect(abandoned=timedelta(0))
        alive = {c.transaction for c in store.history()}
        folder = tmp_path / "s" / "txn"
        assert {p.parent.name for p in folder.glob("*/*")} <= alive
        tstore.open(tmp_path / "s").collect(abandoned=timedelta(0))  # also removes folders of aborted uploads
        assert {p.name for p in folder.iterdir()} <= alive
        assert report.versions == []
        assert store.verify().ok
