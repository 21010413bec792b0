"""A Google Cloud Storage endpoint that honours every precondition and can inject faults.

Objects are kept in memory. It responds like fake-gcs-server (`tests/storage/test_gcs_endpoint.py`), except where
that is laxer than Google: this endpoint checks preconditions and checksums in all kinds of requests.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import enum
import hashlib
import json
import random
import re
import ssl
import time
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any
from urllib.parse import unquote

import google_crc32c
from aiohttp import web

from tests.support import web_server


class Wrong(enum.Enum):
    """A kind of fault."""

    REFUSED = "not done; another status comes back"
    REFUSED_LATE = "done; another status comes back"
    REQUEST_LOST = "not done; the connection closes"
    REPLY_LOST = "done; the connection closes"
    LATE = "the connection closes; done when `release` is called"
    REPEATED = "done twice; the second response comes"
    CUT = "done; the connection closes in the middle of the response"
    FLIPPED = "done; the last byte of the response is changed"
    DAMAGED = "the last byte of the request body arrives changed"
    PAGE = "not done; a web page comes back with status 200"
    SILENT = "not done; no response comes, and the connection stays open"


@dataclass(frozen=True)
class Fault:
    """A fault of one request."""

    wrong: Wrong
    status: int = 503
    headers: dict[str, str] = field(default_factory=dict)
    reason: str = "backendError"


Faults = Callable[[web.Request], Fault | None]


def at(fault: Fault, method: str, times: int = 1, below: str = "") -> Faults:
    """Inject the fault into the first `times` requests with the method and with `below` in their path."""
    left = [times]

    def draw(request: web.Request) -> Fault | None:
        if left[0] == 0 or request.method != method or below not in unquote(request.rel_url.raw_path):
            return None
        left[0] -= 1
        return fault

    return draw


@dataclass
class Stored:
    """A stored object."""

    data: bytes
    generation: int
    created: float
    metadata: dict[str, Any]

    def resource(self, bucket: str, name: str) -> dict[str, Any]:
        crc32c, md5 = checks(self.data)
        return {
            "kind": "storage#object",
            "bucket": bucket,
            "name": name,
            "size": str(len(self.data)),
            "generation": str(self.generation),
            "metageneration": "1",
            "timeCreated": _time(self.created),
            "updated": _time(self.created),
            "crc32c": crc32c,
            "md5Hash": md5,
            **{k: v for k, v in self.metadata.items() if k in ("metadata", "cacheControl")},
        }


def checks(data: bytes) -> tuple[str, str]:
    """Return the CRC32C and the MD5 of the bytes in the API's format."""
    crc32c = base64.b64encode(google_crc32c.value(data).to_bytes(4, "big")).decode()
    return crc32c, base64.b64encode(hashlib.md5(data).digest()).decode()


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


class Refusal(Exception):
    """A request that fails with an error response."""

    def __init__(self, status: int, reason: str, message: str = "") -> None:
        self.status = status
        self.reason = reason
        self.message = message or reason


