"""The wrappers around a storage: retries, limits, tracing, faults."""

from __future__ import annotations

import asyncio
import logging
import random
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest

from tstore.core.runtime import world
from tstore.core.storage.base import Storage
from tstore.core.storage.memory import MemoryStorage
from tstore.core.storage.objects import Page, PutMode
from tstore.core.storage.remote import LimitedStorage, TracedStorage
from tstore.core.storage.retry import RETRY_POLICY, RetryingStorage, RetryPolicy
from tstore.core.storage.wrapper import Request, Wrapper
from tstore.errors import (
    AlreadyExists,
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
from tstore.lab.conformance.faults import LATE, Chances, Faults
from tstore.lab.simulation.virtual import VirtualLoop

CREATE, REPLACE = PutMode.CREATE, PutMode.REPLACE


def memory() -> MemoryStorage:
    return MemoryStorage(str(uuid.uuid4()))


class Seeded(world.World):
    """A world with reproducible pauses."""

    def __init__(self) -> None:
        self._random = random.Random(0)

    def uniform(self, low: float, high: float) -> float:
        return self._random.uniform(low, high)


def on_virtual_time(call: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run the test on a loop with virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner, world.use_world(Seeded()):
        runner.run(call())


class Scripted(Wrapper):
    """Fails the next requests with errors, instead of executing them ("before") or afterwards."""

    def __init__(self, inner: Storage, *faults: tuple[str, Exception]) -> None:
        super().__init__(inner)
        self.faults = list(faults)
        self.times: list[float] = []
        self.asked: list[str] = []

    async def around(self, request: Request, call: Any) -> Any:
        self.times.append(asyncio.get_running_loop().time())
        self.asked.append(request.operation)
        if not self.faults:
            return await call()
        when, error = self.faults.pop(0)
        if when == "after":
            await call()
        raise error


async def keys(objects: Storage, prefix: str = "", delimiter: str = "") -> list[str]:
    return [
        key
        async for page in objects.pages(prefix, delimiter)
        for key in (*(e.key for e in page.entries), *page.folders)
    ]


# ---- retry


@pytest.mark.parametrize("operation", ["get", "read", "head", "put", "delete", "list", "create"])
def test_requests_without_a_response_are_retried(operation: str) -> None:
    async def test() -> None:
        inner = memory()
        await inner.put("a/b", [b"123"], REPLACE)
        scripted = Scripted(
            inner, ("before", Unavailable("1")), ("before", Throttled("2")), ("before", Unavailable("3"))
        )
        objects, buffer = RetryingStorage(scripted), bytearray(3)
        match operation:
            case "get":
                assert await objects.get("a/b") == b"123"
            case "read":
                await objects.read("a/b", 0, [buffer], 3)
                assert buffer == b"123"
            case "head":
                info = await objects.head("a/b")
                assert info is not None
                assert info.size == 3
            case "put":
                await objects.put("a/b", [b"new"], REPLACE)
                assert await inner.get("a/b") == b"new"
            case "create":
                await objects.put("c", [b"x", b"yz"], CREATE)
                assert await inner.get("c") == b"xyz"
            case "delete":
                await objects.delete("a/b")
                assert await inner.head("a/b") is None
            case "list":
                assert await keys(objects) == ["a/b"]
        assert len(scripted.times) >= 4
        pauses = [b - a for a, b in zip(scripted.times, scripted.times[1:], strict=False)][:3]
        assert all(0 < p <= RETRY_POLICY.max_pause for p in pauses)

    on_virtual_time(test)


@pytest.mark.parametrize("error", [NotFound("x"), Denied("x"), InvalidArgument("x"), AlreadyExists("x")])
def test_other_errors_are_not_retried(error: Exception) -> None:
    async def test() -> None:
        scripted = Scripted(memory(), ("before", error))
        with pytest.raises(type(error)):
            await RetryingStorage(scripted).put("k", [b""], CREATE)
        assert len(scripted.times) == 1

    on_virtual_time(test)


def test_a_create_whose_reply_was_lost_is_ours_if_the_bytes_are() -> None:
    async def test() -> None:
        inner = memory()
        lost = Scripted(inner, ("after", Unavailable("lost")))
        await RetryingStorage(lost).put("mine", [b"ab", b"c"], CREATE)
        assert lost.asked == ["create", "create", "head", "read", "read"]
        await inner.put("theirs", [b"xyz"], CREATE)
        with pytest.raises(AlreadyExists, match="with other contents"):
            await RetryingStorage(Scripted(inner, ("before", Unavailable("lost")))).put("theirs", [b"abc"], CREATE)
        with pytest.raises(AlreadyExists, match="with other contents"):
            await RetryingStorage(Scripted(inner, ("before", Unavailable("lost")))).put("theirs", [b"ab"], CREATE)
        with pytest.raises(AlreadyExists):  # a response to the first attempt, whatever the bytes are
            await RetryingStorage(Scripted(inner)).put("theirs", [b"xyz"], CREATE)

    on_virtual_time(test)


@pytest.mark.parametrize("error", [Denied("no"), StorageFull("full"), InvalidArgument("bad"), Corrupt("a page")])
def test_a_refused_retry_does_not_decide_an_earlier_create(error: TStoreError) -> None:
    async def test() -> None:
        inner = memory()
        scripted = Scripted(inner, ("before", Unavailable("lost")), ("before", error))
        with pytest.raises(Unavailable, match=rf"{error}.*no response"):
            await RetryingStorage(scripted).put("k", [b"1"], CREATE)
        unreadable = Scripted(
            inner, ("after", Unavailable("lost")), ("before", AlreadyExists("there")), ("before", error)
        )
        with pytest.raises(Unavailable, match=rf"{error}.*no response"):
            await RetryingStorage(unreadable).put("k", [b"1"], CREATE)
        with pytest.raises(type(error)):  # an idempotent request may be refused
            await RetryingStorage(Scripted(inner, ("after", Unavailable("lost")), ("before", error))).put(
                "k", [b""], REPLACE
            )

    on_virtual_time(test)


def test_retry_after_sets_the_pause() -> None:
    async def test() -> None:
        scripted = Scripted(memory(), ("before", Throttled("later", 7.5)), ("before", Throttled("later", 0.0)))
        await RetryingStorage(scripted).put("k", [b""], REPLACE)
        first, second, third = scripted.times
        assert first + 7.5 <= second < third < second + RETRY_POLICY.max_pause

    on_virtual_time(test)


@pytest.mark.parametrize(
    ("asked", "times"), [(59.0, [0, 59]), (60.0, [0, 60]), (61.0, [0, 61]), (120.0, [0, 120]), (3600.0, [0, 60])]
)
def test_a_pause_that_the_server_asks_for_is_followed_by_an_attempt(asked: float, times: list[float]) -> None:
    async def test() -> None:
        scripted = Scripted(memory(), ("before", Throttled("later", asked)))
        await RetryingStorage(scripted).put("k", [b""], REPLACE)
        assert scripted.times == pytest.approx(times)
        endless = Scripted(memory(), *[("before", Throttled("later", asked))] * 100)
        with pytest.raises(Throttled, match=r"later; repeated for [0-9.]+ s .*retry_timeout"):
            await RetryingStorage(endless).put("k", [b""], REPLACE)
        assert endless.times[-1] - endless.times[0] <= 3 * RETRY_POLICY.deadline

    on_virtual_time(test)


class Slow(Wrapper):
    """Takes 100 s for each attempt, in which the bytes of the request are moved, and fails the first ones."""

    failures = 3

    async def around(self, request: Request, call: Any) -> Any:
        await asyncio.sleep(100)
        if self.failures:
            self.failures -= 1
            raise Unavailable("the connection broke")
        return await call()


@pytest.mark.parametrize(("size", "succeeds"), [(1 << 20, True), (10, False)])
def test_the_time_of_the_transfer_is_not_a_time_of_retrying(size: int, succeeds: bool) -> None:
    async def test() -> None:
        objects = RetryingStorage(LimitedStorage(TracedStorage(Slow(memory())), 1, 1 << 30))
        other = asyncio.create_task(RetryingStorage(objects.inner).put("other", [bytes(1 << 21)], CREATE))
        await asyncio.sleep(0)  # its turn comes first; waiting for it does not count either
        if succeeds:
            await objects.put("k", [bytes(size)], CREATE)
        else:
            with pytest.raises(Unavailable, match="connection broke"):
                await objects.put("k", [bytes(size)], CREATE)
        await other

    on_virtual_time(test)


@pytest.mark.parametrize("seconds", [0, 5, 1000])
@pytest.mark.parametrize("error", [Unavailable("silent"), Unreachable("refused"), Throttled("busy")])
def test_a_time_for_retries_that_was_set_holds_for_every_failure(seconds: float, error: TStoreError) -> None:
    async def test() -> None:
        dead = Scripted(memory(), *[("before", error)] * 10_000)
        with pytest.raises(type(error)):
            await RetryingStorage(dead, RetryPolicy.lasting(seconds)).head("k")
        took = dead.times[-1] - dead.times[0]
        assert seconds - RETRY_POLICY.max_pause <= took <= seconds

    on_virtual_time(test)


def test_retries_end() -> None:
    async def test() -> None:
        clock = asyncio.get_running_loop().time
        dead = Scripted(memory(), *[("before", Unavailable("down"))] * 10_000)
        objects = RetryingStorage(dead)
        with pytest.raises(Unavailable, match="down"):
            await objects.head("k")
        assert clock() <= RETRY_POLICY.first_deadline  # no response at all: perhaps a wrong address
        dead.faults.clear()
        await objects.head("k")
        dead.faults = [("before", Unavailable("down"))] * 10_000
        began, tries = clock(), len(dead.times)
        with pytest.raises(Unavailable, match="down"):
            await objects.head("k")
        assert RETRY_POLICY.first_deadline < clock() - began <= RETRY_POLICY.deadline
        assert 6 < len(dead.times) - tries < 100

    on_virtual_time(test)


def test_an_unreachable_address_fails_at_once_but_a_restart_is_waited_for() -> None:
    async def test() -> None:
        clock = asyncio.get_running_loop().time
        scripted = Scripted(memory(), *[("before", Unreachable("refused"))] * 10_000)
        objects = RetryingStorage(scripted)
        with pytest.raises(Unreachable):
            await objects.head("k")
        assert clock() <= RETRY_POLICY.connect_deadline < RETRY_POLICY.first_deadline
        assert len(scripted.times) > 1
        scripted.faults.clear()
        await objects.head("k")
        scripted.faults = [("before", Unreachable("refused"))] * 10_000
        began = clock()
        with pytest.raises(Unreachable):
            await objects.head("k")
        assert clock() - began > RETRY_POLICY.first_deadline

    on_virtual_time(test)


def test_pauses_are_random_and_grow() -> None:
    class Loaded(world.World):
        def uniform(self, low: float, high: float) -> float:
            return high

    async def test() -> None:
        scripted = Scripted(memory(), *[("before", Unavailable(""))] * 3)
        with world.use_world(Loaded()):
            await RetryingStorage(scripted).head("k")
        pauses = [round(b - a, 6) for a, b in zip(scripted.times, scripted.times[1:], strict=False)]
        assert (
            pauses
            == [0.3, 0.9, 2.7, RETRY_POLICY.max_pause if RETRY_POLICY.max_pause < 8.1 else 8.1][: len(pauses)]
        )

    on_virtual_time(test)


def test_an_interrupted_listing_resumes_without_duplicates() -> None:
    class Breaking(Wrapper):
        listings = 0

        async def pages(self, prefix: str, delimiter: str = "") -> AsyncIterator[Page]:
            self.listings += 1
            count = 0
            async for page in self.inner.pages(prefix, delimiter):
                if count == self.listings:
                    raise Unavailable("cut off")
                count += 1
                yield page

    async def test() -> None:
        inner = memory()
        names = [f"k/{i:04d}" for i in range(3500)]
        for name in names:
            await inner.put(name, [b""], CREATE)
        breaking = Breaking(inner)
        assert await keys(RetryingStorage(breaking)) == names
        assert breaking.listings > 2

    on_virtual_time(test)


# ---- limits


async def test_requests_and_bytes_in_flight_are_limited() -> None:
    class Gauge(Wrapper):
        now = most = size = most_bytes = 0

        async def around(self, request: Request, call: Any) -> Any:
            self.now, self.size = self.now + 1, self.size + request.size
            self.most, self.most_bytes = max(self.most, self.now), max(self.most_bytes, self.size)
            await asyncio.sleep(0)
            self.now, self.size = self.now - 1, self.size - request.size
            return await call()

    gauge = Gauge(memory())
    objects = LimitedStorage(gauge, 4, 1000)
    await asyncio.gather(*[objects.head("x") for _ in range(50)])
    assert gauge.most == 4
    await asyncio.gather(*[objects.put(f"k{i}", [bytes(400)], CREATE) for i in range(20)])
    assert gauge.most_bytes == 800
    await asyncio.gather(*[objects.put(f"l{i}", [bytes(5000)], CREATE) for i in range(3)])
    assert gauge.most_bytes == 5000


async def test_a_cancelled_request_releases_its_slot() -> None:
    gate = asyncio.Event()

    class Slow(Wrapper):
        async def around(self, request: Request, call: Any) -> Any:
            await gate.wait()
            return await call()

    objects = LimitedStorage(Slow(memory()), 1, 100)
    tasks = [asyncio.create_task(objects.head("x")) for _ in range(4)]
    await asyncio.sleep(0)
    for task in tasks[:3]:  # one in flight, two waiting
        task.cancel()
    gate.set()
    assert await tasks[3] is None
    assert await objects.head("x") is None


async def test_a_request_cancelled_at_its_turn_passes_it_on() -> None:
    gate = asyncio.Event()

    class Slow(Wrapper):
        async def around(self, request: Request, call: Any) -> Any:
            await gate.wait()
            return await call()

    objects = LimitedStorage(Slow(memory()), 1, 100)

    async def first() -> None:
        await objects.head("x")
        second.cancel()  # which has just got its turn

    one = asyncio.create_task(first())
    second = asyncio.create_task(objects.head("x"))
    third = asyncio.create_task(objects.head("x"))
    await asyncio.sleep(0)
    gate.set()
    await one
    assert await third is None
    assert second.cancelled()


# ---- trace


async def test_requests_and_bytes_are_counted_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    scripted = Scripted(memory())
    objects = TracedStorage(scripted)
    with caplog.at_level(logging.DEBUG, "tstore.storage"):
        await objects.put("a", [b"12", b"345"], CREATE)
        with pytest.raises(AlreadyExists):
            await objects.put("a", [b"1"], CREATE)
        assert await objects.get("a") == b"12345"
        await objects.read("a", 1, [bytearray(3)], 3)
        await objects.head("a")
        await keys(objects)
        scripted.faults = [("before", Unavailable("down"))]
        with pytest.raises(Unavailable):
            await objects.delete("a")
    assert objects.traffic.requests == {"create": 2, "get": 1, "read": 1, "head": 1, "list": 1, "delete": 1}
    assert objects.traffic.failed == {"delete": 1}
    assert (objects.traffic.bytes_read, objects.traffic.bytes_written) == (8, 5)
    assert "create a (5 bytes): done" in caplog.text
    assert "delete a (0 bytes): Unavailable: down" in caplog.text


# ---- faults


def test_injected_faults_are_reproducible_and_as_described() -> None:
    async def story(seed: int) -> list[tuple[str, bool, bool]]:
        """Return for each put its outcome, and whether the object exists at once and at the end."""
        inner = memory()
        objects = Faults(inner, Chances(0.1, 0.1, 0.1, 0.1, 0.1), latency=0.05, jitter=0.01, seed=seed)
        lines = []
        for i in range(100):
            try:
                await objects.put(f"{i:03d}", [b"x"], CREATE)
                outcome = "done"
            except Unavailable as error:
                outcome = str(error).partition(": create")[2].partition(": ")[2]
            lines.append((outcome, await inner.head(f"{i:03d}") is not None))
        assert asyncio.get_running_loop().time() >= 5
        await asyncio.sleep(LATE)
        return [(*line, await inner.head(f"{i:03d}") is not None) for i, line in enumerate(lines)]

    async def test() -> None:
        first = await story(1)
        assert first == await story(1) != await story(2)
        assert set(first) == {
            ("done", True, True),
            ("too many requests; try again later", False, False),
            ("the request was lost; try again", False, False),
            ("the response was lost; try again", True, True),
            ("no response came; try again", False, True),
        }

    on_virtual_time(test)


def test_a_gate_at_which_no_request_arrives_and_one_that_is_never_released_name_their_requests() -> None:
    async def test() -> None:
        objects = Faults(memory())
        with pytest.raises(TimeoutError, match=r"'create commits/\*' arrived within 60 s"):
            await objects.hold("create", "commits/*").reached()
        objects.hold("get", "roots/*")
        with pytest.raises(TimeoutError, match=r"'get roots/\*' was released within 60 s"):
            await objects.get("roots/1")

    on_virtual_time(test)


def test_every_object_is_created_once_through_faults_and_retries() -> None:
    async def test() -> None:
        inner = memory()
        chances = Chances(0.05, 0.05, 0.05, 0.05, 0.05)
        hosts = [RetryingStorage(Faults(inner, chances, jitter=0.05, seed=seed)) for seed in range(4)]

        async def race(objects: Storage, number: int, key: str) -> bool:
            try:
                await objects.put(key, [b"%d" % number], CREATE)
            except AlreadyExists:
                return False
            return True

        for turn in range(100):
            key = f"r/{turn}"
            won = await asyncio.gather(*[race(host, i, key) for i, host in enumerate(hosts)])
            assert sum(won) == 1
            assert await inner.get(key) == b"%d" % won.index(True)

    on_virtual_time(test)
