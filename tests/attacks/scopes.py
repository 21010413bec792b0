"""What each scope may do to each kind of object, and what none may bring about by an object that it may store."""

from __future__ import annotations

from collections.abc import Iterator

from tests.attacks import forgeries
from tests.attacks.case import Case, check, family
from tests.attacks.forgeries import Forgery, Known, record_of
from tests.attacks.harness import Harness
from tests.attacks.target import HOSTILE, changes
from tests.support.http_server import ADMIN, READ, WRITE

__all__ = ["CASES", "request"]


def request(method: str, key: str, body: bytes, token: str | None, *fields: str) -> bytes:
    """Return a request, with a token unless None."""
    shown = () if token is None else (f"Authorization: Bearer {token}",)
    lines = ("Host: 127.0.0.1", f"Content-Length: {len(body)}", "Connection: close", *shown, *fields)
    return "\r\n".join([f"{method} /{key} HTTP/1.1", *lines, "", ""]).encode() + body


# ---- what a request may do


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
    """Return which answers are right, of which those of requests without scope never depend on what there is."""
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


async def permitted(harness: Harness, given: tuple[str, str]) -> None:
    """Do everything that a scope could do to an object of a kind."""
    scope, kind = given
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
        check(status in right, f"{method} {key} is answered {status}, expected one of {right}")
    after = target.files()
    free = {key} if kind in REPLACEABLE and scope in ("write", "admin") else set()
    changed = {k for k in before.keys() | after.keys() if before.get(k) != after.get(k)} - free
    check(not changed, f"changed: {sorted(changed)}")
    if kind in ABSENT and scope in ("none", "unknown", "read"):
        status, _ = await target.ask(request("PUT", ABSENT[kind], b"x", token, "If-None-Match: *"))
        check(status in (401, 403) and target.files().keys() == after.keys(), f"a create is answered {status}")


async def another_name(harness: Harness, _: None) -> None:
    """Ask without a token by a name that somebody lets point here, as a page in a browser can."""
    with harness.beside("--anonymous", "read") as target:
        asked = request("GET", "tstore.json", b"", None)
        for host in (b"evil.example", b"evil.example:80", b"127.0.0.1.evil.example", b"localhost.evil.example"):
            status, _body = await target.ask(asked.replace(b"127.0.0.1", host))
            check(status in (400, 403, 421), f"a request without a token to {host.decode()} is answered {status}")
        status, _body = await target.ask(asked)
        check(status == 200, f"a request without a token to the address is answered {status}")


# ---- what an object may bring about


async def stored(harness: Harness, forgery: Forgery, token: str) -> tuple[int, str]:
    """Put a forgery in place, and return the status and the key."""
    assert harness.sample is not None
    key, body = forgery(Known.of(harness.target.place, harness.sample.expired))
    replaced = key == "latest" or "/alive-" in key
    fields = () if replaced else ("If-None-Match: *",)
    status, _ = await harness.target.ask(request("PUT", key, body, token, *fields))
    return status, key


async def forged(harness: Harness, given: tuple[Forgery, str]) -> None:
    """Store a forgery; if it is taken, honest clients must find everything as before, and go on."""
    forgery, token = given
    before = harness.target.files()
    status, key = await stored(harness, forgery, token)
    check(status < 500, f"{key} is answered {status}")
    after = harness.target.files()
    if status >= 300:
        check(not changes(before, after), f"{key} is answered {status}, and changed the folder")
        return
    await harness.check_audit(harness.next_step())
    after = harness.target.files()
    lost = [k for k, data in before.items() if after.get(k) != data and k != "latest" and "/alive-" not in k]
    check(not lost, f"{key} was taken; lost or changed since: {lost[:5]}")


async def taken(harness: Harness, forgery: Forgery) -> None:
    """Store what is no forgery: if that is refused, no refusal of others tells anything."""
    status, _ = await stored(harness, forgery, WRITE)
    check(status == 201, f"an honest record is answered {status}")
    await harness.check_audit(harness.next_step())


async def never(harness: Harness, given: tuple[Forgery, str]) -> None:
    """Store the record of a gc with a token whose scope does not suffice: it is refused."""
    forgery, token = given
    before = harness.target.files()
    status, key = await stored(harness, forgery, token)
    if status < 300:
        await harness.check_audit(harness.next_step())
    check(status in (403, 422), f"{key}, the record of a gc, is answered {status} to a token of scope write")
    check(not changes(before, harness.target.files()), "the folder has changed")


async def forged_root(harness: Harness, given: tuple[int, Forgery]) -> None:
    """Store a root, go on to the version of its number, and read as of all of them."""
    number, forgery = given
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
    """Make honest commits until there are so many."""
    async with await harness.site.open(WRITE, "r+") as store:
        while await store.log.reader.newest() < version:
            async with store.transaction("honest"):
                pass


async def condemned_by_admin(harness: Harness, _: None) -> None:
    """Condemn the marker, the log and living packs as an admin, and have the next gc finish that."""
    for name in ("a gc of the marker", "a gc of records", "a gc of packs that are needed"):
        harness.fresh()
        before = harness.target.files()
        status, _key = await stored(harness, record_of(forgeries.CONDEMNING[name]), ADMIN)
        for key in ("tstore.json", f"commits/{3:020d}", next(k for k in before if "/pack-" in k)):
            said, _ = await harness.target.ask(request("DELETE", key, b"", ADMIN))
            check(said == 403, f"{name} was answered {status}; then DELETE {key} is answered {said}")
        if status < 300:
            await harness.check_audit(harness.next_step())
        lost = [k for k in before if k not in harness.target.files()]
        check(not lost, f"{name}: lost {lost[:5]}")


async def afterwards(harness: Harness, _: None) -> None:
    """Have honest clients look at the store after all that was refused."""
    await harness.check_audit(harness.next_step())


def _cases() -> Iterator[Case]:
    same = "the right status for each method, and nothing else has changed"
    yield from family(
        "scope", "gets, lists, replaces, creates and deletes an object of each kind", same, permitted,
        [(f"{scope}, {kind.strip('/')}", (scope, kind)) for scope in SCOPES for kind in KINDS],
    )  # fmt: skip
    yield from family(
        "another name", "reads what needs no token", "it is refused", another_name, [("by a page", None)]
    )
    well = "it is refused, or harms nobody: readers, verify, gc and the next save go on, and nothing is lost"
    honest = record_of(lambda known: {})
    yield Case("honest record", "stores a record without fault", "it is taken", lambda s: taken(s, honest))
    yield from family(
        "root", "stores it with a write token", "readers see the values that were committed", forged_root,
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
        "object", "stores it with a write token", well, forged,
        [(n, (f, HOSTILE)) for n, f in forgeries.OTHERS.items()],
    )  # fmt: skip
    yield from family("afterwards", "looks", "honest clients go on", afterwards, [("audit", None)])


CASES = list(_cases())
