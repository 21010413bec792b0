"""S3 servers other than Amazon's: what they store, what they refuse, and what tstore makes of it."""

from __future__ import annotations

import hashlib
import ssl
import string
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import botocore.exceptions
import numpy as np
import pytest
import trustme
from aiohttp import web

import tstore
from tests.support.s3_endpoint import BUCKET, Endpoint, error
from tstore.core.runtime.event_loops import on_io
from tstore.core.storage.objects import PutMode
from tstore.core.storage.s3.responses import mapped_error
from tstore.core.storage.s3.store import S3Storage
from tstore.errors import Corrupt, Denied, InvalidArgument, TemporaryFailure, Throttled, Unavailable

URL = f"s3://{BUCKET}/run"


@pytest.fixture
async def endpoint() -> AsyncIterator[Endpoint]:
    async with Endpoint().running() as made:
        yield made


# ---- what a server stores


@pytest.mark.parametrize("config", [{}, {"request_checksum_calculation": "when_required"}])
async def test_over_https_objects_are_stored_as_sent(tmp_path: Path, config: dict[str, str]) -> None:
    authority, context = trustme.CA(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    async with Endpoint().running(context) as endpoint:
        options = endpoint.options(client_kwargs={"verify": str(tmp_path / "ca.pem")}, config_kwargs=config)
        async with await tstore.open(URL, storage_options=options) as store:
            await tstore.save(store, {"w": np.arange(1 << 20, dtype="f4")}, step=1)
            assert (await store.verify()).ok
            assert (await tstore.restore(store))["w"].sum() == np.arange(1 << 20, dtype="f4").sum()
    puts = [headers for method, _, headers in endpoint.requests if method == "PUT"]
    assert puts
    assert all("x-amz-checksum-crc32" in headers and "Content-Encoding" not in headers for headers in puts)
    # signing the body too would cost a SHA-256 of every byte
    assert {headers["X-Amz-Content-SHA256"] for headers in puts} == {"UNSIGNED-PAYLOAD"}


def md5(data: bytes) -> str:
    return hashlib.md5(data).hexdigest()


@pytest.mark.parametrize("mode", PutMode)
@pytest.mark.parametrize("size", [10, 2 << 20])
@pytest.mark.parametrize("check", ["CRC32", "MD5"])
async def test_a_damaged_object_is_noticed_by_the_checksum_or_etag_in_the_response(
    endpoint: Endpoint, mode: PutMode, size: int, check: str
) -> None:
    """Once an ETag was the MD5 of a body, as those of this server then are."""
    if check == "CRC32":
        endpoint.echoes_checksums = True
    else:
        endpoint.etag = md5
    objects = S3Storage(URL, **endpoint.options())
    await on_io(objects.put("sound", [bytes(size)], mode))
    endpoint.change = lambda key, body: body[:-1] + b"?"
    with pytest.raises(Corrupt, match=f"damaged: {size} bytes with {check} .* but the server stored other bytes"):
        await on_io(objects.put("damaged", [bytes(size)], mode))
    assert endpoint.asked("GET") == []
    await on_io(objects.close())


@pytest.mark.parametrize("etag", [md5, lambda stored: md5(b"key" + stored), lambda stored: "tag"])
async def test_a_short_object_whose_etag_tells_nothing_is_read_back_once(endpoint: Endpoint, etag: Any) -> None:
    endpoint.etag = etag
    endpoint.change = lambda key, body: body + b"?"
    objects = S3Storage(URL, **endpoint.options())
    await on_io(objects.put("hint", [b"1"], PutMode.REPLACE))  # others may replace it before it is read
    await on_io(objects.put("long", [bytes(2 << 20)], PutMode.CREATE))
    assert endpoint.asked("GET") == []
    with pytest.raises(Corrupt, match=r"short: 2 bytes with CRC32 .* but the server stored other bytes"):
        await on_io(objects.put("short", [b"ab"], PutMode.CREATE))
    endpoint.change = lambda key, body: body
    reads = 0 if etag is md5 else 1
    for name in ("x", "y", "z"):
        await on_io(objects.put(name, [b"ab"], PutMode.CREATE))
    assert len(endpoint.asked("GET")) == 1 + reads
    await on_io(objects.close())


async def test_who_may_not_read_writes(endpoint: Endpoint) -> None:
    endpoint.refuse = lambda request: error(403, "AccessDenied") if request.method == "GET" else None
    objects = S3Storage(URL, **endpoint.options())
    await on_io(objects.put("x", [b"ab"], PutMode.CREATE))
    await on_io(objects.close())


@pytest.mark.parametrize("echoes", [False, True])
@pytest.mark.parametrize("mode", ["a", "x"])
async def test_a_server_that_changes_bodies_is_refused(endpoint: Endpoint, mode: str, echoes: bool) -> None:
    endpoint.echoes_checksums = echoes
    endpoint.change = lambda key, body: b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    with pytest.raises(Corrupt, match=r"does not store what it is sent: \d+ bytes were sent as tstore.json"):
        await tstore.save(await tstore.open(URL, mode, storage_options=endpoint.options()), {"x": 1}, 1)
    assert not endpoint.objects  # so that the next attempt, once it is mended, finds an empty folder


# ---- URLs


@pytest.mark.parametrize(
    "url", ["s3://", "s3:///checkpoints/run", "s3:////x", "s3://a b/x", "s3://key:secret@bucket/x", "s3://?/x"]
)
async def test_a_url_without_a_bucket_is_refused(url: str) -> None:
    with pytest.raises(InvalidArgument, match="the URL of a store on S3 is s3://bucket/path") as raised:
        await tstore.open(url)
    assert "secret" not in str(raised.value).replace("key and secret", "")
    assert (repr(url) in str(raised.value)) == ("@" not in url)


@pytest.mark.parametrize("url", ["s3://bucket/a/../b", "s3://bucket/a//b", "s3://bucket/.hidden"])
async def test_a_path_that_is_no_key_is_refused(url: str) -> None:
    with pytest.raises(InvalidArgument, match="is not a valid object name"):
        await tstore.open(url)


AP, WEST = "accesspoint/my-point", "arn:aws:s3:us-west-2:123456789012"


@pytest.mark.parametrize(
    ("url", "bucket", "key"),
    [
        ("s3://b/run", "b", "run/k"),
        ("s3a://b//run/", "b", "run/k"),
        ("s3://b", "b", "k"),
        (
            f"s3://{WEST}:{AP}/run/7",
            f"{WEST}:{AP}",
            "run/7/k",
        ),
        (f"s3://{WEST}:{AP}", f"{WEST}:{AP}", "k"),
        ("s3://arn:aws:s3::1:accesspoint:m.mrap/x", "arn:aws:s3::1:accesspoint:m.mrap", "x/k"),
        (f"s3://arn:aws-cn:s3:cn-north-1:1:{AP}/x", f"arn:aws-cn:s3:cn-north-1:1:{AP}", "x/k"),
        (
            f"s3://arn:aws:s3-outposts:us-west-2:1:outpost/op-01/{AP}/x",
            f"arn:aws:s3-outposts:us-west-2:1:outpost/op-01/{AP}",
            "x/k",
        ),
        (f"s3://arn:aws:s3-object-lambda:us-west-2:1:{AP}/x", f"arn:aws:s3-object-lambda:us-west-2:1:{AP}", "x/k"),
    ],
)
def test_the_bucket_and_the_key_of_a_url(url: str, bucket: str, key: str) -> None:
    objects = S3Storage(url, key="k", secret="s")
    assert objects._object("k") == {"Bucket": bucket, "Key": key}
    assert S3Storage(objects.url, key="k", secret="s")._object("k") == {"Bucket": bucket, "Key": key}


@pytest.mark.parametrize("rest", ["bucket/x", f"{AP}x y/x", "accesspoint", "accesspoint/"])
def test_an_arn_of_something_else_is_refused(rest: str) -> None:
    with pytest.raises(InvalidArgument, match="arn:…:accesspoint/name"):
        S3Storage(f"s3://{WEST}:{rest}", key="k", secret="s")


def test_a_checksum_of_ones_own_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="ChecksumAlgorithm can't be set"):
        S3Storage(URL, s3_additional_kwargs={"ChecksumAlgorithm": "SHA256"})


