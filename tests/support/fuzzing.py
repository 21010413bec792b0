"""Seeded fuzzing of bytes and documents, with limits of time and memory for each case.

`TSTORE_FUZZ_SECONDS=600 pytest -s tests/attacks` runs each fuzzer for ten minutes instead of a few hundred cases
and prints the number of cases; `TSTORE_FUZZ_SEED=7` repeats one case.
"""

from __future__ import annotations

import itertools
import os
import random
import resource
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

LONGEST = 10  # seconds per case
MEMORY = 1 << 30  # bytes that all cases together may add to the process

Attack = Callable[[random.Random], bool]
"""Runs one case and returns whether the input was accepted. Any exception is a fault."""


def fuzz(name: str, attack: Attack, cases: int) -> None:
    """Run a fuzzer: it must accept or refuse each case, and do both at least once."""
    seconds, seed = os.environ.get("TSTORE_FUZZ_SECONDS"), os.environ.get("TSTORE_FUZZ_SEED")
    end = time.monotonic() + float(seconds) if seconds else None
    seeds = [int(seed)] if seed else itertools.count() if end else range(cases)
    counts = {True: 0, False: 0}
    with bounded_memory():
        for case in seeds:
            if end and time.monotonic() > end:
                break
            with bounded_time():
                try:
                    counts[bool(attack(random.Random(f"{name} {case}")))] += 1
                except BaseException as error:
                    error.add_note(f"TSTORE_FUZZ_SEED={case} repeats this case of {name}")
                    raise
    tried = sum(counts.values())
    print(f"{name}: {tried} cases, {counts[True]} accepted, {counts[False]} refused, 0 faults")
    assert seed or (counts[True] and counts[False]), f"{name}: {counts} shows nothing"


@contextmanager
def bounded_memory(most: int = MEMORY) -> Iterator[None]:
    """Limit the address space that the block may add."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + most, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


@contextmanager
def bounded_time(seconds: int = LONGEST) -> Iterator[None]:
    """Limit the CPU time of the block, and its wall time to ten times that."""

    def late(*_: object) -> None:
        raise AssertionError(f"a case took more than {seconds} s")

    before = [signal.signal(number, late) for number in (signal.SIGPROF, signal.SIGALRM)]
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.alarm(10 * seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.alarm(0)
        for number, handler in zip((signal.SIGPROF, signal.SIGALRM), before, strict=True):
            signal.signal(number, handler)


def mutated(data: bytes, choice: random.Random, others: tuple[bytes, ...] = ()) -> bytes:
    """Return the bytes with a few changes: bits, lengths, pieces removed, repeated or taken from `others`."""
    result = bytearray(data)
    for _ in range(choice.choice((0, 1, 1, 1, 1, 1, 1, 2, 3, 6))):
        at = choice.randrange(len(result) + 1)
        if choice.random() < 0.4:  # favour headers
            at = min(at, choice.randrange(40))
        width = choice.choice((1, 1, 2, 4, 8))
        match choice.randrange(10):
            case 0 | 1 if result:
                result[at % len(result)] ^= 1 << choice.randrange(8)
            case 2 | 3 | 4:
                result[at : at + width] = absurd_length(choice, len(data), width)
            case 5:
                del result[at : at + choice.choice((1, 2, 8, 1000))]
            case 6:
                result[at:at] = result[at : at + choice.choice((1, 4, 16, 100))]
            case 7:
                result[at:at] = bytes(choice.choice((1, 8, 300)))
            case 8 if others:
                other = choice.choice(others)
                result[at : at + 16] = other[at : at + choice.choice((4, 16, 100))]
            case 9:
                del result[at:]
    return bytes(result)


def absurd_length(choice: random.Random, near: int, width: int) -> bytes:
    """Return a little-endian number of `width` bytes that could be a length."""
    near += choice.choice((-1, 0, 1, 2, 16, -16))
    number = choice.choice((0, 1, 7, near, near * 2, 1 << 20, 1 << 30, (1 << 31) - 1, 1 << 31, 1 << 40, -1, -2))
    return (number % (1 << (8 * width))).to_bytes(width, "little")


ABSURD: list[Any] = [
    None,
    True,
    False,
    0,
    1,
    -1,
    2,
    7,
    255,
    256,
    1 << 31,
    1 << 40,
    1 << 60,
    (1 << 63) - 1,
    1 << 63,
]
ABSURD += [1 << 64, 10**30, -(1 << 63), 0.5, -0.0, 1e300, "", "x", "NaN", "-Infinity", "é" * 2000, "\0", "\ud800"]
ABSURD += ["9" * 5000, "1e400", "0x1p99999", [], {}, [[]], [0] * 100, [1 << 40, 0, 1 << 40], ["a"], {"name": "x"}]
ABSURD += [{"name": "zstd", "configuration": {"level": "x"}}, {"configuration": 5}, ["int", "x"], ["array", "w"]]


def changed(value: Any, choice: random.Random, absurd: list[Any]) -> Any:
    """Return a document with one value, item or key changed."""
    if isinstance(value, list) and value and choice.random() < 0.9:
        items, at = list(value), choice.randrange(len(value))
        match choice.randrange(8):
            case 0:
                del items[at]
            case 1:
                items *= choice.choice((2, 20))
            case 2:
                items[at] = items[choice.randrange(len(items))]
            case _:
                items[at] = changed(items[at], choice, absurd)
        return items
    if isinstance(value, dict) and value and choice.random() < 0.9:
        result, key = dict(value), choice.choice(list(value))
        match choice.randrange(8):
            case 0:
                del result[key]
            case 1:
                result[choice.choice([k for k in absurd if isinstance(k, str)])] = result[key]
            case _:
                result[key] = changed(result[key], choice, absurd)
        return result
    if type(value) is int and choice.random() < 0.2:
        return value + choice.choice((-1, 1, 2, 64))
    return choice.choice(absurd)


def nested(choice: random.Random, levels: int | None = None) -> str:
    """Return JSON nested so deeply that parsers and recursive functions may fail."""
    levels = levels or choice.choice((100, 150, 300, 500, 900, 1100, 3000, 100_000))
    return choice.choice(("[" * levels + "]" * levels, '{"a":' * levels + "1" + "}" * levels, "[" * levels))
