"""What each scope may do to each kind of object, and what no scope may cause by storing a forged object."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

import tstore
from tests.attacks import forgeries
from tests.attacks.case import Case, check, family
from tests.attacks.forgeries import Forgery, Known, record_of
from tests.attacks.harness import Harness
from tests.attacks.sample_store import tree_of
from tests.attacks.target import HOSTILE, changes
from tests.support.http_server import ADMIN, READ, WRITE
from tstore.core.format.objects.encoding import encode
from tstore.core.format.tree.validation import chunk_ends

__all__ = ["CASES", "request"]


def request(method: str, key: str, body: bytes, token: str | None, *headers: str) -> bytes:
    """Return a request, with a token unless that is None."""
    shown = () if token is None else (f"Authorization: Bearer {token}",)
    lines = ("Host: 127.0.0.1", f"Content-Length: {len(body)}", "Connection: close", *shown, *headers)
    return "\r\n".join([f"{method} /{key} HTTP/1.1", *lines, "", ""]).encode() + body


# ---- requests


SCOPES: dict[str, str | None] = {
    "none": None, "unknown": "nobody-0123456789", "read": READ, "write": WRITE, "admin": ADMIN
}  # fmt: skip
KINDS = ("tstore.json", "commits/", "roots/", "latest", "/pack", "/manifest", "/part-", "/alive-", "/merging-")
REPLACEABLE = ("latest", "/alive-")
ABSENT = {
    "commits/": f"commits/{10**6:020d}",
    "roots/": f"roots/{64 * 10**6:020d}",
    "/pack": "txn/n/pack-0-0",
    "/manifest": "txn/n/manifest",
    "/part-": "txn/n/part-00000-of-00001",
    "/alive-": "txn/n/alive-00000-of-00001",
    "/merging-": "txn/n/merging-00000",
}


def statuses(scope: str, method: str, kind: str) -> tuple[int, ...]:
    """Return the valid statuses; without the scope, they never depend on which objects exist."""
    if scope in ("none", "unknown"):
        return (401,)
    if method in ("GET", "list"):
        return (200, 206)
    if scope == "read":
        return (403,)
    if method == "replace":
        return (204, 422) if kind in REPLACEABLE else (428,)
    if method == "create":
        return (412, 422)
    return (204,) if kind == "/alive-" else (403,)


async def permitted(harness: Harness, cell: tuple[str, str]) -> None:
    """Try every method on an object of a kind."""
    scope, kind = cell
    token, target = SCOPES[scope], harness.target
    place = target.place
    part = next(key for key in target.files() if "/part-" in key)
    (place / part.replace("/part-", "/alive-")).write_bytes(b'{"name":"half","time":1.0}')
    (place / part.replace("/part-", "/merging-")).write_bytes(b"1")
    (place / "latest").write_bytes(b"%d" % harness.newest)
    before = target.files()
    if not any(kind in key for key in before):
        return
    key = next(key for key in sorted(before) if kind in key)
    for method, asked in (
        ("GET", request("GET", key, b"", token)),
        ("list", request("GET", f"?list&prefix={key[:3]}", b"", token)),
        ("replace", request("PUT", key, b"2", token)),
        ("create", request("PUT", key, before[key], token, "If-None-Match: *")),
        ("DELETE", request("DELETE", key, b"", token)),
    ):
        status, _ = await target.ask(asked)
        right = statuses(scope, method, kind)
        check(status in right, f"{method} {key} got {status}, expected one of {right}")
    after = target.files()
    free = {key} if kind in REPLACEABLE and scope in ("write", "admin") else set()
    changed = {k for k in before.keys() | after.keys() if before.get(k) != after.get(k)} - free
    check(not changed, f"changed: {sorted(changed)}")
    if kind in ABSENT and scope in ("none", "unknown", "read"):
        status, _ = await target.ask(request("PUT", ABSENT[kind], b"x", token, "If-None-Match: *"))
        check(status in (401, 403) and target.files().keys() == after.keys(), f"a create got {status}")


async def another_name(harness: Harness, _: None) -> None:
    """Send requests without a token under another host name, as a page in a browser can by DNS rebinding."""
    with harness.beside("--anonymous", "read") as target:
        asked = request("GET", "tstore.json", b"", None)
        for host in (b"evil.example", b"evil.example:80", b"127.0.0.1.evil.example", b"localhost.evil.example"):
            status, _body = await target.ask(asked.replace(b"127.0.0.1", host))
            check(status in (400, 403, 421), f"a request without a token to {host.decode()} got {status}")
        status, _body = await target.ask(asked)
        check(status == 200, f"a request without a token to the address got {status}")


# ---- forged objects


async def stored(harness: Harness, forgery: Forgery, token: str) -> tuple[int, str]:
    """Store a forgery, and return the status and the key."""
    assert harness.sample is not None
    key, body = forgery(Known.of(harness.target.place, harness.sample.expired))
    replaced = key == "latest" or "/alive-" in key
    headers = () if replaced else ("If-None-Match: *",)
    status, _ = await harness.target.ask(request("PUT", key, body, token, *headers))
    return status, key


async def forged(harness: Harness, case: tuple[Forgery, str]) -> None:
    """Store a forgery. If it is accepted, honest clients must find everything unchanged and can continue."""
    forgery, token = case
    before = harness.target.files()
    status, key = await stored(harness, forgery, token)
    check(status < 500, f"{key} is answered {status}")
    after = harness.target.files()
    if status >= 300:
        check(not changes(before, after), f"{key} got {status}, and changed the folder")
        return
    await harness.check_audit(harness.next_step())
    after = harness.target.files()
    lost = [k for k, data in before.items() if after.get(k) != data and k != "latest" and "/alive-" not in k]
    check(not lost, f"{key} was accepted; lost or changed since: {lost[:5]}")


async def taken(harness: Harness, forgery: Forgery) -> None:
    """Store an honest record: if it were refused, the other refusals would prove nothing."""
    status, _ = await stored(harness, forgery, WRITE)
    check(status == 201, f"an honest record got {status}")
    await harness.check_audit(harness.next_step())


async def never(harness: Harness, case: tuple[Forgery, str]) -> None:
    """Store the record of a gc with a token of insufficient scope: it must be refused."""
    forgery, token = case
    before = harness.target.files()
    status, key = await stored(harness, forgery, token)
    if status < 300:
        await harness.check_audit(harness.next_step())
    check(status in (403, 422), f"{key}, the record of a gc, got {status} with a token of scope write")
    check(not changes(before, harness.target.files()), "the folder has changed")


async def poisoned(harness: Harness, _: None) -> None:
    """Commit the values of the next honest save with other bytes, to which that save would refer."""
    assert harness.sample is not None
    known, step = Known.of(harness.target.place, harness.sample.expired), harness.next_step()
    async with await tstore.open(f"memory://poison-{step}") as store:
        await tstore.save(store, tree_of(step), 10_000 + step)
        saved = await store.log.reader.record(1)
        [made] = await store.log.reader.objects.manifests(1, saved)
    transaction = f"poison-{step}"
    packs = tuple(pack and f"txn/{transaction}/pack-{i}" for i, pack in enumerate(made.packs))
    for pack, end in zip(packs, chunk_ends(made.table), strict=True):
        if pack:
            asked = request("PUT", pack, bytes(end), HOSTILE, "If-None-Match: *")
            status, _body = await harness.target.ask(asked)
            check(status == 201, f"a pack got {status}")
    record = replace(
        saved,
        transaction=transaction,
        base=known.newest,
        collected=known.gc,
        manifests=(replace(made, packs=packs),),
    )
    asked = request("PUT", forgeries.commit(known.newest + 1), encode(record), HOSTILE, "If-None-Match: *")
    status, _body = await harness.target.ask(asked)
    await harness.check_audit(step)
    check(status == 422, f"the record of chunks with other bytes got {status}")


async def forged_root(harness: Harness, case: tuple[int, Forgery]) -> None:
    """Store a root, commit up to its version, and read all versions."""
    number, forgery = case
    harness.fresh()
    place, target = harness.target.place, harness.target
    if number:
        await commits_up_to(harness, number)
        (place / f"roots/{number:020d}").unlink()
    status, key = await stored(harness, forgery, HOSTILE)
    check(status < 500, f"{key} is answered {status}")
    if status >= 300:
        return
    await commits_up_to(harness, 66)
    await harness.check_audit(harness.next_step())
    check(all(key in target.files() for key in ("tstore.json", f"commits/{66:020d}")), "objects are gone")


async def commits_up_to(harness: Harness, version: int) -> None:
    """Make honest commits up to a version."""
    async with await harness.site.open(WRITE, "r+") as store:
        while await store.log.reader.newest() < version:
            async with store.transaction("honest"):
                pass


async def condemned_by_admin(harness: Harness, _: None) -> None:
    """Condemn the marker, the log and living packs as an admin, and let the next gc finish the deletion."""
    for name in ("a gc of the marker", "a gc of records", "a gc of packs that are needed"):
        harness.fresh()
        before = harness.target.files()
        status, _key = await stored(harness, record_of(forgeries.CONDEMNING[name]), ADMIN)
        for key in ("tstore.json", f"commits/{3:020d}", next(k for k in before if "/pack-" in k)):
            deleted, _ = await harness.target.ask(request("DELETE", key, b"", ADMIN))
            check(deleted == 403, f"{name} got {status}; then DELETE {key} got {deleted}")
        if status < 300:
            await harness.check_audit(harness.next_step())
        lost = [k for k in before if k not in harness.target.files()]
        check(not lost, f"{name}: lost {lost[:5]}")


async def afterwards(harness: Harness, _: None) -> None:
    """Audit the store with honest clients after all refused requests."""
    await harness.check_audit(harness.next_step())


def _cases() -> Iterator[Case]:
    same = "the right status for each method, and nothing else changes"
    yield from family(
        "scope", "gets, lists, replaces, creates and deletes an object of each kind", same, permitted,
        [(f"{scope}, {kind.strip('/')}", (scope, kind)) for scope in SCOPES for kind in KINDS],
    )  # fmt: skip
    yield from family(
        "another name", "reads without a token", "it is refused", another_name, [("by a page", None)]
    )
    well = "it is refused or harmless: readers, verify, gc and the next save work, and nothing is lost"
    honest = record_of(lambda known: {})
    yield Case("honest record", "stores a valid record", "it is accepted", lambda s: taken(s, honest))
    yield from family(
        "root", "stores it with a write token", "readers see the committed values", forged_root,
        forgeries.ROOTS.items(),
    )  # fmt: skip
    yield from family(
        "collection", "stores the record of a gc with a write token", "403 or 422, and nothing is lost", never,
        [(n, (record_of(f), HOSTILE)) for n, f in (forgeries.COLLECTIONS | forgeries.CONDEMNING).items()],
    )  # fmt: skip
    yield from family(
        "collection of an admin", "stores the record of a gc with an admin token", well, forged,
        [(n, (record_of(f), ADMIN)) for n, f in forgeries.CONDEMNING.items()],
    )  # fmt: skip
    yield from family(
        "deletion", "condemns what must stay", "nothing of it goes", condemned_by_admin, [("by an admin", None)]
    )
    yield from family(
        "record", "stores it with a write token", well, forged,
        [(n, (record_of(f), HOSTILE)) for n, f in forgeries.FIELDS.items()],
    )  # fmt: skip
    yield from family(
        "poison", "commits chunks whose bytes are not those of their checksums", "422; the next save is readable",
        poisoned, [("of the next save", None)],
    )  # fmt: skip
    yield from family(
        "object", "stores it with a write token", well, forged,
        [(n, (f, HOSTILE)) for n, f in forgeries.OTHERS.items()],
    )  # fmt: skip
    yield from family("afterwards", "looks", "honest clients go on", afterwards, [("audit", None)])


CASES = list(_cases())