# ---- errors of botocore before it sends a request


LASTING = {  # what to do about them
    "log in again": [
        "NoCredentialsError",
        "UnauthorizedSSOTokenError",
        "SSOTokenLoadError",
        "TokenRetrievalError",
    ],
    "certificate": ["SSLError"],
    "settings of AWS": [
        "UnsupportedS3ArnError",
        "ConfigParseError",
        "NoRegionError",
        "MissingDependencyException",
    ],
}


@pytest.mark.parametrize(("advice", "name"), [(a, name) for a, names in LASTING.items() for name in names])
def test_what_a_repetition_does_not_mend_is_not_repeated(advice: str, name: str) -> None:
    found = mapped_error("s3://b", "b", "read", "k", made(name))
    assert isinstance(found, Denied | InvalidArgument)
    assert advice in str(found)


@pytest.mark.parametrize(
    "name",
    [
        "CredentialRetrievalError",
        "MetadataRetrievalError",
        "ConnectTimeoutError",
        "ReadTimeoutError",
        "HTTPClientError",
        "EndpointConnectionError",
        "ConnectionClosedError",
        "ProxyConnectionError",
    ],
)
def test_what_may_pass_is_repeated(name: str) -> None:
    assert isinstance(mapped_error("s3://b", "b", "read", "k", made(name)), Unavailable)


