"""Floods of metadata that take seconds to check, beside which honest clients must make progress."""

from __future__ import annotations

import asyncio
import itertools
import signal
import struct
from collections.abc import Callable

from tests.attacks.case import Case, check
from tests.attacks.floods import Flood, beside, connected, crowd
from tests.attacks.forgeries import DOCUMENT, Known, framed, manifest, record
from tests.attacks.harness import Harness
from tests.attacks.scopes import request
from tests.attacks.target import HOSTILE
from tests.support.forging import placed_in

__all__ = ["CASES"]

SENDERS = 24
"""The number of concurrent senders: more than the server has threads."""

DRAIN = 2
STOPPED = DRAIN + 10.0
"""The seconds within which a server ends after SIGTERM; generous, since other processes use the CPU too."""

Make = Callable[[], bytes]
"""Makes the bytes of a manifest."""

MOST_NODES = 1 << 17
"""The most nodes of one page."""


def nodes(paths: list[str], documents: list[bytes]) -> bytes:
    """Return a manifest of arrays without chunks; node i has the document i, modulo their number."""
    count = len(paths)
    numbers = struct.pack(f"<{count}I", *[at % len(documents) for at in range(count)])
    columns = dict.fromkeys(("number", "pack", "offset", "length", "checks"), b"")
    owned = {"document": numbers, "replaces_node": b"\1" * count, "count": bytes(8 * count)}
    fields = manifest(packs=[], inline=[], documents=documents, paths=paths, **owned, **columns)
    return framed(b"M", fields)


def distinct(count: int = 30_000) -> bytes:
    """Return a manifest whose arrays all differ, the last of them invalid."""
    shape = b'"shape":[8]'
    assert shape in DOCUMENT
    documents = [DOCUMENT.replace(shape, b'"shape":[%d]' % (8 + at)) for at in range(count - 1)]
    return nodes([f"n{at:06}" for at in range(count)], [*documents, DOCUMENT.replace(shape, b'"shape":[-1]')])


def deep(count: int = 30_000) -> bytes:
    """Return a manifest of arrays at paths of 255 levels, the last of them below another."""
    paths = [f"n{at:06}" + "/a" * 254 for at in range(count - 1)]
    return nodes([*paths, paths[-1] + "/b"], [DOCUMENT])


def short(count: int = 800_000) -> bytes:
    """Return a manifest of short documents and names, the last listed twice, in one page."""
    names = short_names(count - 1)
    return nodes([*names, names[-1]], [b"%d" % at for at in range(count)])


def paged(count: int = 2) -> bytes:
    """Return a manifest of pages of short names, one listed twice, which take far more memory than bytes."""
    group = b'{"zarr_format":3,"node_type":"group","attributes":{"a":%d}}'
    page = nodes(short_names(MOST_NODES), [group % at for at in range(MOST_NODES)])
    return b"".join([len(part).to_bytes(8, "little") + part for part in [page] * count + [short(MOST_NODES)]])


def short_names(count: int) -> list[str]:
    """Return different names of four characters, sorted."""
    letters = [chr(code) for code in range(33, 127) if chr(code) not in "./"]
    return ["".join(name) for name in itertools.islice(itertools.product(letters, repeat=4), count)]


def quoted(size: int = 48 << 20) -> bytes:
    """Return a manifest with a document that is an endless list of brackets within strings."""
    return nodes(["n"], [b'[["",' + b'"[",' * (size // 4) + b'""]'])


def commits(make: Make) -> Flood:
    """Store a manifest once, and then send records that name it."""

    async def flood(harness: Harness) -> None:
        assert harness.sample is not None
        known = Known.of(harness.target.place, harness.sample.expired)
        key, body = "txn/heavy/manifest", make()
        await harness.target.ask(request("PUT", key, body, HOSTILE, "If-None-Match: *"))
        named = ["object", key, len(body), body[-16:]]

        async def one(_: int) -> None:
            newest = harness.newest
            forged = record(known._replace(newest=newest), transaction="heavy", manifests=[named])
            await _put(
                harness,
                f"commits/{newest + 1:020d}",
                placed_in(harness.target.place, newest + 1, framed(b"R", forged)),
            )

        await crowd(SENDERS, one)

    return flood


def manifests(make: Make, senders: int = SENDERS) -> Flood:
    """Send manifests that are refused."""

    async def flood(harness: Harness) -> None:
        body, numbers = make(), itertools.count()

        async def one(_: int) -> None:
            await _put(harness, f"txn/heavy{next(numbers)}/manifest", body)

        await crowd(senders, one)

    return flood


async def _put(harness: Harness, key: str, body: bytes) -> None:
    async with connected(harness) as raw:
        await raw.send(request("PUT", key, body, HOSTILE, "If-None-Match: *"))
        status, _ = await raw.response()
        check(status in (0, 412, 422, 503), f"{key} got {status}")


async def stops_beside(harness: Harness, flood: Flood) -> None:
    """Stop the server during a flood, and check that it ends in time."""
    harness.options = ("--drain", str(DRAIN))
    harness.fresh()
    flooding = asyncio.ensure_future(flood(harness))
    try:
        await asyncio.sleep(DRAIN)
        check(not flooding.done(), f"the flood has ended: {flooding}")
        harness.process.process.send_signal(signal.SIGTERM)
        status = await asyncio.to_thread(harness.process.process.wait, STOPPED)
        check(status == 0, f"the server ended with exit status {status}")
    finally:
        flooding.cancel()
        await asyncio.wait([flooding])
        harness.options = ()
        harness.fresh()


_FLOODS = {
    "distinct documents": (f"{SENDERS} senders of commits of 30,000 different arrays", commits(distinct)),
    "deep paths": (f"{SENDERS} senders of commits of 30,000 paths of 255 levels", commits(deep)),
    "short names": (f"{SENDERS} senders of manifests of 800,000 short names and documents", manifests(short)),
    "pages of short names": (f"{SENDERS} senders of pages of 131,072 short names each", manifests(paged)),
    "brackets in strings": ("4 senders of documents of 48 MiB of them", manifests(quoted, 4)),
}

CASES = [
    *(
        Case(
            name,
            does,
            "9 of 10 honest restores succeed, a save of 4 MB completes and is restored, and memory is bounded",
            lambda harness, flood=flood: beside(harness, flood),  # type: ignore[misc]
        )
        for name, (does, flood) in _FLOODS.items()
    ),
    *(
        Case(
            f"SIGTERM beside {name}",
            does,
            f"the server ends within {STOPPED:g} s",
            lambda harness, flood=flood: stops_beside(harness, flood),  # type: ignore[misc]
        )
        for name, (does, flood) in _FLOODS.items()
        if name in ("distinct documents", "deep paths")
    ),
]
