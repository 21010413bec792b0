"""Long, wide and deep metadata, which must be cheap to parse and refuse."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from tests.attacks.case import Case, check, family
from tests.attacks.forgeries import Known, framed, manifest, next_record, record
from tests.attacks.harness import Harness
from tests.attacks.scopes import request
from tests.attacks.target import HOSTILE, changes
from tests.support.http_server import READ

__all__ = ["CASES"]

SIZE = 16 << 20
CPU = 3.0
"""The CPU seconds that one object may cost the server, which hold the interpreter."""

SILENCE = 5.0
"""The seconds that a concurrent honest request may wait; generous, since other processes use the CPU too."""

Make = Callable[[Known], tuple[str, bytes]]


def raw(data: bytes) -> msgspec.Raw:
    return msgspec.Raw(data)


def wide(item: bytes, count: int = 0) -> msgspec.Raw:
    """Return a list of `count` equal items, or of as many as fit into `SIZE` if 0."""
    count = count or SIZE // len(item)
    return raw(b"\xdd" + count.to_bytes(4, "big") + item * count)


def mapped(count: int) -> msgspec.Raw:
    """Return a map of `count` keys."""
    pairs = b"".join(b"\xa7%07d\x01" % number for number in range(count))
    return raw(b"\xdf" + count.to_bytes(4, "big") + pairs)


def deep(levels: int, of: bytes = b"\x91") -> msgspec.Raw:
    """Return nested lists."""
    return raw(of * levels + b"\xc0")


def of_record(**changes: Callable[[], Any]) -> Make:
    """Return a maker of the next record with these fields."""

    def make(known: Known) -> tuple[str, bytes]:
        fields = record(known, **{name: value() for name, value in changes.items()})
        return next_record(known, fields)

    return make


def of_manifest(**changes: Callable[[], Any]) -> Make:
    """Return a maker of a manifest with these fields."""
    return lambda known: (
        f"txn/wide{known.newest}/manifest",
        framed(b"M", manifest(**{name: value() for name, value in changes.items()})),
    )


def of_root(tags: Callable[[], Any], tree: Callable[[], Any] = manifest) -> Make:
    """Return a maker of the root of the next multiple of 64."""
    return lambda known: (f"roots/{64:020d}", framed(b"T", [64, b"\0" * 16, tags(), tree()]))


def of_fragment(metadata: Callable[[], Any], structure: bytes = b"") -> Make:
    """Return a maker of a fragment."""

    def make(known: Known) -> tuple[str, bytes]:
        body = ["wide", 0, 2, known.newest, "", [], False, [], manifest(), 0, structure, metadata(), True]
        return "txn/wide/part-00000-of-00002", framed(b"F", body)

    return make


def under(key: str, body: Callable[[], bytes]) -> Make:
    """Return a maker of an object with these bytes."""
    return lambda known: (key.replace("NEXT", f"{known.newest + 1:020d}"), body())


HEARTBEAT = "txn/wide/alive-00000-of-00002"
OBJECTS: dict[str, Make] = {
    "record of empty lists": of_record(metadata=lambda: {"x": wide(b"\x90")}),
    "record of nothings": of_record(metadata=lambda: {"x": wide(b"\xc0")}),
    "record of empty maps": of_record(metadata=lambda: {"x": wide(b"\x80")}),
    "record of a wide map": of_record(metadata=lambda: mapped(SIZE // 9)),
    "record of tags": of_record(tags=lambda: wide(b"\xa1x")),
    "record of paths": of_record(deleted=lambda: wide(b"\xa1x")),
    "record of parts": of_record(parts=lambda: wide(b"\x96\xa0\x00\xa0\x90\x00\x80")),
    "record of manifests": of_record(manifests=lambda: wide(msgspec.msgpack.encode(manifest()))),
    "record of references": of_record(manifests=lambda: wide(b"\x94\xa6object\xa0\x00\xc4\x00")),
    "record with a message of 16 MiB": of_record(message=lambda: "x" * SIZE),
    "record of a gc of names": of_record(
        collection=lambda: [raw(b"\x90"), raw(b"\x90"), {}, wide(b"\xa1x"), raw(b"\x90")]
    ),
    "record with an array of 16 MiB": of_record(manifests=lambda: [manifest(inline=[bytes(SIZE)])]),
    "record of 100,000 levels": of_record(metadata=lambda: {"x": deep(100_000)}),
    "record of 1,000,000 levels": of_record(metadata=lambda: {"x": deep(1_000_000)}),
    "record of levels of maps": of_record(metadata=lambda: {"x": deep(100_000, b"\x81\xa0")}),
    "record of levels as tags": of_record(tags=lambda: deep(100_000)),
    "record that declares 2^32 items": under("commits/NEXT", lambda: framed(b"R", b"\xdd\xff\xff\xff\xff")),
    "record that declares 4 GiB": under("commits/NEXT", lambda: framed(b"R", b"\xdc\x00\x11\xc6\xff\xff\xff\xff")),
    "record of 16 MiB of zeros": under("commits/NEXT", lambda: framed(b"R", bytes(SIZE))),
    "record without a frame": under("commits/NEXT", lambda: bytes(SIZE)),
    "root of tags": of_root(lambda: mapped(SIZE // 9)),
    "root of levels": of_root(lambda: deep(100_000)),
    "root of documents": of_root(dict, lambda: manifest(documents=wide(b"\xc4\x00"))),
    "manifest of documents": of_manifest(documents=lambda: wide(b"\xc4\x00")),
    "manifest of paths": of_manifest(paths=lambda: wide(b"\xa1x")),
    "manifest of packs": of_manifest(packs=lambda: wide(b"\xa0")),
    "manifest of levels": of_manifest(paths=lambda: deep(100_000)),
    "manifest with long columns": of_manifest(number=lambda: bytes(SIZE), offset=lambda: bytes(SIZE)),
    "manifest with a deep document": of_manifest(documents=lambda: [b"[" * SIZE]),
    "manifest with a wide document": of_manifest(documents=lambda: [b"[" + b"[]," * (SIZE // 3) + b"[]]"]),
    "manifest with a document of brackets in strings": of_manifest(
        documents=lambda: [b'[["",' + b'"[",' * (SIZE * 3 // 4) + b'""]']
    ),
    "fragment of empty lists": of_fragment(lambda: {"x": wide(b"\x90")}),
    "fragment of levels": of_fragment(lambda: {"x": deep(100_000)}),
    "fragment of a deep structure": of_fragment(dict, b"[" * SIZE),
    "marker of 16 MiB": under("tstore.json", lambda: b'{"format":1,"x":[' + b"[]," * (SIZE // 3) + b"[]]}"),
    "heartbeat of levels": under(HEARTBEAT, lambda: b'{"name":"half","time":1.0,"x":' + b"[" * 4000),
    "heartbeat of 16 MiB": under(HEARTBEAT, lambda: b"[" * SIZE),
    "hint of 16 MiB": under("latest", lambda: b"9" * SIZE),
    "hint of 4,000 digits": under("latest", lambda: b"9" * 4000),
    "merger of 16 MiB": under("txn/wide/merging-00000", lambda: b"9" * SIZE),
}
TOGETHER = 4
MANY = (
    "record of empty lists",
    "manifest of documents",
    "manifest with a document of brackets in strings",
    "fragment of empty lists",
    "record of manifests",
)


async def costs_little(harness: Harness, make: Make) -> None:
    """Store an object, and check its cost for the server and for a concurrent reader."""
    assert harness.sample is not None
    key, body = make(Known.of(harness.target.place, harness.sample.expired))
    await _sent(harness, [(key, body)])


async def several_cost_little(harness: Harness, make: Make) -> None:
    """Store several objects at once, and check their cost."""
    assert harness.sample is not None
    key, body = make(Known.of(harness.target.place, harness.sample.expired))
    await _sent(harness, [(key, body)] * TOGETHER)


async def _sent(harness: Harness, objects: list[tuple[str, bytes]]) -> None:
    before, cpu = harness.target.files(), harness.meter.cpu
    ended, longest = asyncio.Event(), 0.0

    async def ask_on() -> None:
        nonlocal longest
        loop = asyncio.get_running_loop()
        while not ended.is_set():
            began = loop.time()
            status, _ = await harness.target.ask(request("GET", "tstore.json", b"", READ))
            longest = max(longest, loop.time() - began)
            harness.requests += 1
            harness.kept += status == 200
            await asyncio.sleep(0.02)

    async def store(key: str, body: bytes) -> int:
        headers = () if key == "latest" or "/alive-" in key else ("If-None-Match: *",)
        status, _ = await harness.target.ask(request("PUT", key, body, HOSTILE, *headers))
        return status

    asking = asyncio.ensure_future(ask_on())
    try:
        statuses = await asyncio.gather(*[store(key, body) for key, body in objects])
    finally:
        ended.set()
        await asyncio.wait([asking])
    asking.result()
    spent = harness.meter.cpu - cpu
    key = objects[0][0]
    faults = [f"{key} is answered {n}" for n in sorted({n for n in statuses if not _right(n, key)})]
    if spent > CPU * len(objects):
        faults.append(f"it cost {spent:.1f} s of the server's CPU time")
    if longest > SILENCE:
        faults.append(f"an honest GET beside it waited for {longest:.1f} s")
    check(not faults, "; ".join(faults))
    if any(200 <= status < 300 for status in statuses):
        harness.worn = True
        await harness.check_audit(None)
    else:
        made = changes(before, harness.target.files())
        check(not made, f"{key} was refused, and the folder has changed: {made}")


def _right(status: int, key: str) -> bool:
    """Return whether a status is valid: cheap objects that no commit references may be accepted."""
    refused = status in (0, 503) or 400 <= status < 500
    return refused or (status == 201 and ("/manifest" in key or "/part-" in key))


def _cases() -> Iterator[Case]:
    little = f"it is refused; {CPU:g} s of CPU time suffice, and honest requests continue"
    yield from family("object", "stores it with a write token", little, costs_little, OBJECTS.items())
    yield from family(
        f"{TOGETHER} at once", "stores them with a write token", little, several_cost_little,
        [(name, OBJECTS[name]) for name in MANY],
    )  # fmt: skip


CASES = list(_cases())
