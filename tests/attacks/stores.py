"""Stores and servers that are hostile to who opens them.

The client runs in a process of its own. It has to end, within a bound of time and memory, with the right data or a
`TStoreError`; any other exception, a crash, a freeze, or a token in the wrong hands is broken.
"""

from __future__ import annotations

import asyncio
import gzip
import itertools
import json
import os
import random
import shutil
import struct
import tempfile
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import answers
import numcodecs
import numpy as np
import xxhash
from answers import Request, ok, part

from tests.attacks import forgeries
from tests.attacks.case import Case, check, family
from tests.attacks.children import Children
from tests.attacks.forgeries import Forgery, Known, array, framed, manifest, record_of
from tests.attacks.stage import Stage
from tests.attacks.target import files
from tests.attacks.victim import OPENING, READING, WRITING, visit

__all__ = ["CASES"]

SECONDS = 150.0
"""How long a client may take: it asks a server that says nothing three times, and waits for half a minute."""

MEMORY = 400 << 20
"""The most that a client may have resident."""

ADDRESS_SPACE = 2 << 30
"""How much more a client may map: enough for its threads, too little for a bomb."""

TOKEN = "secret-0123456789"


async def endure(
    children: Children,
    url: str,
    verbs: tuple[str, ...],
    options: dict[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Let a client do all this with a hostile store, and return what came of it."""
    last: list[Any] = []
    ended = await children.run(
        visit, url, options, verbs,
        seconds=SECONDS, limit=ADDRESS_SPACE, environment=environment, progress=last.append,
    )  # fmt: skip
    verb = next((v for v in reversed(last) if isinstance(v, str)), "start")
    peak = max([ended.memory, *(v for v in last if isinstance(v, int))])
    children.memory = max(children.memory, peak)
    check(not ended.error, f"{verb}: {ended.error} (peak {peak >> 20} MiB)")
    check(
        peak <= MEMORY,
        f"the client had {peak >> 20} MiB resident, expected at most {MEMORY >> 20}; {ended.result}",
    )
    return dict(ended.result)


# ---- folders


def copied(specimen: Path, folder: str) -> Path:
    """Return a copy of a store, whose files are links to the same bytes."""
    place = Path(folder) / "store"
    shutil.copytree(specimen, place, copy_function=os.link)
    return place


async def forged_folder(stage: Stage, forgery: Forgery) -> None:
    """Open a store in which a forgery lies, however it came there."""
    assert stage.specimen is not None
    with tempfile.TemporaryDirectory(prefix="tstore-attacks-") as folder:
        place = copied(stage.specimen.folder, folder)
        key, body = forgery(Known.of(place, stage.specimen.expired))
        (place / key).parent.mkdir(parents=True, exist_ok=True)
        (place / key).unlink(missing_ok=True)
        (place / key).write_bytes(body)
        before = files(place)
        await endure(stage.children, str(place), READING)
        check(files(place) == before, "reading has changed the store")


def chunk_of(data: bytes, codecs: list[dict[str, Any]], dtype: str = "float32", size: int = 2) -> Forgery:
    """Return the forgery of a record whose array has one chunk: these bytes, which lie in a pack beside it."""

    def forge(known: Known) -> tuple[str, bytes]:
        key = f"txn/forged{known.newest}/pack-0-0"
        (known.folder / key).parent.mkdir()
        (known.folder / key).write_bytes(data)
        grid = {"name": "regular", "configuration": {"chunk_shape": [size]}}
        fields = array(shape=[size], chunk_grid=grid, codecs=codecs, data_type=dtype)
        blocks = [xxhash.xxh3_128_digest(data[i : i + (1 << 20)]) for i in range(0, max(1, len(data)), 1 << 20)]
        where = manifest(
            packs=[key],
            inline=[],
            documents=fields[3],
            length=struct.pack("<Q", len(data)),
            checks=b"".join(blocks),
        )
        changes = {"manifests": [where], "tags": ["step/12"], "replaces": True}
        return record_of(lambda k: changes)(known)

    return forge


PLAIN = {"name": "bytes", "configuration": {"endian": "little"}}
ZSTD = [PLAIN, {"name": "zstd", "configuration": {"level": 1, "checksum": False}}]
GZIP = [PLAIN, {"name": "gzip", "configuration": {"level": 1}}]
BLOSC = [
    PLAIN,
    {
        "name": "blosc",
        "configuration": {"cname": "zstd", "clevel": 1, "shuffle": "noshuffle", "typesize": 4, "blocksize": 0},
    },
]


def zstd_bomb(declared: bytes, blocks: int) -> bytes:
    """Return a frame of so many runs of 128 KiB, which says of itself what `declared` says."""
    run = lambda last: struct.pack("<I", (1 << 17) << 3 | 1 << 1 | last)[:3] + b"\0"  # noqa: E731
    return b"\x28\xb5\x2f\xfd" + declared + run(0) * (blocks - 1) + run(1)


def blosc_chunk(seed: int) -> bytes:
    """Return a chunk of blosc of which some bytes of the header are others."""
    choice = random.Random(seed)
    data = bytearray(numcodecs.Blosc(cname="zstd", clevel=1, shuffle=0).encode(np.arange(2, dtype="f4")))
    if seed == 0:
        data[4:8] = struct.pack("<I", 1 << 30)
    elif seed == 1:
        data[4:8] = struct.pack("<I", (1 << 31) - 1)
    else:
        at = choice.randrange(1, 16)
        data[at] = choice.randrange(256)
        if choice.random() < 0.5:
            data[choice.choice((4, 8, 12)) :][:4] = struct.pack(
                "<I", choice.choice((0, 1, 1 << 30, (1 << 32) - 1))
            )
    return bytes(data)


_MEMBER = gzip.compress(bytes(16 << 20), 9)
BOMBS: dict[str, Forgery] = {
    "zstd, 1 GiB declared": chunk_of(zstd_bomb(b"\xa0" + struct.pack("<I", 1 << 30), 1 << 13), ZSTD),
    "zstd, 1 GiB undeclared": chunk_of(zstd_bomb(b"\x00\x58", 1 << 13), ZSTD),
    "zstd, 8 bytes declared": chunk_of(zstd_bomb(b"\x20\x08", 1 << 13), ZSTD),
    "zstd, 2^62 declared": chunk_of(zstd_bomb(b"\xe0" + struct.pack("<Q", 1 << 62), 60), ZSTD),
    "zstd, many frames": chunk_of(zstd_bomb(b"\xa0" + struct.pack("<I", 1 << 24), 1 << 7) * 64, ZSTD),
    "zstd, no frame": chunk_of(b"\0" * 252, ZSTD),
    "zstd, skippable frames": chunk_of(b"\x50\x2a\x4d\x18\xff\xff\xff\xff" * 1000, ZSTD),
    "gzip, 1 GiB": chunk_of(_MEMBER * 64, GZIP),
    "gzip, half a member": chunk_of(_MEMBER[:100], GZIP),
    "gzip, a tail": chunk_of(gzip.compress(bytes(8)) + b"tail", GZIP),
    "gzip, a long name": chunk_of(b"\x1f\x8b\x08\x08" + bytes(6) + b"a" * (1 << 20), GZIP),
    **{f"blosc, seed {seed}": chunk_of(blosc_chunk(seed), BLOSC) for seed in range(12)},
    "blosc, empty": chunk_of(b"", BLOSC),
    "blosc, half a header": chunk_of(b"\2\1\0\4\0\0\0", BLOSC),
    "bytes, too many": chunk_of(bytes(1 << 20), [PLAIN]),
    "bytes, too few": chunk_of(b"\0", [PLAIN]),
    "twice compressed": chunk_of(gzip.compress(zstd_bomb(b"\x00\x58", 1 << 13)), [*ZSTD, GZIP[1]]),
    **{
        f"exmy, {name}": chunk_of(data, [{"name": "exmy", "configuration": {"format": "e4m3"}}])
        for name, data in (
            ("empty", b""),
            ("zeros", bytes(3)),
            ("too many", bytes(1 << 16)),
            ("ones", b"\xff" * 40),
        )
    },
}

DOCUMENTS: dict[str, dict[str, Any]] = {
    "2^40 values": {"shape": [1 << 40]},
    "2^40 values, sparse": {"shape": [1 << 40], "tstore": {"must_understand": False, "sparse": True}},
    "a chunk of 2^40": {"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [1 << 40]}}},
    "2^60 chunks": {"shape": [1 << 60], "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [1]}}},
    "no values": {"shape": [0]},
    "a chunk of zero": {"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [0]}}},
    "64 dimensions": {
        "shape": [1] * 64,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [1] * 64}},
    },
    "a shape of booleans": {"shape": [True]},
    "a shape of floats": {"shape": [8.0]},
    "a shape of null": {"shape": None},
    "a grid of text": {"chunk_grid": "regular"},
    "a grid of null": {"chunk_grid": None},
    "a grid without chunks": {"chunk_grid": {"name": "regular", "configuration": {}}},
    "another grid": {"chunk_grid": {"name": "rectilinear", "configuration": {}}},
    "a dtype of lists": {"data_type": [["x", "f4"]]},
    "a dtype of a record": {"data_type": {"name": "struct"}},
    "a dtype of null": {"data_type": None},
    "a dtype of dates": {"data_type": "datetime64[ns]"},
    "float128": {"data_type": "float128"},
    "a comma as dtype": {"data_type": "f4,f4"},
    "codecs of text": {"codecs": "bytes"},
    "codecs of numbers": {"codecs": [5]},
    "a codec of null": {"codecs": [None]},
    "codecs a thousand times": {"codecs": [PLAIN] + [GZIP[1]] * 1000},
    "a codec configured by text": {"codecs": [{"name": "bytes", "configuration": "x"}]},
    "gzip of level 10^9": {"codecs": [PLAIN, {"name": "gzip", "configuration": {"level": 10**9}}]},
    "zstd of level x": {"codecs": [PLAIN, {"name": "zstd", "configuration": {"level": "x"}}]},
    "blosc of 2^40": {"codecs": [PLAIN, {"name": "blosc", "configuration": {"typesize": 1 << 40}}]},
    "exmy of e99m99": {"codecs": [{"name": "exmy", "configuration": {"format": "e99m99"}}]},
    "exmy of 5": {"codecs": [{"name": "exmy", "configuration": {"format": 5}}]},
    "exmy of blocks of 0": {"codecs": [{"name": "exmy", "configuration": {"format": "e4m3", "block": 0}}]},
    "exmy of more": {"codecs": [{"name": "exmy", "configuration": {"format": "e4m3", "x": [1]}}]},
    "a fill value of null": {"fill_value": None},
    "a fill value of hex": {"fill_value": "0x7fc00000"},
    "a fill value of 10^999": {"fill_value": "1" + "0" * 999},
    "a fill value of an object": {"fill_value": {}},
    "names of numbers": {"dimension_names": [5]},
    "names of text": {"dimension_names": "x"},
    "one name too many": {"dimension_names": ["x", "y"]},
    "attributes of a list": {"attributes": [1]},
    "attributes of null": {"attributes": None},
    "transformers": {"storage_transformers": [{"name": "x"}]},
    "what must be understood": {"future": {"must_understand": True}},
    "tstore of text": {"tstore": "sparse"},
    "sparse of text": {"tstore": {"must_understand": False, "sparse": "no"}},
    "zarr_format 2": {"zarr_format": 2},
    "zarr_format of text": {"zarr_format": "3"},
    "a node of another kind": {"node_type": "table"},
    "a group": {"node_type": "group"},
}


def documented(changes: dict[str, Any]) -> Forgery:
    """Return the forgery of a record of one array whose document says something odd."""
    return record_of(lambda known: {"manifests": [array(**changes)], "tags": ["step/13"], "replaces": True})


# ---- servers


def marker() -> bytes:
    return json.dumps({"format": 1, "uuid": str(uuid.UUID(int=0, version=4))}).encode()


OURS = ("Server: tstore/9", "X-TStore-Version: 9")
ENDLESS = b"HTTP/1.1 200 OK\r\nServer: tstore/9\r\nX-TStore-Version: 9\r\nTransfer-Encoding: chunked\r\n\r\n"
FIRST = f"/commits/{1:020d}"

Reply = Callable[[Request], "bytes | Awaitable[bytes | None] | None"]


class Served:
    """Answers a client from the objects of a store, but where a hostile reply is given for a path."""

    def __init__(self, objects: dict[str, bytes], replies: Mapping[str, Reply]) -> None:
        self.objects = objects
        self.replies = replies
        self.shown: list[str] = []
        """The tokens that clients have shown."""

    def __call__(self, request: Request) -> bytes | Awaitable[bytes | None] | None:
        """The answer to a request."""
        if "Authorization" in request.fields:
            self.shown.append(request.fields["Authorization"])
        path = request.path.partition("?")[0]
        reply = self.replies.get(path) or self.replies.get("*")
        if reply is not None:
            return reply(request)
        data = self.objects.get(path[1:])
        if data is None:
            return ok(b"", *OURS, status="404 Not Found")
        if request.method == "HEAD":
            return ok(b"", *OURS, length=len(data))
        asked = request.fields.get("Range", "")
        if asked.startswith("bytes="):
            first, _, last = asked[6:].partition("-")
            start = int(first) if first else max(0, len(data) - int(last))
            stop = min(len(data), int(last) + 1) if first and last else len(data)
            return part(data[start:stop], f"{start}-{stop - 1}/{len(data)}", *OURS)
        return ok(data, *OURS)


def endless(piece: bytes) -> Reply:
    """Return a reply of chunks without end."""

    async def reply(request: Request) -> None:
        request.writer.write(ENDLESS)
        while not request.writer.is_closing():
            request.writer.write(b"%x\r\n" % len(piece) + piece + b"\r\n")
            await request.writer.drain()

    return reply


def for_ever(piece: bytes, pause: float, first: bytes = b"") -> Reply:
    """Return a reply of pieces, each after a pause, without end."""

    async def reply(request: Request) -> None:
        request.writer.write(first)
        while not request.writer.is_closing():
            request.writer.write(piece)
            await request.writer.drain()
            await asyncio.sleep(pause)

    return reply


def pages(request: Request) -> bytes:
    """Return a page of a list that goes on for ever."""
    after = request.path.partition("after=")[2].partition("&")[0]
    count = int(after[-12:]) if after[-12:].isdigit() else 0
    entries = [{"key": f"txn/t{count + i:012d}", "size": 1, "age": 1.0} for i in range(1000)]
    listed = {"entries": [], "folders": [f"{e['key']}/" for e in entries], "next": f"txn/t{count + 1000:012d}"}
    return ok(json.dumps(listed).encode(), *OURS)


def same_page(request: Request) -> bytes:
    """Return a page that is followed by itself."""
    return ok(json.dumps({"entries": [], "folders": ["txn/a/"], "next": "txn/a"}).encode(), *OURS)


def every_number(known: Known) -> dict[str, Reply]:
    """Return the replies of a log in which every number is a commit."""
    body = framed(b"R", forgeries.record(known, base=0, collected=0, transaction="x"))

    def reply(request: Request) -> bytes:
        path = request.path.partition("?")[0]
        if path == "/tstore.json":
            return ok(marker(), *OURS)
        if path.startswith("/commits/"):
            return ok(b"" if request.method == "HEAD" else body, *OURS, length=len(body))
        return ok(b"", *OURS, status="404 Not Found")

    return {"*": reply}


def redirect(where: str, status: str = "302 Found") -> Reply:
    """Return a reply that leads elsewhere; `{n}` in it is another number each time."""
    numbers = itertools.count()
    return lambda request: ok(b"", f"Location: {where.replace('{n}', str(next(numbers)))}", *OURS, status=status)


def bomb(request: Request) -> bytes:
    """Return a body whose encoding is a bomb."""
    return ok(_MEMBER * 32, "Content-Encoding: gzip", *OURS)


SERVERS: dict[str, tuple[dict[str, Reply], tuple[str, ...]]] = {
    "endless marker": ({"/tstore.json": endless(b" " * 65536)}, OPENING),
    "marker of 1 TiB": ({"/tstore.json": for_ever(b" " * 65536, 0, ok(b"", *OURS, length=1 << 40))}, OPENING),
    "endless hint": ({"/latest": endless(b"1" * 65536)}, OPENING),
    "endless record": ({FIRST: endless(b"\xc0" * 65536)}, OPENING),
    "record of 1 TiB": ({FIRST: for_ever(b"\xc0" * 65536, 0, ok(b"", *OURS, length=1 << 40))}, OPENING),
    "endless root": ({f"/roots/{64:020d}": endless(b"\xc0" * 65536)}, READING),
    "endless list": ({"/": pages}, ("transactions", "verify", "gc")),
    "a list that goes round": ({"/": same_page}, ("transactions", "verify", "gc")),
    "a list of 1 GiB": ({"/": endless(b'{"entries":[' + b'{"key":"txn/a/pack-0","size":1},' * 2000)}, ("gc",)),
    "100 Continue for ever": ({"/tstore.json": for_ever(b"HTTP/1.1 100 Continue\r\n\r\n", 0.001)}, OPENING),
    "103 for ever": ({"/tstore.json": for_ever(b"HTTP/1.1 103 Early Hints\r\n\r\n", 0.001)}, OPENING),
    "a head without end": ({"/tstore.json": for_ever(b"X-A: b\r\n", 0.001, b"HTTP/1.1 200 OK\r\n")}, OPENING),
    "a marker that drips": ({"/tstore.json": for_ever(b"1\r\n \r\n", 1, ENDLESS)}, OPENING),
    "a record that drips": ({FIRST: for_ever(b"1\r\n \r\n", 1, ENDLESS)}, OPENING),
    "redirects round": ({"/tstore.json": redirect("/tstore.json")}, OPENING),
    "redirects without end": ({"*": redirect("/a{n}")}, OPENING),
    "a redirect to a file": ({"/tstore.json": redirect("file:///etc/passwd")}, OPENING),
    "a redirect of a write": ({f"/commits/{62:020d}": redirect("/x", "307 Temporary Redirect")}, WRITING),
    "a bomb as Content-Encoding": ({"/tstore.json": bomb}, OPENING),
    "503 for 10^9 seconds": (
        {"/tstore.json": lambda r: ok(b"", "Retry-After: 1000000000", *OURS, status="503 Busy")},
        OPENING,
    ),
    "503 for ever": ({FIRST: lambda r: ok(b"", "Retry-After: 0", *OURS, status="503 Busy")}, OPENING),
    "a body that ends early": ({FIRST: lambda r: ok(b"tstoreR", *OURS, length=700)}, OPENING),
    "a body that is too long": ({FIRST: lambda r: ok(b"tstoreR" * 100, *OURS, length=7)}, OPENING),
    "a record of another kind": ({FIRST: lambda r: ok(marker(), *OURS)}, READING),
    "an Age of text": ({"/latest": lambda r: ok(b"1", "X-TStore-Age: nan", *OURS)}, READING),
}


async def hostile_server(stage: Stage, given: tuple[dict[str, Reply], tuple[str, ...]]) -> None:
    """Open the store of a server that answers as it likes."""
    assert stage.specimen is not None
    replies, verbs = given
    served = Served(files(stage.specimen.folder), replies)
    async with answers.serving(served) as server:
        await endure(stage.children, server.url, verbs)


async def every_number_exists(stage: Stage, _: None) -> None:
    """Open a store whose log never ends."""
    assert stage.specimen is not None
    known = Known.of(stage.specimen.folder, stage.specimen.expired)
    async with answers.serving(Served({}, every_number(known))) as server:
        await endure(stage.children, server.url, OPENING)


async def token_asked_for(stage: Stage, variables: tuple[dict[str, str], dict[str, Any] | None]) -> None:
    """Ask a client that has a token for another server for it, by a 401."""
    environment, options = variables
    served = Served({}, {"*": lambda r: ok(b"", "WWW-Authenticate: Bearer", status="401 Unauthorized")})
    async with answers.serving(served) as server:
        await endure(stage.children, server.url, OPENING, options, environment)
    check(not served.shown, "the token of another server was sent to one that asked for it")


async def token_carried_on(stage: Stage, _: None) -> None:
    """Lead a client that shows its token to another server."""
    other = Served({}, {"*": lambda r: ok(b"", "WWW-Authenticate: Bearer", status="401 Unauthorized")})
    async with answers.serving(other) as elsewhere:
        first = Served({}, {"*": redirect(f"{elsewhere.url}/tstore.json")})
        async with answers.serving(first) as server:
            await endure(stage.children, server.url, OPENING, {"token": TOKEN})
    check(not other.shown, "the token was sent to where a redirect led")


def _cases() -> Iterator[Case]:
    ends = f"right data or a TStoreError, within {SECONDS:g} s and {MEMORY >> 20} MiB"
    yield from family("server", "answers as it likes", ends, hostile_server, SERVERS.items())
    yield from family(
        "server", "has a commit of every number", ends, every_number_exists, [("every number is a commit", None)]
    )
    mine = {"TSTORE_TOKEN_STORE_EXAMPLE_COM": TOKEN}
    yield from family(
        "token", "answers 401", "no token of another server is sent", token_asked_for,
        [("TSTORE_TOKEN", ({"TSTORE_TOKEN": TOKEN}, None)), ("of another host", (mine, None))],
    )  # fmt: skip
    yield from family(
        "token", "redirects to another server", "that sees no token", token_carried_on, [("a redirect", None)]
    )
    yield from family("bomb", "has a chunk that decodes to more than it may", ends, forged_folder, BOMBS.items())
    yield from family(
        "document", "has an odd zarr.json", ends, forged_folder,
        [(name, documented(changes)) for name, changes in DOCUMENTS.items()],
    )  # fmt: skip
    yield from family(
        "record", "has an odd record", ends, forged_folder,
        [
            (name, record_of(changes))
            for table in (forgeries.FIELDS, forgeries.COLLECTIONS, forgeries.CONDEMNING)
            for name, changes in table.items()
        ],
    )  # fmt: skip
    yield from family("object", "has an odd object", ends, forged_folder, forgeries.OTHERS.items())
    yield from family(
        "root",
        "has an odd root",
        ends,
        forged_folder,
        [(name, forge) for name, (_, forge) in forgeries.ROOTS.items()],
    )


CASES = list(_cases())
