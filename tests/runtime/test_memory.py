"""Memory beyond the caller's arrays stays below 300 MiB, and does not grow."""

from __future__ import annotations

import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import tstore.sync as blocking
from tests.support import processes
from tests.support.interrupts import AT_EVERY_MOMENT
from tstore.core.runtime.budget import BUDGET, scratch

LIMIT = 300 << 20

MEASURE = """
    import json, os, sys
    import numpy as np
    import tstore.sync as tstore

    def peak():
        with open("/proc/self/status") as file:
            return 1024 * int(next(l for l in file if l.startswith("VmHWM")).split()[1])

    def now():
        with open("/proc/self/status") as file:
            return 1024 * int(next(l for l in file if l.startswith("VmRSS")).split()[1])

    def reset():
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")

    url, kind, size = sys.argv[1], sys.argv[2], int(sys.argv[3]) << 20
    codecs = None
    values = np.arange(size // 4, dtype="f4")
    store = tstore.open(url)
    reset()
    base = now()
    if kind == "contiguous":
        tree = {f"w{i}": part for i, part in enumerate(values.reshape(8, 1024, -1))}
        save = lambda step: tstore.save(store, tree, step, durability="none")
        def restore():
            restored = tstore.restore(store, target=tree)
            return sum(v.nbytes for v in restored.values()), restored
    elif kind == "one chunk e4m3":
        tree = {"w": values.reshape(1024, -1)}
        save = lambda step: tstore.save(store, tree, step, codecs="e4m3", durability="none")
        def restore():
            restored = tstore.restore(store)
            return restored["w"].nbytes, restored
    else:
        whole = values.reshape(8192, -1)
        chunks = whole.shape if kind == "one long chunk" else (128, 128)
        def save(step):
            with store.transaction(durability="none") as tx:
                if step:
                    tx.delete("w")
                tx.create_array("w", whole.shape, "f4", chunks).write(whole)
        def restore():
            array = store.snapshot().array("w").read()
            return array.nbytes, array
    save(0)
    report = {"save": peak() - base}
    reset()
    before = now()
    size, result = restore()
    report["restore"] = peak() - before - size
    del result
    report["growth"] = []
    for step in range(1, 1 + int(sys.argv[4])):
        values += 1  # nothing can be reused
        save(step)
        report["growth"].append(now())
    print(json.dumps(report))
"""


def measure(url: Path, kind: str, mebibytes: int, repeats: int = 0) -> dict[str, object]:
    import json

    peaks: dict[str, object] = json.loads(processes.fresh_python(MEASURE, url, kind, mebibytes, repeats))
    return peaks


@pytest.mark.parametrize("kind", ["contiguous", "small chunks", "one long chunk", "one chunk e4m3"])
def test_a_large_save_and_restore_stay_below_the_limit(tmp_path: Path, kind: str) -> None:
    report = measure(tmp_path / "s", kind, 320)
    assert report["save"] < LIMIT  # type: ignore[operator]
    assert report["restore"] < LIMIT  # type: ignore[operator]


BACKGROUND = """
    import json, sys
    import numpy as np
    import tstore.sync as tstore

    def status(field):
        with open("/proc/self/status") as file:
            return 1024 * int(next(l for l in file if l.startswith(field)).split()[1])

    values = np.arange(80 << 20, dtype="f4")
    tstore.save(sys.argv[1], {"w": values[:10]}, 0)
    report = {}
    for step, staging in enumerate(("turns", "memory"), 1):
        values += 1
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
        before = status("VmRSS")
        tstore.save_async(sys.argv[1], {"w": values}, step, staging=staging, durability="none").wait()
        report[staging] = status("VmHWM") - before
    report["after"] = status("VmRSS") - before
    print(json.dumps(report))
"""


def test_a_save_in_the_background_needs_its_copy_or_no_memory(tmp_path: Path) -> None:
    import json

    report = json.loads(processes.fresh_python(BACKGROUND, tmp_path / "s"))
    assert report["turns"] < LIMIT
    assert report["memory"] < (320 << 20) + LIMIT
    assert report["after"] < LIMIT