class Endpoint:
    """The server, with its buckets, the requests it received, and the faults to inject."""

    def __init__(self) -> None:
        self.buckets: dict[str, dict[str, Stored]] = {}
        self.requests: list[str] = []
        self.shown: list[str | None] = []
        self.faults: Faults = lambda request: None
        self.token: str | None = None
        """The required access token, which a service account gets from `POST /token`."""
        self.lax = False
        """Whether the checksums of uploads are ignored, as by fake-gcs-server."""
        self.stuck = False
        """Whether every page of a listing is the first one and announces another."""
        self.url = ""
        self._generation = time.time_ns() // 1000
        self._late: list[Callable[[], object]] = []
        self._uploads: dict[str, tuple[str, dict[str, str], dict[str, Any]]] = {}

    @contextlib.asynccontextmanager
    async def running(self, tls: ssl.SSLContext | None = None) -> AsyncIterator[Endpoint]:
        """Serve on a free port for the duration of the block."""
        async with web_server.serving(self._handle, tls) as self.url:
            yield self

    def new_bucket(self) -> str:
        """Create a bucket and return its name."""
        name = f"b-{uuid.uuid4().hex}"
        self.buckets[name] = {}
        return name

    def chaos(self, seed: int, share: float) -> Faults:
        """Inject every fault that a client must tolerate, at random, into a share of the requests."""
        rng = random.Random(seed)
        kinds = [
            *(Fault(Wrong.REFUSED, status) for status in (408, 429, 500, 502, 503)),
            Fault(Wrong.REFUSED, 429, {"Retry-After": "0"}, "rateLimitExceeded"),
            Fault(Wrong.REFUSED_LATE, 503),
            *(Fault(w) for w in (Wrong.REQUEST_LOST, Wrong.REPLY_LOST, Wrong.LATE, Wrong.REPEATED, Wrong.CUT)),
        ]

        def draw(request: web.Request) -> Fault | None:
            if rng.random() < 0.2:
                self.release()
            return rng.choice(kinds) if rng.random() < share else None

        return draw

    def release(self) -> None:
        """Execute the late requests."""
        late, self._late = self._late, []
        for call in late:
            with contextlib.suppress(Refusal):
                call()

    # -- one request

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        self.requests.append(f"{request.method} {unquote(request.rel_url.raw_path)}")
        self.shown.append(request.headers.get("Authorization"))
        fault = self.faults(request)
        if fault is None:
            return self._respond(request, body)
        match fault.wrong:
            case Wrong.REFUSED:
                return _refused(Refusal(fault.status, fault.reason), fault.headers)
            case Wrong.REFUSED_LATE:
                self._respond(request, body)
                return _refused(Refusal(fault.status, fault.reason), fault.headers)
            case Wrong.REPLY_LOST:
                self._respond(request, body)
            case Wrong.LATE:
                self._late.append(lambda: self._respond(request, body))
            case Wrong.REPEATED:
                self._respond(request, body)
                return self._respond(request, body)
            case Wrong.CUT:
                await self._cut(request, self._respond(request, body))
            case Wrong.FLIPPED:
                response = self._respond(request, body)
                data = bytes(response.body)  # type: ignore[arg-type]
                response.body = data[:-1] + bytes([data[-1] ^ 1]) if data else b""
                return response
            case Wrong.DAMAGED:
                end = body.rindex(b"\r\n--")
                return self._respond(request, body[: end - 1] + bytes([body[end - 1] ^ 1]) + body[end:])
            case Wrong.PAGE:
                return web.Response(text="<html>Log in</html>", content_type="text/html")
            case Wrong.SILENT:
                await _forever()
            case Wrong.REQUEST_LOST:
                pass
        if request.transport is not None:
            request.transport.abort()
        return web.Response()

    async def _cut(self, request: web.Request, response: web.Response) -> None:
        data = bytes(response.body) if response.body else b"{}"  # type: ignore[arg-type]
        part = web.StreamResponse(status=response.status, headers=response.headers)
        part.content_length = len(data)
        await part.prepare(request)
        await part.write(data[: len(data) // 2])

    def _respond(self, request: web.Request, body: bytes) -> web.Response:
        try:
            if request.path == "/token":
                return web.json_response({"access_token": self.token, "expires_in": 3600})
            if self.token is not None and request.headers.get("Authorization") != f"Bearer {self.token}":
                raise Refusal(401, "authError", "Invalid Credentials")
            return self._done(request.method, request.rel_url.raw_path, dict(request.query), request.headers, body)
        except Refusal as refusal:
            return _refused(refusal, {})

    def _done(self, method: str, path: str, query: dict[str, str], headers: Any, body: bytes) -> web.Response:
        parts = [unquote(part) for part in path.strip("/").split("/")]
        service, parts = ("json", parts) if parts[0] == "storage" else (parts[0], parts[1:])
        match (service, method, parts[2:]):
            case ("json", "POST", ["b"]):
                name = json.loads(body)["name"]
                self.buckets.setdefault(name, {})
                return web.json_response({"kind": "storage#bucket", "name": name})
            case ("json", "GET", ["b", bucket]):
                self._objects(bucket)
                return web.json_response({"kind": "storage#bucket", "name": bucket})
            case ("json", "GET", ["b", bucket, "o"]):
                return self._list(bucket, query)
            case ("json" | "download", "GET", ["b", bucket, "o", name]):
                return self._read(bucket, name, query, headers, service == "download")
            case ("json", "DELETE", ["b", bucket, "o", name]):
                objects = self._objects(bucket)
                _check(query, objects.get(name))
                if objects.pop(name, None) is None:
                    raise Refusal(404, "notFound", f"No such object: {bucket}/{name}")
                return web.Response(status=204)
            case ("upload", "POST", ["b", bucket, "o"]):
                return self._upload(bucket, query, headers, body)
            case ("upload", "PUT", ["b", bucket, "o"]):
                bucket, query, metadata = self._uploads.pop(query["upload_id"])
                return self._store(bucket, metadata, body, query)
        raise Refusal(404, "notFound", "Not Found")

    def _objects(self, bucket: str) -> dict[str, Stored]:
        if bucket not in self.buckets:
            raise Refusal(404, "notFound", "The specified bucket does not exist.")
        return self.buckets[bucket]

    def _read(self, bucket: str, name: str, query: dict[str, str], headers: Any, download: bool) -> web.Response:
        stored = self._objects(bucket).get(name)
        if stored is None:
            raise Refusal(404, "notFound", f"No such object: {bucket}/{name}")
        _check(query, stored)
        if query.get("alt") != "media" and not download:
            return web.json_response(stored.resource(bucket, name))
        size, data, status = len(stored.data), stored.data, 200
        crc32c, md5 = checks(data)
        sent = {"X-Goog-Hash": f"crc32c={crc32c},md5={md5}", "X-Goog-Generation": str(stored.generation)}
        if (span := re.fullmatch(r"bytes=(\d*)-(\d*)", headers.get("Range", ""))) is not None:
            first, last = span[1], span[2]
            start = int(first) if first else max(0, size - int(last))
            stop = min(size, int(last) + 1) if first and last else size
            if start >= size:
                return web.Response(status=416, headers={"Content-Range": f"bytes */{size}"})
            status, data = 206, data[start:stop]
            sent["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
        return web.Response(status=status, body=data, headers=sent, content_type="application/octet-stream")

    def _list(self, bucket: str, query: dict[str, str]) -> web.Response:
        objects, prefix, delimiter = self._objects(bucket), query.get("prefix", ""), query.get("delimiter", "")
        names: dict[str, bool] = {}  # name to whether it is a prefix, in order
        for name in sorted(objects, key=str.encode):
            if name.startswith(prefix):
                head, separator, _ = name[len(prefix) :].partition(delimiter) if delimiter else (name, "", "")
                names[prefix + head + separator if separator else name] = bool(separator)
        after = "" if self.stuck else base64.b64decode(query.get("pageToken", "")).decode()
        rest = [name for name in names if name > after]
        page = rest[: int(query.get("maxResults", 1000))]
        listing: dict[str, Any] = {"kind": "storage#objects"}
        if items := [objects[name].resource(bucket, name) for name in page if not names[name]]:
            listing["items"] = items
        if prefixes := [name for name in page if names[name]]:
            listing["prefixes"] = prefixes
        if self.stuck:
            listing["nextPageToken"] = "AA=="
        elif len(rest) > len(page):
            listing["nextPageToken"] = base64.b64encode(page[-1].encode()).decode()
        return web.json_response(listing)

    def _upload(self, bucket: str, query: dict[str, str], headers: Any, body: bytes) -> web.Response:
        self._objects(bucket)
        match query.get("uploadType"):
            case "multipart":
                boundary = re.search(r'boundary="?([^";]+)"?', headers.get("Content-Type", ""))
                if boundary is None:
                    raise Refusal(400, "invalid", "the request has no boundary")
                metadata, data = _parts(body, boundary[1].encode())
                return self._store(bucket, metadata, data, query)
            case "media":
                return self._store(bucket, {"name": query["name"]}, body, query)
            case "resumable":
                upload = uuid.uuid4().hex
                metadata = json.loads(body or b"{}")
                self._uploads[upload] = (bucket, query, {"name": query.get("name"), **metadata})
                location = f"{self.url}/upload/storage/v1/b/{bucket}/o?uploadType=resumable&upload_id={upload}"
                return web.Response(headers={"Location": location})
        raise Refusal(400, "invalid", "unknown uploadType")

    def _store(self, bucket: str, metadata: dict[str, Any], data: bytes, query: dict[str, str]) -> web.Response:
        objects, name = self._objects(bucket), metadata["name"]
        _check(query, objects.get(name))
        for checksum, real in zip(("crc32c", "md5Hash"), checks(data), strict=True):
            given = metadata.get(checksum, real)
            if given != real and not self.lax:
                raise Refusal(400, "invalid", f"Provided {checksum} {given} does not match calculated {real}.")
        self._generation += 1
        objects[name] = Stored(data, self._generation, time.time(), metadata)
        return web.json_response(objects[name].resource(bucket, name))


def _refused(refusal: Refusal, headers: dict[str, str]) -> web.Response:
    detail = {"domain": "global", "reason": refusal.reason, "message": refusal.message}
    error = {"code": refusal.status, "message": refusal.message, "errors": [detail]}
    return web.json_response({"error": error}, status=refusal.status, headers=headers)


def _check(query: dict[str, str], stored: Stored | None) -> None:
    """Raise `Refusal` if a precondition does not hold."""
    for name, value in (("Generation", stored.generation if stored else 0), ("Metageneration", int(bool(stored)))):
        if int(query.get(f"if{name}Match", value)) != value:
            raise Refusal(412, "conditionNotMet", "At least one of the pre-conditions you specified did not hold.")
        if f"if{name}NotMatch" in query and int(query[f"if{name}NotMatch"]) == value:
            raise Refusal(412, "conditionNotMet", "At least one of the pre-conditions you specified did not hold.")


def _parts(body: bytes, boundary: bytes) -> tuple[dict[str, Any], bytes]:
    """Return the metadata and the bytes of a multipart upload."""
    mark = re.escape(b"--" + boundary)
    head = re.match(rb"\s*" + mark + rb"\r?\n.*?\r?\n\r?\n(.*?)\r?\n" + mark + rb"\r?\n.*?\r?\n\r?\n", body, re.S)
    end = re.search(rb"\r?\n" + mark + rb"--\s*\Z", body[max(0, len(body) - 500) :])
    if head is None or end is None:
        raise Refusal(400, "invalid", "the request is not a multipart upload")
    return json.loads(head[1]), body[head.end() : max(0, len(body) - 500) + end.start()]


async def _forever() -> None:
    await asyncio.Event().wait()
