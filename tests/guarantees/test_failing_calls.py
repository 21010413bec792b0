"""After an error of a commit the caller knows what happened, whichever system call or request failed, and how.

An error other than `CommitOutcomeUnknown` means that the commit did not happen and never will. The oracle is
`outcome`, and a new reader. A repeated `commit` after `CommitOutcomeUnknown` returns the version.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import pytest

import tstore
from tests.support import failing_calls
from tstore.core.storage.base import Storage
from tstore.core.storage.remote import as_remote
from tstore.core.storage.retry import RetryPolicy
from tstore.core.storage.wrapper import Request, Wrapper
from tstore.errors import (
    AlreadyExists,
    CommitOutcomeUnknown,
    Corrupt,
    Denied,
    InvalidArgument,
    NotFound,
    StorageFull,
    Throttled,
    TStoreError,
    Unavailable,
    Unreachable,
)

T = TypeVar("T")
ERRORS: list[Callable[[str], Exception]] = [
    AlreadyExists,
    Denied,
    InvalidArgument,
    StorageFull,
    Corrupt,
    Unavailable,
    Throttled,
    Unreachable,
    NotFound,
    lambda text: OSError(errno.EIO, text),
]
"""What the requests of a storage raise; the last one should not happen."""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = failing_calls.build(tmp_path_factory.mktemp("library"))
    if library is None:
        pytest.skip("there is no C compiler for the library that makes calls fail")
    return library


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder in memory, if there is one: the cases wait for thousands of fsyncs."""
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        yield Path(folder)


@pytest.mark.parametrize("scenario", failing_calls.SCENARIOS)
def test_whichever_system_call_fails(library: Path, folder: Path, scenario: str) -> None:
    run_cases(library, folder, scenario)


@pytest.mark.deep
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("scenario", failing_calls.SCENARIOS)
def test_whichever_system_calls_fail_in_any_way(library: Path, folder: Path, scenario: str) -> None:
    run_cases(library, folder, scenario, "deep")


def run_cases(library: Path, folder: Path, scenario: str, *options: str) -> None:
    process = subprocess.run(
        [sys.executable, "-m", "tests.support.failing_calls", folder, scenario, *options],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "LD_PRELOAD": str(library)},
        capture_output=True,
        text=True,
        check=False,
    )
    out = process.stdout
    assert process.returncode == 0, f"{out}{process.stderr}"
    assert "link /commits/" in out, out  # the library did see the calls
    assert "'int'" in out, out
    assert "'StorageFull'" in out, out


class Failing(Wrapper):
    """Makes requests fail as `failure` of their number says, counted from the first create of a record on."""

    def __init__(self, inner: Storage) -> None:
        super().__init__(inner)
        self.failure: Callable[[int], Failure | None] = lambda number: None
        self.requests = 0

    async def around(self, request: Request, call: Callable[[], Awaitable[T]]) -> T:
        self.requests += bool(self.requests) or (request.operation, request.key[:8]) == ("create", "commits/")
        failure = self.failure(self.requests) if self.requests else None
        if failure is None or (failure.error in (AlreadyExists, NotFound) and request.operation != "create"):
            return await call()  # these two would be false results of a read, not errors
        if failure.done:
            with contextlib.suppress(TStoreError):
                await call()
        raise failure.error(f"{request.operation} {request.key}: injected")


class Failure(NamedTuple):
    """An error that a request raises, before or after (`done`) it takes effect."""

    error: Callable[[str], Exception]
    done: bool


async def fail_requests(count: int, commit: Callable[[Callable[[int], Failure | None]], Awaitable[int]]) -> None:
    """Fail each request, each pair of requests, and all requests from one on; `commit` returns how many it made.

    A second failure that the commit does not live to see makes no other case.
    """
    every = [Failure(error, done) for error in ERRORS for done in (False, True)]
    requests: dict[tuple[int, Failure], int] = {}
    for number, failure in itertools.product(range(1, count + 1), every):
        requests[number, failure] = await commit({number: failure}.get)
        if failure.error is not AlreadyExists and requests[number, failure] > number:
            # a storage that says `AlreadyExists` for ever makes a commit try for ever
            await commit(lambda n, first=number, failure=failure: failure if n >= first else None)  # type: ignore[misc]
    for first, one, other in itertools.product(range(1, count + 1), every[::5], every[1::4]):
        for second in range(first + 1, requests[first, one] + 1):
            await commit({first: one, second: other}.get)


@pytest.mark.parametrize("remote", [False, True], ids=["as it is", "with retries"])
async def test_whichever_request_fails(remote: bool) -> None:
    """The storage has effect or not, and says anything."""

    kinds = set()

    async def append(failure: Callable[[int], Failure | None]) -> int:
        url = f"memory://{uuid.uuid4()}"
        store = await tstore.open(url)
        async with store.transaction() as tx:
            await tx.create_array("log", (0,), "int64", chunks=(8,))
        failing = Failing(store.log.storage)
        impatient = RetryPolicy(0.001, 0.001, 0.002, 0.002, 0.002)
        store = await tstore.open(as_remote(failing, impatient) if remote else failing)
        tx = store.transaction()
        appended = await (await tx.array("log")).append(np.array([7]))
        failing.failure = failure
        result: object
        try:
            result = await tx.commit()
        except Exception as error:
            result = error
        count, failing.failure = failing.requests, lambda number: None
        reader = await tstore.open(url)
        values = await (await (await reader.snapshot()).array("log")).read()
        outcome = await reader.outcome(tx.id)
        assert len(values) == (outcome is not None)
        if isinstance(result, CommitOutcomeUnknown):
            assert await tx.commit() == tx.version == await reader.outcome(tx.id)
            assert outcome in (None, tx.version)
        else:
            assert isinstance(result, int | TStoreError), repr(result)
            assert outcome == tx.version == (result if isinstance(result, int) else None)
        if tx.version is not None:
            log = await (await reader.snapshot()).array("log")
            assert (await log[appended.region].read()).tolist() == (await log.read()).tolist() == [7]
        await store.close()
        kinds.add(type(result).__name__)
        return count

    await fail_requests(await append(lambda number: None), append)
    assert kinds >= {"int", "CommitOutcomeUnknown", "StorageFull", "Denied"}
