"""Every warning points at the line of the user that called tstore, whichever thread or task notices."""

from __future__ import annotations

import linecache
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

import tstore
import tstore.sync as blocking
from tests.support import processes
from tests.support.fileservers import python_files
from tstore.errors import Unavailable

LARGE = np.random.default_rng(0).standard_normal((3000, 100))


@contextmanager
def warned_once(text: str) -> Iterator[None]:
    """Expect one warning, at the line of this file that ends in the comment `# here`."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    [warning] = caught
    assert text in str(warning.message)
    assert linecache.getline(warning.filename, warning.lineno).endswith("# here\n"), warning
    assert warning.filename == __file__


@pytest.fixture
def url(tmp_path: Path) -> str:
    blocking.save(tmp_path / "s", {"w": LARGE}, 1)
    return str(tmp_path / "s")


async def test_values_beyond_the_range_of_an_array(tmp_path: Path) -> None:
    with blocking.open(tmp_path / "s") as store, store.transaction() as tx:
        array = tx.create_array("a", (2,), "float16")
        with warned_once("beyond the range"):
            array.write([1e9, 1.0])  # here
        with warned_once("beyond the range"):
            array[:1] = [1e9]  # here
    async with await tstore.open(tmp_path / "s") as opened, opened.transaction() as awaited:
        w = await awaited.array("a")
        with warned_once("beyond the range"):
            await w.write([1e9, 1.0])  # here


async def test_a_rule_of_retention_without_candidates(tmp_path: Path) -> None:
    keep = tstore.Keep(last=1, best=(1, "loss"))
    with warned_once("until one has it, this rule keeps no version"):
        checkpoints = blocking.Checkpointer(tmp_path / "s", keep=keep)  # here
        checkpoints.save(1, {"w": 1})
        checkpoints.close()
    with warned_once("no step has the metric 'loss'"):
        awaited = tstore.Checkpointer(tmp_path / "t", keep=keep)  # here
        await awaited.save(1, {"w": 1})
        await awaited.close()


async def test_a_server_without_ranges(url: str) -> None:
    with python_files(Path(url)) as server:
        with warned_once("ignores Range"):
            blocking.restore(server)  # here
        with warned_once("ignores Range"):
            await tstore.restore(server)  # here
        with warned_once("ignores Range"), blocking.open(server, "r") as store:
            array = store.snapshot().array("w")
            np.asarray(array[::7])  # here


async def test_a_token_in_clear_text() -> None:
    with warned_once("the token for http://warned-1.invalid goes over http"), pytest.raises(Unavailable):
        blocking.open("http://warned-1.invalid", storage_options={"token": "t"})  # here
    with warned_once("the token for http://warned-2.invalid goes over http"), pytest.raises(Unavailable):
        await tstore.open("http://warned-2.invalid", storage_options={"token": "t"})  # here


async def test_a_cache_that_cannot_be_written(url: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with blocking.open(url, "r", cache=tmp_path / "file") as store, warned_once("can't be written"):
        blocking.restore(store)  # here
    async with await tstore.open(url, "r", cache=tmp_path / "file") as awaited:
        with warned_once("can't be written"):
            await tstore.restore(awaited)  # here


WITHOUT_KERNELS = """
import sys, warnings
sys.modules["exmy._kernels"] = None
import numpy as np, tstore.sync
tstore.sync.save(sys.argv[1], {"w": np.ones((1024, 1024), "f4")}, 1)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    tstore.sync.quantize(sys.argv[1], "e4m3", tag="q")
[warning] = caught
print(warning.category.__name__, warning.filename, warning.lineno)
"""


def test_codecs_without_kernels(tmp_path: Path) -> None:
    out = processes.fresh_python(WITHOUT_KERNELS, tmp_path / "s")
    assert out.split() == ["SlowPathWarning", "<string>", "8"]


def test_a_command_prints_a_warning_as_one_line(url: str) -> None:
    with python_files(Path(url)) as server:
        for options in ([], ["--json"]):
            command = [sys.executable, "-m", "tstore", "verify", server, *options]
            ended = subprocess.run(command, capture_output=True, text=True, timeout=processes.DEADLINE, check=True)
            [line] = ended.stderr.splitlines()
            assert line.startswith(f"tstore: warning: {server}: the server (SimpleHTTP")
