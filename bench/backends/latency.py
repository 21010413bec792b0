"""The time of restores if every request takes 50 ms, and the number of requests of a commit."""

from __future__ import annotations

import asyncio
import time
import uuid
from statistics import median
from typing import NamedTuple

import numpy as np

import tstore.sync as tstore
from bench.bars import Bar
from tstore.core.storage.memory import MemoryStorage
from tstore.core.storage.remote import as_remote
from tstore.lab.conformance.faults import Faults

ARRAYS = 1000
EACH = 16 << 10
LATENCY = 0.05


class Latencies(NamedTuple):
    """Seconds by round for `arrays` arrays and for the same bytes in one array; requests and objects of a save."""

    arrays: int
    many: list[float]
    one: list[float]
    save: dict[str, int]
    objects: int

    def __str__(self) -> str:
        return (
            f"50 ms per request: {self.arrays} arrays {median(self.many):.2f} s, the same bytes in one "
            f"array {median(self.one):.2f} s; one commit: {self.save} for {self.objects} objects"
        )

    def bars(self) -> list[Bar]:
        ratio, most = median(a / b for a, b in zip(self.many, self.one, strict=True)), self.objects + 5
        what, requests = f"requests of a commit of {self.objects} objects", sum(self.save.values())
        return [
            Bar(f"50 ms a request: {self.arrays} arrays ÷ one", 3, ratio, most=True),
            Bar(what, most, requests, most=True, unit=""),
        ]


def measure(rounds: int) -> Latencies:
    """Measure a store with many arrays, and another with the same bytes in one array."""
    values = np.random.default_rng(0).random((ARRAYS, EACH // 8))
    many, one = uuid.uuid4().hex, uuid.uuid4().hex
    with tstore.open(as_remote(MemoryStorage(many))) as store:
        before = store.traffic.requests if store.traffic else {}
        tstore.save(store, {f"a{i}": values[i] for i in range(ARRAYS)}, 0)
        after = store.traffic.requests if store.traffic else {}
    objects = len(asyncio.run(MemoryStorage(many).list("txn/"))) + 1
    with tstore.open(as_remote(MemoryStorage(one))) as store:
        tstore.save(store, {"a": values}, 0)
    requests = {k: n - before.get(k, 0) for k, n in after.items() if n > before.get(k, 0)}
    result = Latencies(ARRAYS, [], [], requests, objects)
    for _ in range(rounds):
        for name, seconds in ((many, result.many), (one, result.one)):
            began = time.perf_counter()
            with tstore.open(as_remote(Faults(MemoryStorage(name), latency=LATENCY)), "r") as store:
                tstore.restore(store, 0)
            seconds.append(time.perf_counter() - began)
    return result
