"""An S3 endpoint that knows nothing newer than conditional PUTs, stores bodies as they arrive, and can refuse."""

from __future__ import annotations

import base64
import contextlib
import ssl
import zlib
from collections.abc import AsyncIterator, Callable
from email.utils import formatdate
from typing import Any
from urllib.parse import quote

from aiohttp import web

from tests.support import web_server

BUCKET = "checkpoints"

Refuse = Callable[[web.Request], web.Response | None]


def error(status: int, code: str = "", message: str = "", **headers: str) -> web.Response:
    """Return an error response; without a code its body is not XML, as from a proxy or load balancer."""
    body = f"<Error><Code>{code}</Code><Message>{message or code}</Message></Error>" if code else "<html>"
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return web.Response(status=status, body=body.encode(), headers=named, content_type="application/xml")


class Endpoint:
    """The server, with one bucket, the requests that it received, and what it refuses."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.metadata: dict[str, dict[str, str]] = {}
        self.requests: list[tuple[str, str, dict[str, str]]] = []
        self.refuse: Refuse = lambda request: None
        self.change: Callable[[str, bytes], bytes] = lambda key, body: body
        """What becomes of a body before it is stored."""
        self.echoes_checksums = False
        self.etag: Callable[[bytes], str] = lambda stored: "tag"
        self.bucket_exists = True
        self.url = ""

    def options(self, **more: Any) -> dict[str, Any]:
        """Return the storage_options of `s3://checkpoints/…`."""
        return {"endpoint_url": self.url, "key": "tester", "secret": "not-a-secret", **more}

    def asked(self, method: str) -> list[str]:
        """Return the keys of the requests with a method."""
        return [key for m, key, _ in self.requests if m == method]

    @contextlib.asynccontextmanager
    async def running(self, tls: ssl.SSLContext | None = None) -> AsyncIterator[Endpoint]:
        async with web_server.serving(self._respond, tls) as self.url:
            yield self

    async def _respond(self, request: web.Request) -> web.Response:
        bucket, _, key = request.match_info["path"].partition("/")
        self.requests.append((request.method, key, dict(request.headers)))
        if (refusal := self.refuse(request)) is not None:
            return refusal
        if bucket != BUCKET or not self.bucket_exists:
            return error(404, "NoSuchBucket")
        match request.method:
            case "PUT":
                return await self._put(request, key)
            case "DELETE":
                self.objects.pop(key, None)
                return web.Response(status=204)
            case "GET" if not key:
                return self._list(request)
        if key not in self.objects:
            return error(404, "NoSuchKey")
        data, headers = self.objects[key], {"Last-Modified": formatdate(usegmt=True), **self.metadata[key]}
        if (asked := request.http_range).start is None:
            return web.Response(body=data, headers=headers)
        part, first = data[asked], asked.start
        if not part:
            return error(416, "InvalidRange")
        headers["Content-Range"] = f"bytes {first}-{first + len(part) - 1}/{len(data)}"
        return web.Response(status=206, body=part, headers=headers)

    async def _put(self, request: web.Request, key: str) -> web.Response:
        body = await request.read()
        if request.headers.get("If-None-Match") == "*" and key in self.objects:
            return error(412, "PreconditionFailed")
        self.objects[key] = self.change(key, body)
        self.metadata[key] = {n: v for n, v in request.headers.items() if n.lower().startswith("x-amz-meta-")}
        headers = {"ETag": f'"{self.etag(self.objects[key])}"'}
        if self.echoes_checksums:
            headers["x-amz-checksum-crc32"] = _crc32(self.objects[key])
        return web.Response(headers=headers)

    def _list(self, request: web.Request) -> web.Response:
        prefix, delimiter = request.query.get("prefix", ""), request.query.get("delimiter", "")
        keys, folders = [], set()
        for key in sorted(self.objects):
            if not key.startswith(prefix):
                continue
            head, found, _ = key[len(prefix) :].partition(delimiter) if delimiter else (key, "", "")
            if found:
                folders.add(f"{prefix}{head}{delimiter}")
            else:
                keys.append(key)
        contents = "".join(
            f"<Contents><Key>{quote(k)}</Key><Size>{len(self.objects[k])}</Size>"
            "<LastModified>2020-01-01T00:00:00.000Z</LastModified></Contents>"
            for k in keys
        )
        common = "".join(f"<CommonPrefixes><Prefix>{quote(f)}</Prefix></CommonPrefixes>" for f in sorted(folders))
        return web.Response(
            text="<ListBucketResult><IsTruncated>false</IsTruncated><EncodingType>url</EncodingType>"
            f"{contents}{common}</ListBucketResult>",
            content_type="application/xml",
        )


def _crc32(data: bytes) -> str:
    return base64.b64encode(zlib.crc32(data).to_bytes(4, "big")).decode()
