"""Paths that lead out of the store's folder, and links in it."""

from __future__ import annotations

import json
import os

from tests.attacks.case import check
from tests.attacks.target import SECRET, Target, changes, files
from tests.support.http_server import ADMIN

__all__ = ["TRAVERSAL", "no_link_leads_out", "no_path_leads_out"]

TRAVERSAL = [
    "/../secret",
    "/txn/../../secret",
    "/txn/old/../../../secret",
    "/..%2fsecret",
    "/%2e%2e/secret",
    "/%2e%2e%2fsecret",
    "/%252e%252e/secret",
    "/%252e%252e%252fsecret",
    "/..%5csecret",
    "/..\\secret",
    "/%5c..%5c..%5csecret",
    "/txn/old/..%c0%af..%c0%afsecret",
    "/%c0%ae%c0%ae/secret",
    "/%uff0e%uff0e/secret",
    "//etc/passwd",
    "/%2fetc%2fpasswd",
    "/./secret",
    "/secret%00",
    "/tstore.json%00.txt",
    "/tstore.json%0d%0aSet-Cookie:x",
    "/tstore.json/",
    "/tstore.json/.",
    "/tstore.json;x",
    "/tstore.json?x",
    "/TSTORE.JSON",
    "/commits/../tstore.json",
    "/txn/old/.0123456789abcdef.tmp",
    "/txn/.hidden/pack-0",
    "/txn/old",
    "/txn/old/",
    "/txn//old/pack-0",
    "/txn/old//pack-0",
    "/txn/old/pack-0/x",
    "/proc/self/environ",
    "/dev/zero",
    "/~root/secret",
    "/C:/secret",
    "/file:///etc/passwd",
    "/" + "a/" * 400 + "b",
    "/txn/" + "a" * 5000 + "/pack-0",
    "/%",
    "/%g0",
    "/%ff",
    "*",
    "http://127.0.0.1/tstore.json",
    "tstore.json",
]


async def no_path_leads_out(target: Target, path: str, *, strict: bool = True) -> None:
    """Request a path with each method; `strict` if no such name can exist in a store."""
    before = files(target.place.parent)
    for request in (
        f"GET {path} HTTP/1.1\r\n",
        f"DELETE {path} HTTP/1.1\r\n",
        f"PUT {path} HTTP/1.1\r\nIf-None-Match: *\r\nContent-Length: 1\r\n",
    ):
        token = f"Host: 127.0.0.1\r\nAuthorization: Bearer {ADMIN}\r\nConnection: close\r\n\r\nx"
        async with target.wire() as raw:
            await raw.send(f"{request}{token}".encode())
            response = await raw.rest()
        check(
            SECRET not in response and b"root:" not in response,
            f"{request.split(maxsplit=1)[0]} shows a file outside",
        )
        if strict:
            check(
                response.split()[1] in (b"400", b"403", b"404"),
                f"{request.strip()!r} is answered {response[:80]!r}",
            )
    made = changes(before, files(target.place.parent))
    check(all(n.startswith("store/") and "/." not in n for n in made), f"files were made: {made}")
    check(not strict or not made, f"the folder has changed: {made}")


async def no_link_leads_out(target: Target) -> None:
    place = target.place
    (place / "txn" / "linked").symlink_to(place.parent / "outside")
    (place / "txn" / "old" / "pack-1").symlink_to(place.parent / "secret")
    os.mkfifo(place / "txn" / "old" / "pack-2")
    before = files(place.parent)
    admin = f"Host: 127.0.0.1\r\nAuthorization: Bearer {ADMIN}\r\n"
    for path in ("/txn/linked/pack-0", "/txn/old/pack-1", "/txn/old/pack-2"):
        for method in ("GET", "DELETE"):
            status, body = await target.ask(f"{method} {path} HTTP/1.1\r\n{admin}\r\n".encode())
            check(status in (204, 403, 404) and SECRET not in body, f"{method} {path} is answered {status}")
    for path in ("/txn/linked/pack-9", "/txn/old/pack-1"):
        status, _ = await target.ask(
            f"PUT {path} HTTP/1.1\r\n{admin}If-None-Match: *\r\nContent-Length: 1\r\n\r\nx".encode()
        )
        check(status in (403, 412), f"PUT {path} is answered {status}")
    listed = await target.ask(f"GET /?list HTTP/1.1\r\n{admin}\r\n".encode())
    names = [entry["key"] for entry in json.loads(listed[1])["entries"]]
    check("txn/old/pack-0" in names and not any("linked" in n or "pack-1" in n or "pack-2" in n for n in names),
          f"the list shows {names}")  # fmt: skip
    (place / "txn" / "linked").unlink()
    made = [name for name in changes(before, files(place.parent)) if "linked" not in name]
    check(not made, f"files have changed: {made}")
    (place / "txn" / "old" / "pack-1").unlink()
    (place / "txn" / "old" / "pack-2").unlink()
