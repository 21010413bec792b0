"""Paths that lead out of the store's folder."""

from __future__ import annotations

from tests.attacks.target import SECRET, Target, changes, files
from tests.support.http_server import ADMIN

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
        method = request.partition(" ")[0]
        assert SECRET not in response, f"{method} shows a file outside"
        assert b"root:" not in response, f"{method} shows a file outside"
        if strict:
            assert response.split()[1] in (b"400", b"403", b"404"), f"{method} is answered {response[:80]!r}"
    made = changes(before, files(target.place.parent))
    assert all(n.startswith("store/") and "/." not in n for n in made), f"files were made: {made}"
    assert not strict or not made, f"the folder has changed: {made}"
