"""The memory of a client, in a separate process, stays bounded whatever a hostile server sends."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gzip
import json
import sys
import textwrap

import pytest

from tests.support.http_server import MARKER
from tests.support.raw_http import Request, ok, part, serving

CHUNK = b"10000\r\n" + bytes(0x10000) + b"\r\n"
CHUNKED = "Transfer-Encoding: chunked"
MOST = 420  # MiB beyond an idle client: `storage.limits` with the longest record of a gc

CLIENT = """
    import asyncio, json, resource, sys
    from tstore.errors import TStoreError
    from tstore.core.storage import limits
    from tstore.core.storage.remote import as_remote
    import tstore

    kind, url, small = sys.argv[1:]
    limits.LISTING_BYTES = int(small)

    def objects(path):
        if kind == "http":
            from tstore.core.storage.http.store import HttpStorage
            return HttpStorage(f"{url}/{path}")
        if kind == "gcs":
            from tstore.core.storage.gcs.store import GcsStorage
            return GcsStorage(f"gs://bucket/{path}", token="anon", endpoint_url=url)
        from tstore.core.storage.s3.store import S3Storage
        return S3Storage(f"s3://bucket/{path}", endpoint_url=url, key="k", secret="s")

    async def many(call, count=4):
        return await asyncio.gather(*[call(number) for number in range(count)], return_exceptions=True)

    async def main():
        peak = {}
        def note(name, result):
            errors = result if isinstance(result, list) else [result]
            odd = [type(e) for e in errors if isinstance(e, BaseException) and not isinstance(e, TStoreError)]
            assert not odd, (name, odd)
            peak[name] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
        async def refused(name, call):
            try:
                result = await call
            except TStoreError as error:
                result = error
            note(name, result)
        first = as_remote(objects("endless"))
        await refused("nothing", first.get("nothing"))
        for path in ("endless", "gzip", "refusal"):
            storage = as_remote(objects(path), policy)
            await refused(f"{path} marker", storage.get("tstore.json"))
            await refused(f"{path} records", many(lambda n: storage.get(f"commits/{n:020d}")))
            await refused(f"{path} gc records", many(lambda n: storage.get(f"commits/{n + 100:020d}"), 16))
            await refused(f"{path} manifests", many(lambda n: storage.get(f"txn/a/manifest-{n}", 1 << 20)))
            await refused(f"{path} ranges", many(lambda n: storage.read(
                f"txn/a/pack-{n}", 0, [bytearray(1 << 16)], 1 << 16)))
            await refused(f"{path} list", storage.list("p"))
            await storage.close()
        storage = as_remote(objects("list"), policy)
        await refused("a list that goes on", storage.list("p"))
        await refused("folders that go on", storage.folders("p"))
        await storage.close()
        print(json.dumps(peak))

    from tstore.core.storage.retry import RetryPolicy
    import warnings
    warnings.simplefilter("ignore")
    policy = RetryPolicy(0.01, 0.01, 0.01, 0.01, 0.01)
    asyncio.run(main())
"""


async def endless(request: Request) -> None:
    with contextlib.suppress(ConnectionError):
        while not request.writer.is_closing():
            request.writer.write(CHUNK)
            await request.writer.drain()


def page(request: Request) -> bytes:
    """Return a page of a thousand long names, which differ from page to page."""
    start = page.counter = getattr(page, "counter", 0) + 1  # type: ignore[attr-defined]
    names = [f"p{start:09d}-{i:04d}-{'z' * 900}" for i in range(1000)]
    more = f"p{start + 1:09d}"
    if "list-type" in request.path:
        listed = "".join(f"<Contents><Key>list/{n}</Key><Size>1</Size></Contents>" for n in names)
        listed += "".join(f"<CommonPrefixes><Prefix>list/{n}/</Prefix></CommonPrefixes>" for n in names[:500])
        token = f"<IsTruncated>true</IsTruncated><NextContinuationToken>{more}</NextContinuationToken>"
        return ok(f"<ListBucketResult>{token}{listed}</ListBucketResult>".encode())
    if request.path.startswith("/storage"):
        items = [{"name": f"list/{n}", "size": "1"} for n in names]
        prefixes = [f"list/{n}/" for n in names]
        return ok(json.dumps({"items": items, "prefixes": prefixes, "nextPageToken": more}).encode())
    entries = [{"key": n, "size": 1} for n in names]
    folders = [f"{n}/" for n in names]
    return ok(json.dumps({"entries": entries, "folders": folders, "next": more}).encode(), "Server: tstore/1")


@functools.cache
def bomb() -> bytes:
    return gzip.compress(bytes(64 << 20))


async def hostile(request: Request) -> bytes | None:
    said = request.path.replace("%2F", "/")
    if "nothing" in said or "/-/health" in said:
        return ok(b"", "Server: tstore/1", status="404 Not Found" if "nothing" in said else "200 OK")
    write = request.writer.write
    if "refusal" in said:
        write(f"HTTP/1.1 500 No\r\nContent-Type: text/plain\r\n{CHUNKED}\r\n\r\n".encode())
        await endless(request)
    elif "gzip" in said:
        if "Range" in request.headers:
            return part(bomb()[: 1 << 16], f"0-65535/{len(bomb())}", "Content-Encoding: gzip")
        return ok(bomb(), "Content-Encoding: gzip", "Content-Type: application/json", "Server: tstore/1")
    elif "endless" not in said:
        return page(request)
    else:
        number = int(said.partition("commits/")[2].partition("?")[0] or 0)
        head = b"tstoreR\2" if number >= 100 else b"tstoreR\1"
        number = int(said.rpartition("pack-")[2].partition("?")[0] or 0) if "pack-" in said else 0
        range_ = ["Content-Range: bytes 0-65535/65536", "Content-Range: bytes 0-9999999999/10000000000"][
            number % 2
        ]
        multi = "Content-Type: multipart/byteranges; boundary=b"
        lines = [f"HTTP/1.1 {'206 P' if 'pack-' in said and number % 4 != 3 else '200 OK'}", CHUNKED]
        lines += [range_] if "pack-" in said and number % 4 < 3 else []
        lines += [multi] if number % 4 == 2 else []
        write(("\r\n".join([*lines, "Server: tstore/1", "", ""])).encode() + b"8\r\n" + head + b"\r\n")
        await endless(request)
    return None


@pytest.mark.parametrize("kind", ["http", "gcs", "s3"])
@pytest.mark.timeout(300)
async def test_the_memory_of_a_client_is_bounded(kind: str) -> None:
    small = 8 << 20
    async with serving(hostile) as server:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", textwrap.dedent(CLIENT), kind, server.url, str(small),
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        try:
            out, err = await asyncio.wait_for(process.communicate(), 250)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    assert process.returncode == 0, err.decode()[-3000:]
    peak = json.loads(out)
    beyond = {name: most - peak["nothing"] for name, most in peak.items()}
    print(f"{kind}: {peak['nothing']} MiB, and beyond that {beyond}")
    assert max(beyond.values()) < MOST
    assert beyond["endless marker"] < 64


def test_a_client_reads_the_marker_first() -> None:
    assert len(MARKER) < 4096
