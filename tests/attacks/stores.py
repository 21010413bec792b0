"""Hostile stores and servers, opened by a client.

The client runs in a separate process. It must end with the right data or a `TStoreError`, within bounds of time
and memory. Any other exception, a crash, a hang, or a token sent to the wrong server counts as broken.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.attacks import forgeries
from tests.attacks.case import Case, check, family
from tests.attacks.children import Children
from tests.attacks.chunks import BOMBS, DOCUMENTS, documented
from tests.attacks.forgeries import Forgery, Known, commit, record_of
from tests.attacks.harness import Harness
from tests.attacks.servers import SERVERS, Reply, Served, every_number, redirect
from tests.attacks.target import files
from tests.attacks.victim import OPENING, READING, visit
from tests.support import raw_http
from tests.support.raw_http import ok

__all__ = ["CASES", "HEAVY"]

SECONDS = 80.0
"""The seconds that a client may take: each call ends after a minute, whatever a server sends."""

MEMORY = 512 << 20
"""The bound on a client's resident memory."""

ADDRESS_SPACE = 2 << 30
"""The additional address space of a client: enough for its threads, too little for a bomb."""

WALKING = ("restore", "history"), ("verify", "gc")
"""The verbs that read all records of a store: those of one client, and those of another."""

LONG = 160.0
"""The seconds that a client may take if it decodes much, and several times because it caches nothing."""

TOKEN = "secret-0123456789"


async def endure(
    children: Children,
    url: str,
    verbs: tuple[str, ...],
    options: dict[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
    seconds: float = SECONDS,
) -> dict[str, str]:
    """Let a client apply verbs to a hostile store, and return the outcome of each."""
    last: list[Any] = []
    ended = await children.run(
        visit, url, options, verbs,
        seconds=seconds, limit=ADDRESS_SPACE, environment=environment, progress=last.append,
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


def copied(sample: Path, folder: str) -> Path:
    """Return a copy of a store, made of hard links."""
    place = Path(folder) / "store"
    shutil.copytree(sample, place, copy_function=os.link)
    return place


async def forged_folder(harness: Harness, forgery: Forgery) -> None:
    """Open a store that contains a forgery."""
    assert harness.sample is not None
    with tempfile.TemporaryDirectory(prefix="tstore-attacks-") as folder:
        place = copied(harness.sample.folder, folder)
        key, body = forgery(Known.of(place, harness.sample.expired))
        (place / key).parent.mkdir(parents=True, exist_ok=True)
        (place / key).unlink(missing_ok=True)
        (place / key).write_bytes(body)
        before = files(place)
        await endure(harness.children, str(place), READING)
        check(files(place) == before, "reading has changed the store")


def heavy(known: Known, many: tuple[int, Callable[[Known], dict[str, Any]]]) -> tuple[list[str], bytes]:
    """Return the keys of the next records of a store, and the bytes for all of them."""
    count, changes = many
    _, body = record_of(changes)(known)
    return [commit(number) for number in range(known.newest + 1, known.newest + 1 + count)], body


async def heavy_folder(harness: Harness, case: tuple[str, tuple[str, ...]]) -> None:
    """Open a store with many records that take much memory when decoded."""
    assert harness.sample is not None
    name, verbs = case
    with tempfile.TemporaryDirectory(prefix="tstore-attacks-") as folder:
        place = copied(harness.sample.folder, folder)
        [first, *others], body = heavy(Known.of(place, harness.sample.expired), forgeries.HEAVY[name])
        (place / first).write_bytes(body)
        for key in others:
            os.link(place / first, place / key)
        await endure(harness.children, str(place), verbs, seconds=LONG)


async def heavy_server(harness: Harness, case: tuple[str, tuple[str, ...]]) -> None:
    """Open the same store over HTTP."""
    assert harness.sample is not None
    name, verbs = case
    keys, body = heavy(Known.of(harness.sample.folder, harness.sample.expired), forgeries.HEAVY[name])
    served = Served(files(harness.sample.folder) | dict.fromkeys(keys, body), {})
    async with raw_http.serving(served) as server:
        await endure(harness.children, server.url, verbs, seconds=LONG)


async def hostile_server(harness: Harness, case: tuple[dict[str, Reply], tuple[str, ...]]) -> None:
    """Open the store of a hostile server."""
    assert harness.sample is not None
    replies, verbs = case
    served = Served(files(harness.sample.folder), replies)
    async with raw_http.serving(served) as server:
        await endure(harness.children, server.url, verbs)


async def every_number_exists(harness: Harness, _: None) -> None:
    """Open a store whose log is endless."""
    assert harness.sample is not None
    known = Known.of(harness.sample.folder, harness.sample.expired)
    async with raw_http.serving(Served({}, every_number(known))) as server:
        await endure(harness.children, server.url, OPENING)


async def token_asked_for(harness: Harness, variables: tuple[dict[str, str], dict[str, Any] | None]) -> None:
    """Send a 401 to a client that has a token for another server."""
    environment, options = variables
    served = Served({}, {"*": lambda r: ok(b"", "WWW-Authenticate: Bearer", status="401 Unauthorized")})
    async with raw_http.serving(served) as server:
        await endure(harness.children, server.url, OPENING, options, environment)
    check(not served.shown, "the token of another server was sent to one that responded 401")


async def token_carried_on(harness: Harness, _: None) -> None:
    """Redirect a client that sends its token to another server."""
    other = Served({}, {"*": lambda r: ok(b"", "WWW-Authenticate: Bearer", status="401 Unauthorized")})
    async with raw_http.serving(other) as elsewhere:
        first = Served({}, {"*": redirect(f"{elsewhere.url}/tstore.json")})
        async with raw_http.serving(first) as server:
            await endure(harness.children, server.url, OPENING, {"token": TOKEN})
    check(not other.shown, "the token was sent to the target of a redirect")


def _cases() -> Iterator[Case]:
    ends = f"right data or a TStoreError, within {SECONDS:g} s and {MEMORY >> 20} MiB"
    yield from family("server", "sends hostile responses", ends, hostile_server, SERVERS.items())
    yield from family(
        "server", "has a commit for every number", ends, every_number_exists, [("every number is a commit", None)]
    )
    mine = {"TSTORE_TOKEN_STORE_EXAMPLE_COM": TOKEN}
    yield from family(
        "token", "responds 401", "no token of another server is sent", token_asked_for,
        [("TSTORE_TOKEN", ({"TSTORE_TOKEN": TOKEN}, None)), ("of another host", (mine, None))],
    )  # fmt: skip
    yield from family(
        "token", "redirects to another server", "that sees no token", token_carried_on, [("a redirect", None)]
    )
    yield from family("bomb", "has a chunk that decodes to too much data", ends, forged_folder, BOMBS.items())
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


def _heavy() -> Iterator[Case]:
    ends = f"right data or a TStoreError, within {LONG:g} s and {MEMORY >> 20} MiB"
    for where, run in (("folder", heavy_folder), ("server", heavy_server)):
        yield from family(
            f"heavy {where}", "has records that take much memory", ends, run,
            [(f"{name}, {verbs[0]}", (name, verbs)) for name in forgeries.HEAVY for verbs in WALKING],
        )  # fmt: skip


CASES = list(_cases())
HEAVY = list(_heavy())
"""The cases that take up to a minute of CPU time each, so that few of them may run at once."""
