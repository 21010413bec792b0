"""Commits on local files while system calls fail; run with the library `failing_calls.c` preloaded."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import itertools
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

import tstore
from tstore.errors import CommitOutcomeUnknown, TStoreError
from tstore.lab.simulation.scenario import override_constants

SOURCE = Path(__file__).with_suffix(".c")
SCENARIOS = ("append", "root", "hosts")

_NAMES = (
    "EIO ENOSPC EDQUOT EACCES EPERM EROFS ENOENT ENOTDIR EEXIST EMFILE ENAMETOOLONG ELOOP EINVAL ESTALE ETIMEDOUT "
    "ENOMEM EISDIR ENXIO EMLINK EOPNOTSUPP EAGAIN EINTR"
)
ERRORS = [getattr(errno, name) for name in _NAMES.split()]
MAIN = ERRORS[:6]
ODD = [errno.ENOENT, errno.EEXIST, errno.ENAMETOOLONG, errno.EINVAL, errno.EAGAIN, errno.EINTR]
ALIKE = {"open", "close", "fsync", "stat64", "lstat64", "fstat64"}
"""What fails in one way: the process sees no effect, or there always is one."""
_PER_STORE = 10  # cases: trees of few commits are read fast


class Rule(ctypes.Structure):
    """The calls `first` to `last` fail with `error`, before or after (`done`) they take effect."""

    _fields_ = tuple((name, ctypes.c_int) for name in ("first", "last", "error", "done"))

    def __repr__(self) -> str:
        when = "after" if self.done else "before"
        return f"{errno.errorcode[self.error]} {when} calls {self.first} to {self.last}"


class Preloaded:
    """The preloaded library."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None)
        self._library.call_name.restype = ctypes.c_char_p

    def start(self, root: Path, trigger: str, rules: Sequence[Rule]) -> None:
        """Make calls fail by these rules, counted from the creation of a file whose path contains `trigger`."""
        self._library.fail_calls(os.fsencode(root), os.fsencode(trigger), (Rule * len(rules))(*rules), len(rules))

    def stop(self) -> list[str]:
        """End the failures; return the calls counted."""
        return [self._library.call_name(n).decode() for n in range(1, self._library.failing_calls() + 1)]


def build(folder: Path) -> Path | None:
    """Compile the library; return None without a compiler."""
    library = folder / "failing_calls.so"
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None or sys.platform != "linux":
        return None
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, SOURCE, "-ldl", "-pthread"], check=True)
    return library