def made(name: str) -> Exception:
    """Return an exception of botocore."""
    kind = getattr(botocore.exceptions, name)
    error: Exception = kind(**{field: "x" for _, field, _, _ in string.Formatter().parse(kind.fmt) if field})
    return error


@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [
        (400, "ExpiredTokenException", Denied),  # of the token service
        (400, "InvalidIdentityToken", Denied),
        (400, "IDPCommunicationError", TemporaryFailure),
        (400, "RequestTimeoutException", TemporaryFailure),
        (400, "ThrottledException", Throttled),
        (400, "RequestThrottled", Throttled),
        (400, "BandwidthLimitExceeded", Throttled),
    ],
)
async def test_codes_with_status_400(
    endpoint: Endpoint, status: int, code: str, expected: type[Exception]
) -> None:
    endpoint.refuse = lambda request: error(status, code)
    objects = S3Storage(URL, **endpoint.options())
    with pytest.raises(expected, match=code):
        await on_io(objects.get("k"))
    await on_io(objects.close())


# ---- redirects, and other successes than 200


@pytest.mark.parametrize("location", [True, False])
@pytest.mark.parametrize("only_objects", [True, False])
@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_a_redirect_is_not_followed(
    endpoint: Endpoint, status: int, only_objects: bool, location: bool
) -> None:
    """The body, and the session token of the credentials, would go to another server."""
    async with Endpoint().running() as other:
        headers = {"Location": f"{other.url}/{BUCKET}/run/k"} if location else {}
        refusal = lambda request: error(status, "Redirect", **headers)  # noqa: E731
        endpoint.refuse = lambda request: refusal(request) if "run" in request.path or not only_objects else None
        objects = S3Storage(URL, **endpoint.options(token="session-token"))
        for call in (
            lambda: objects.put("k", [b"x"], PutMode.CREATE),
            lambda: objects.get("k"),
            lambda: objects.delete("k"),
        ):
            before = len(endpoint.requests)
            with pytest.raises(Denied, match="redirects"):
                await on_io(call())
            assert len(endpoint.requests) - before < 10
        assert other.requests == []
        await on_io(objects.close())


@pytest.mark.parametrize("status", [202, 203, 206])
async def test_a_success_that_stores_or_sends_less_is_none(endpoint: Endpoint, status: int) -> None:
    objects = S3Storage(URL, **endpoint.options())
    await on_io(objects.put("k", [b"abc"], PutMode.CREATE))
    endpoint.refuse = lambda request: web.Response(status=status, body=b"" if request.method == "PUT" else b"a")
    with pytest.raises(Corrupt, match=f"status {status}, not the whole object"):
        await on_io(objects.get("k"))
    with pytest.raises(Unavailable, match=f"status {status}"):
        await on_io(objects.put("x", [b"abc"], PutMode.CREATE))
    await on_io(objects.close())