QUANTIZE = """
    import json, os, sys
    import numpy as np
    import tstore.sync as tstore

    def peak():
        with open("/proc/self/status") as file:
            return 1024 * int(next(l for l in file if l.startswith("VmHWM")).split()[1])

    url, options = sys.argv[1], json.loads(sys.argv[2])
    tstore.quantize(url, "e2m1", tag=f"warm/{os.getpid()}", at="small")
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    before = peak()
    report = tstore.quantize(url, at="large", tag=f"q/{os.getpid()}", **options)
    print(json.dumps({"peak": peak() - before, "bits": report.bits_per_value}))
"""


@pytest.fixture(scope="module")
def floats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of a small array and, beside it, of 320 MiB."""
    folder = tmp_path_factory.mktemp("floats")
    x = np.random.default_rng(0).standard_normal((4096, 4096), "f4")
    with blocking.open(folder) as store:
        for tag, repeats in (("small", 1), ("large", 5)):
            with store.transaction(tag=tag, durability="none") as tx:
                for i in range(repeats):
                    part = x[: 1 << 10] if tag == "small" else x
                    tx.create_array(f"{tag}{i}", part.shape, "f4").write(part)
    return folder


@pytest.mark.parametrize(
    "options",
    [
        '{"formats": "e3m2"}',
        '{"bits": 5.0}',
        pytest.param('{"min_sqnr": 25, "axis": 1}', marks=pytest.mark.deep),
    ],
)
def test_a_large_quantization_stays_below_the_limit(floats: Path, options: str) -> None:
    import json

    peaks = json.loads(processes.fresh_python(QUANTIZE, floats, options))
    assert peaks["bits"] < 9
    assert peaks["peak"] < LIMIT


def test_repeated_saves_do_not_grow(tmp_path: Path) -> None:
    report = measure(tmp_path / "s", "contiguous", 16, 30)
    growth = report["growth"]
    assert isinstance(growth, list)
    assert growth[-1] - growth[9] < 8 << 20, growth


def test_scratch_of_many_threads_stays_within_the_budget() -> None:
    together = threading.Barrier(32)

    def work(seed: int) -> None:
        together.wait()
        sizes = np.random.default_rng(seed).integers(1, 40 << 20, 30)
        for size in sizes.tolist():
            with scratch(size) as buffer:
                buffer[:1] = 1
                del buffer  # released before the claim ends

    tracemalloc.start()
    try:
        with ThreadPoolExecutor(32) as threads:
            list(threads.map(work, range(32)))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak <= BUDGET + (8 << 20)


SHORT_LIVED_THREADS = """
    from concurrent.futures import ThreadPoolExecutor
    from tstore.core.runtime.budget import BUDGET, scratch

    def keeps_its_scratch():  # whether a second use gets the same memory, which is not zeros as new memory is
        with scratch(20 << 20) as buffer:
            buffer[:] = 7
            del buffer
        with scratch(20 << 20) as buffer:
            return bool((buffer == 7).all())

    for _ in range(3 * BUDGET // (20 << 20)):
        with ThreadPoolExecutor(1) as thread:
            assert thread.submit(keeps_its_scratch).result()
"""


def test_threads_that_have_ended_leave_the_budget_to_others() -> None:
    processes.python(SHORT_LIVED_THREADS)  # without the buffers of this process's threads


INTERRUPTED_ANYWHERE = (
    AT_EVERY_MOMENT
    + """
    import threading
    from tstore.core.runtime.budget import BUDGET, scratch

    def take(size):
        with scratch(size):
            pass

    for size in (1 << 20, BUDGET):  # retained by its thread, and claimed
        print(interrupted_at_every_moment(lambda: take(size)) > 5)
    other = threading.Thread(target=take, args=(BUDGET,), daemon=True)
    other.start()
    other.join(timeout=20)
    print(other.is_alive())
"""
)


def test_ctrl_c_at_any_moment_leaves_the_budget_to_others() -> None:
    assert processes.python(INTERRUPTED_ANYWHERE).split() == ["True", "True", "False"]