def failures(calls: Sequence[str], errors: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Return each call's number with each error, before it takes effect, and after it if a process could tell."""
    for number, call in enumerate(calls, 1):
        moments = (0,) if call.split()[0] in ALIKE else (0, 1)
        for error, done in itertools.product(errors, moments):
            yield number, error, done


def singles(calls: Sequence[str], errors: Sequence[int]) -> Iterator[list[Rule]]:
    """Fail each call with each error."""
    for call, error, done in failures(calls, errors):
        yield [Rule(call, call, error, done)]


def onwards(calls: Sequence[str]) -> Iterator[list[Rule]]:
    """Fail all calls from one on."""
    for first, error, done in failures(calls, MAIN):
        yield [Rule(first, first, error, done), Rule(first + 1, 1 << 30, error, 0)]


def pairs(count: int) -> Iterator[list[Rule]]:
    """Fail each pair of calls; the errors alternate."""
    errors = itertools.cycle(itertools.product(MAIN, MAIN, (0, 1)))
    for first, second in itertools.combinations(range(1, count + 6), 2):
        one, other, done = next(errors)
        yield [Rule(first, first, one, done), Rule(second, second, other, 0)]


def cases(scenario: str, calls: Sequence[str], *, deep: bool) -> Iterator[list[Rule]]:
    """Return the rules of all cases of a scenario whose commit makes these calls."""
    if scenario == "append" or deep:
        one = ERRORS if deep else [*MAIN[:3], *ODD]
        return itertools.chain(singles(calls, one), onwards(calls), pairs(len(calls)))
    return singles(calls, [errno.EIO, errno.ENOSPC, errno.ENAMETOOLONG])


class Commits:
    """Commits of one scenario, each of which appends its own value, and the checks of their outcomes."""

    def __init__(self, folder: Path, scenario: str, calls: Preloaded) -> None:
        self.kinds: Counter[str] = Counter()
        self._folder = folder
        self._scenario = scenario
        self._calls = calls
        self._cases = 0
        self._newest = 0

    async def run(self, rules: Sequence[Rule]) -> list[str]:
        """Commit while calls fail by these rules; check the outcome, and return the calls that were made."""
        path = self._folder / f"store-{self._cases // _PER_STORE}"
        if self._cases % _PER_STORE == 0:
            store = await tstore.open(path, "x")
            async with store.transaction() as tx:
                await tx.create_array("log", (0,), "int64", chunks=(8,))
            self._newest = 1
        self._cases += 1
        if self._scenario == "hosts":
            return await self._commit_of_hosts(path, rules)
        if self._scenario == "root" and self._newest % 2 == 0:  # the next version is to have a root
            async with (await tstore.open(path, "r+")).transaction() as tx:
                await tx.create_group("g", {"case": self._cases})
        return await self._append(path, rules)

    async def _attempt(
        self, path: Path, rules: Sequence[Rule], commit: Callable[[], Awaitable[object]]
    ) -> tuple[object, list[str]]:
        """Return the result of a commit while calls fail, or its error, and the calls."""
        self._calls.start(path, "/.", rules)  # from the first temporary file on
        result: object
        try:
            result = await commit()
        except BaseException as error:
            result = error
        calls = self._calls.stop()
        assert not isinstance(result, BaseException) or isinstance(result, TStoreError), repr(result)
        self.kinds[type(result).__name__] += 1
        return result, calls

    async def _append(self, path: Path, rules: Sequence[Rule]) -> list[str]:
        value, store = self._cases, await tstore.open(path, "r+")
        tx = store.transaction()
        appended = await (await tx.array("log")).append(np.array([value]))
        result, calls = await self._attempt(path, rules, tx.commit)
        seen, self._newest, outcome = await look(path, tx.id)
        assert (outcome is not None) == (seen.count(value) == 1)
        if isinstance(result, CommitOutcomeUnknown):
            version = await tx.commit()
            assert outcome in (None, version)
            assert version == tx.version == await store.outcome(tx.id)
        elif isinstance(result, TStoreError):
            assert outcome is None
            async with store.transaction() as again:
                appended = await (await again.array("log")).append(np.array([value]))
        else:
            assert result == outcome == tx.version == self._newest
        if outcome is None:
            seen, self._newest, _ = await look(path, tx.id)
        assert seen.count(value) == 1
        [rows] = appended.region
        assert seen[rows] == [value]
        return calls

    async def _commit_of_hosts(self, path: Path, rules: Sequence[Rule]) -> list[str]:
        name, stores = f"case-{self._cases}", [await tstore.open(path, "r+") for _ in range(2)]
        txs = [stores[h].transaction(name=name, host=h, hosts=2, attempt="a") for h in range(2)]
        for host, tx in enumerate(txs):
            array = await tx.create_array(name, (2,), "int64", chunks=(1,))
            await array[host : host + 1].write(np.array([host]))
        assert await txs[1].deliver() is None
        result, calls = await self._attempt(path, rules, txs[0].commit)
        reader = await tstore.open(path, "r+")
        outcome = await reader.outcome(txs[0].id)
        if isinstance(result, CommitOutcomeUnknown):
            version = await txs[0].commit()
            assert outcome in (None, version)
            assert version == txs[0].version == await reader.outcome(txs[0].id)
        elif isinstance(result, TStoreError):
            assert outcome is None
            with contextlib.suppress(TStoreError):
                await reader.finish(txs[0].id)
            assert await reader.outcome(txs[0].id) is None
            return calls
        else:
            assert result == outcome == txs[0].version
        assert (await (await (await reader.snapshot()).array(name)).read()).tolist() == [0, 1]
        return calls


async def look(path: Path, transaction: str) -> tuple[list[int], int, int | None]:
    """Return the values that a new reader sees, the newest version, and the outcome of a transaction."""
    async with await tstore.open(path, "r+") as store:
        snapshot = await store.snapshot()
        values = await (await snapshot.array("log")).read()
        return values.tolist(), snapshot.version, await store.outcome(transaction)


async def main(folder: Path, scenario: str, *, deep: bool) -> None:
    """Run all cases of a scenario; print the calls of a commit without failures, and the number of each result."""
    preloaded = Preloaded()
    commits = Commits(folder, scenario, preloaded)
    calls = await commits.run([])
    print(*calls, sep="\n")
    for rules in cases(scenario, calls, deep=deep):
        try:
            await commits.run(rules)
        except BaseException as error:
            preloaded.stop()
            error.add_note(f"{rules}: {[calls[r.first - 1] for r in rules if r.first <= len(calls)]}")
            raise
    print(dict(commits.kinds))


if __name__ == "__main__":
    with override_constants(ROOT_EVERY=2) if sys.argv[2] == "root" else contextlib.nullcontext():
        asyncio.run(main(Path(sys.argv[1]), sys.argv[2], deep="deep" in sys.argv))
