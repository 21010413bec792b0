"""Settings and fixtures of all tests."""

from __future__ import annotations

import functools
import gc
import itertools
import os
import re
import signal
import sys
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import settings

from tests.support import gcs
from tests.support.thresholds import Thresholds
from tstore.lab.simulation.scenario import import_core

settings.register_profile("default", max_examples=30, deadline=None)  # a busy machine may be slow
settings.register_profile("deep", max_examples=500, deadline=None)
settings.register_profile("long", max_examples=20_000, deadline=None)
settings.load_profile("default")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # a shell without job control ignores SIGINT in background processes, and child processes would inherit that
    signal.signal(signal.SIGINT, signal.default_int_handler)


# the tests start hundreds of processes that import the packages, so bytecode is always cached
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# the tests run in parallel already: more threads of OpenBLAS and PyTorch would spin, at twice the CPU time
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_xdist_auto_num_workers() -> int:
    """Return one worker more than there are cores, since tests also wait for disks and deadlines."""
    return 1 + len(os.sched_getaffinity(0))


# no test loses its power, so none waits for a disk, which took tests of local stores most of their time: here and
# in forked processes these calls only check their argument. Tests of durability count and order them, or record
# them to simulate a power failure. New interpreters make the real ones.
os.fsync, os.sync = os.fstat, os.getpid  # type: ignore[assignment]


# what tstore imports when it is used: a module imported while a test has replaced a constant would keep that value
import_core()


LONG = ("test_install", "test_examples", "test_jobs", "test_bench", "test_readme")
"""The modules with the longest tests."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the longest tests first: at the end, each worker finds short ones to take from the others."""
    items.sort(key=lambda item: item.path.stem not in LONG)


gc.disable()  # until the tests are collected, which leaves hardly any garbage


def pytest_collection_finish() -> None:
    """Exempt modules and collected tests from garbage collection, as they live until the end."""
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)  # tests leave little garbage, and each look through the heap takes 0.2 s
    gc.enable()


@functools.cache
def _generators(module: ModuleType) -> list[tuple[np.random.Generator, Mapping[str, Any]]]:
    """Return the random generators of a module, with their states."""
    return [(g, g.bit_generator.state) for g in vars(module).values() if isinstance(g, np.random.Generator)]


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Let each test draw the same random numbers, whichever tests ran before it in this process."""
    if isinstance(item, pytest.Function):
        for generator, state in _generators(item.module):
            generator.bit_generator.state = state


_folders = itertools.count()


@pytest.fixture
def tmp_path(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """A new folder. Pytest's own fixture looks at the folders of all tests before, to number this one."""
    name = re.sub(r"\W", "_", request.node.name)[:30]
    path = tmp_path_factory.getbasetemp() / f"{name}{next(_folders)}"
    path.mkdir()
    return path


@pytest.fixture(params=["local", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of a new store, in a folder and in memory. Modules that need others override this fixture."""
    return str(tmp_path / "store") if request.param == "local" else f"memory://{uuid.uuid4()}"


@pytest.fixture
def thresholds() -> Iterator[Thresholds]:
    """A function that changes thresholds of tstore until the end of the test."""
    with Thresholds() as thresholds:
        yield thresholds


@pytest.fixture(scope="session")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a running fake-gcs-server. All tests share it; each creates its own bucket."""
    with gcs.fake_gcs_server(tmp_path_factory.mktemp("gcs")) as url:
        yield url
