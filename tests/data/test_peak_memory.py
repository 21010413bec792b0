"""The memory of long reads and writes: the caller's arrays, and buffers that do not grow with them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CHILD = """
import sys
import numpy as np
import tstore.sync as tstore

url, mebibytes, codecs, turns = sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4])

def peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) >> 10

values = np.random.default_rng(1).integers(0, 1 << 10, (mebibytes, 1 << 18), "i4", endpoint=False)
out = np.ones_like(values)
before, peaks = peak(), []
for turn in range(turns):
    with tstore.open(url) as store:
        with store.transaction(durability="none") as tx:
            if turn == 0:
                tx.create_array("a", values.shape, "i4", (16, 1 << 16), codecs=None if codecs == "raw" else codecs)
            tx.array("a").write(values)
        array = store.snapshot().array("a")
        array.read(out=out)
        array[:, ::-1].read(out=out)
        store.collect(tstore.Keep(last=1))
    peaks.append(peak() - before)
assert np.array_equal(out, values[:, ::-1])
print(peaks[0], peaks[-1])
"""


@pytest.mark.parametrize("codecs", ["raw", "lossless"])
def test_long_reads_and_writes_take_little_beside_the_callers_arrays(codecs: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", CHILD, str(tmp_path / "s"), "256" if codecs == "raw" else "128", codecs, "2"]
    first, last = map(int, subprocess.run(command, capture_output=True, check=True, text=True).stdout.split())
    assert first < 300
    assert last < first + 50
