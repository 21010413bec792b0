"""Objects in a bucket of S3, or of a server that speaks its protocol.

s3fs opens the session, with the credentials and options that its users know. The session's client then makes each
request, without the retries of s3fs and botocore: they would repeat a create blindly, find the object that it
created, and report it as another writer's. `retry` repeats requests instead.

A create has exactly one winner among many writers:

1. PUT with `If-None-Match: *`, and with a random token in the object's metadata.
2. Status 412 means that the key is taken. The HTTP client may have sent the request twice (on a connection that
   the server closed), so a HEAD decides: if the object has our token, this create succeeded.
3. Status 409 means that another write of the key is in progress, so the outcome is unknown: `Unavailable`.

Every PUT carries the CRC32 of the body in a header, and the body is sent unframed. By default botocore frames the
body over https (`aws-chunked`, with the checksum at its end), and a server that does not know the framing stores
it as part of the object. The checksum of the stored bytes in the response is compared (`checksums`).
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import copy
import email.utils
import functools
import io
import os
import re
import secrets
import weakref
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

from s3fs import S3FileSystem

from tstore.core.format.bounds import HEAD_BYTES
from tstore.core.runtime.event_loops import PerLoop, wait_io
from tstore.core.storage.base import Storage
from tstore.core.storage.http.responses import sanitize
from tstore.core.storage.http.session import open_socket
from tstore.core.storage.limits import CONNECT_SECONDS, IDLE_SECONDS, Deadline, ResponseMemory
from tstore.core.storage.objects import (
    Buffers,
    Capabilities,
    Durability,
    Entry,
    Page,
    PutMode,
    checked_key,
    overlong,
    prefixes_above,
    read_limit,
    too_short,
)
from tstore.core.storage.s3.checksums import StoredBytes, crc32, declare_checksum
from tstore.core.storage.s3.responses import (
    BoundedSession,
    closing_responses,
    mapped_error,
    new_session,
    status_of,
)
from tstore.errors import AlreadyExists, Corrupt, InvalidArgument, NotFound, TStoreError, Unavailable

__all__ = ["S3Storage", "split_url"]

_NAME = r"[a-zA-Z0-9-]{1,63}"
_ARN = re.compile(  # an access point, which replaces the bucket
    rf"arn:[a-z-]+:s3[a-z-]*:[a-z0-9-]*:[0-9]*:(?:outpost[/:]{_NAME}[/:])?accesspoint[/:][a-zA-Z0-9.-]{{1,63}}"
)
_BUCKET = re.compile(r"[A-Za-z0-9._-]{1,255}")


def split_url(url: str) -> tuple[str, str]:
    """Return the bucket, or the ARN of an access point, and the path below it without slashes at its ends."""
    rest = url.partition("://")[2]
    arn = _ARN.match(rest)
    bucket = arn[0] if arn is not None else rest.partition("/")[0]
    prefix = rest[len(bucket) :]
    if (arn is None and not _BUCKET.fullmatch(bucket)) or prefix[:1] not in ("", "/"):
        shown = "" if "@" in url else f"{url!r:.200} has no valid bucket: "  # before the @ may be a password
        raise InvalidArgument(
            f"{shown}the URL of a store on S3 is s3://bucket/path, or s3://arn:…:accesspoint/name/path; "
            "credentials go into storage_options, as key and secret, or into the environment"
        )
    prefix = prefix.strip("/")
    return bucket, checked_key(prefix, f"s3://{bucket}") if prefix else ""


_CONNECTIONS = 64
_PIECE = 256 << 10
_UPLOAD = "tstore-put"  # the key of the upload's token in the metadata of an object

_CONFIG = {
    "connect_timeout": CONNECT_SECONDS,
    "max_pool_connections": _CONNECTIONS,
    "connector_args": {"socket_factory": open_socket},
    "retries": {"total_max_attempts": 1},
    "response_checksum_validation": "when_required",  # chunks and records carry their own
    "http_session_cls": BoundedSession,
}
"""Options of botocore, which storage_options can override."""


class S3Storage(Storage):
    """The objects of a bucket whose keys start with a prefix: `s3://bucket/prefix`."""

    capabilities = Capabilities(conditional_create=True, listing=True, ranges=True, durable=True)

    def __init__(
        self,
        url: str,
        *,
        key: str | None = None,
        secret: str | None = None,
        token: str | None = None,
        profile: str | None = None,
        anon: bool = False,
        endpoint_url: str | None = None,
        use_ssl: bool = True,
        requester_pays: bool = False,
        cache_regions: bool = False,
        client_kwargs: Mapping[str, Any] | None = None,
        config_kwargs: Mapping[str, Any] | None = None,
        s3_additional_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Take options that s3fs documents; connect at the first request.

        `s3_additional_kwargs` are sent with every write. botocore looks for missing options in the environment,
        its files and the machine's role. Raise `InvalidArgument` for a URL without a bucket or with a user.
        """
        self._bucket, prefix = split_url(url)
        self.url = f"s3://{self._bucket}/{prefix}".rstrip("/")
        self._prefix = f"{prefix}/" if prefix else ""
        fixed = [name for name in s3_additional_kwargs or () if name.startswith("Checksum")]
        if fixed:
            raise InvalidArgument(
                f"{self.url}: s3_additional_kwargs: {', '.join(fixed)} can't be set, since every write carries a "
                "CRC32; remove it"
            )
        self._options: dict[str, Any] = {
            "key": key,
            "secret": secret,
            "token": token,
            "anon": anon,
            "endpoint_url": endpoint_url,
            "use_ssl": use_ssl,
            "requester_pays": requester_pays,
            "cache_regions": cache_regions,
            "client_kwargs": dict(client_kwargs or {}),
            "s3_additional_kwargs": dict(s3_additional_kwargs or {}),
            # a `Deadline` takes the place of the client's timeout, which does not know how long a body takes
            "config_kwargs": {**_CONFIG, **(config_kwargs or {}), "read_timeout": None},
        }
        self._profile = profile
        self._idle_seconds = float((config_kwargs or {}).get("read_timeout") or IDLE_SECONDS)
        self._connections = PerLoop(_Connection)
        self._stored_bytes = StoredBytes()

    async def get(self, key: str, max_size: int | None = None) -> bytes:
        async with self._request("read", key) as (connection, deadline):
            response = await connection.client.get_object(**self._object(key), **connection.file_system.req_kw)
            deadline.start_phase()
            async with response["Body"] as body:
                if (status := response["ResponseMetadata"]["HTTPStatusCode"]) != 200:
                    raise Corrupt(f"{self.url}: {key}: the server sent status {status}, not the whole object")
                return await self._read_whole(key, body, int(response.get("ContentLength", 0)), max_size, deadline)

    async def read(self, key: str, offset: int, buffers: Buffers, size: int) -> None:
        if size == 0:
            return
        requested = f"bytes={offset}-{offset + size - 1}"
        async with self._request("read", key) as (connection, deadline):
            try:
                response = await connection.client.get_object(
                    **self._object(key), Range=requested, **connection.file_system.req_kw
                )
            except Exception as error:
                if status_of(error) == 416:
                    raise too_short(f"{self.url}: {key}", offset, offset + size) from error
                raise
            deadline.start_phase()
            async with response["Body"] as body:
                self._check_range(key, response, offset)
                await self._fill(key, body, offset, buffers, size, deadline)

    async def head(self, key: str) -> Entry | None:
        try:
            response = await self._head(key)
        except NotFound:
            return None
        with self._decoding(key):
            return Entry(key, int(response["ContentLength"]), _age(response, response.get("LastModified")))

    async def put(
        self, key: str, buffers: Buffers, mode: PutMode, durability: Durability = Durability.FSYNC
    ) -> None:
        """See `Storage.put`; the joined buffers may have at most 5 GB."""
        upload_token = secrets.token_hex(8)
        options: dict[str, Any] = {"IfNoneMatch": "*"} if mode is PutMode.CREATE else {}
        single = len(buffers) == 1 and isinstance(buffers[0], (bytes, bytearray))
        body = buffers[0] if single else b"".join(buffers)
        check = await crc32(body)
        try:
            async with self._request("write", key) as (connection, deadline):
                deadline.extend(len(body))  # at once, since the HTTP client does not report what it has sent
                deadline.await_response()
                options |= connection.file_system.s3_additional_kwargs | connection.file_system.req_kw
                options["Metadata"] = {**options.get("Metadata", {}), _UPLOAD: upload_token}
                options["ChecksumCRC32"] = check
                response = await connection.client.put_object(**self._object(key), Body=body, **options)
        except AlreadyExists:
            try:
                stored = (await self._head(key)).get("Metadata", {}).get(_UPLOAD)
            except NotFound as error:
                raise Unavailable(f"{self.url}: {key} first existed, then did not; try again") from error
            if stored != upload_token:
                raise
            return
        if (status := response["ResponseMetadata"]["HTTPStatusCode"]) not in (200, 201, 204):
            raise Unavailable(f"{self.url}: {key}: the server sent status {status}, and may have stored nothing")
        read_back = functools.partial(self.get, key) if mode is PutMode.CREATE else None
        await self._stored_bytes.check(f"{self.url}: {key}", body, check, response, read_back)

    async def pages(self, prefix: str, delimiter: str = "") -> AsyncIterator[Page]:
        options: dict[str, Any] = {"Bucket": self._bucket, "Prefix": self._prefix + prefix, "Delimiter": delimiter}
        skip = len(self._prefix)
        while True:
            async with self._request("list", prefix) as (connection, _):
                response = await connection.client.list_objects_v2(**options, **connection.file_system.req_kw)
            if "IsTruncated" not in response:  # not a listing, although it would parse as an empty one
                raise Corrupt(f"{self.url}: the server sent no listing of {prefix!r}; check endpoint_url")
            with self._decoding(f"the list of {prefix!r}"):
                entries = [
                    Entry(item["Key"][skip:], item["Size"], _age(response, item.get("LastModified")))
                    for item in response.get("Contents", [])
                    if not item["Key"].endswith("/")  # a "folder" that a console created
                ]
                page = Page(entries, [item["Prefix"][skip:] for item in response.get("CommonPrefixes", [])])
                next_token = response["NextContinuationToken"] if response["IsTruncated"] else None
            yield page
            if next_token is None:
                return
            options["ContinuationToken"] = next_token

    async def delete(self, key: str) -> None:
        with contextlib.suppress(NotFound):  # some servers send 404
            async with self._request("delete", key) as (connection, _):
                await connection.client.delete_object(**self._object(key), **connection.file_system.req_kw)

    def above(self) -> Iterator[Storage]:
        for prefix in prefixes_above(self._prefix):
            folder = copy.copy(self)  # with the same connections
            folder._prefix, folder.url = prefix, f"s3://{self._bucket}/{prefix}".rstrip("/")
            yield folder

    async def close(self) -> None:
        connection = self._connections.pop()
        if connection is not None:
            await connection.close()

    def _object(self, key: str) -> dict[str, str]:
        """Return the arguments of a request that name an object."""
        return {"Bucket": self._bucket, "Key": self._prefix + checked_key(key, self.url)}

    async def _connect(self) -> _Connection:
        connection = self._connections.get()
        async with connection.lock:
            if connection.client is None:
                file_system = S3FileSystem(
                    **self._options,
                    session=new_session(self._profile),
                    asynchronous=True,
                    skip_instance_cache=True,
                    use_listings_cache=False,
                )
                await file_system.set_session()
                connection.open(file_system, await file_system.get_s3(self._bucket))
                _connected.add(self)
        return connection

    @contextlib.asynccontextmanager
    async def _request(self, action: str, key: str) -> AsyncIterator[tuple[_Connection, Deadline]]:
        """Yield the connection and the deadline of one request; raise the errors of `Storage`."""
        deadline: Deadline | None = None
        try:
            with closing_responses():
                connection = await self._connect()
                async with Deadline(self._idle_seconds) as deadline:
                    yield connection, deadline
        except TStoreError:
            raise
        except Exception as error:
            if isinstance(error, TimeoutError) and deadline is not None:
                raise Unavailable(f"{self.url}: can't {action} {key!r}: {deadline.message}") from error
            raise mapped_error(self.url, self._bucket, action, key, error) from error

    @contextlib.contextmanager
    def _decoding(self, name: str) -> Iterator[None]:
        """Raise `Corrupt`, with the name of what was requested, if the response has missing or invalid parts."""
        try:
            yield
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise Corrupt(
                f"{self.url}: {name}: the server's response is invalid ({sanitize(repr(error))}); check "
                "endpoint_url"
            ) from error

    async def _head(self, key: str) -> Any:
        async with self._request("stat", key) as (connection, _):
            return await connection.client.head_object(**self._object(key), **connection.file_system.req_kw)

    async def _read_whole(
        self, key: str, body: Any, length: int, max_size: int | None, deadline: Deadline
    ) -> bytes:
        """Return a body with the announced length; raise `Corrupt` if it is longer than its bound."""
        limit = read_limit(key, max_size)
        with io.BytesIO() as data:  # once closed, it leaves no bytes in the traceback of an error
            async with ResponseMemory() as memory:
                while length <= limit and (piece := await body.read(_PIECE)):
                    deadline.extend(len(piece))
                    size = data.tell() + len(piece)
                    if data.tell() < HEAD_BYTES <= size:
                        limit = read_limit(key, max_size, data.getvalue() + piece[:HEAD_BYTES])
                    length = max(length, size)  # a server may send more than it announced
                    if not memory.take(len(piece)):
                        await deadline.pause(memory.wait())
                    data.write(piece)
            if length > limit:
                raise overlong(f"{self.url}: {key}", limit)
            return data.getvalue()

    async def _fill(
        self, key: str, body: Any, offset: int, buffers: Buffers, size: int, deadline: Deadline
    ) -> None:
        received = 0
        for buffer in buffers:
            view = memoryview(buffer)
            filled = 0
            while filled < len(view):
                piece = await body.read(min(_PIECE, len(view) - filled))
                if not piece:
                    raise too_short(f"{self.url}: {key}", offset, offset + size, offset + received)
                deadline.extend(len(piece))
                view[filled : filled + len(piece)] = piece
                filled += len(piece)
                received += len(piece)

    def _check_range(self, key: str, response: Any, start: int) -> None:
        """Raise `Corrupt` unless the range starts at `start`; a server without ranges sends 200 and all bytes."""
        status, sent = response["ResponseMetadata"]["HTTPStatusCode"], str(response.get("ContentRange", ""))
        if status != 206 or not sent.startswith(f"bytes {start}-"):
            raise Corrupt(
                f"{self.url}: the server sent another range of {key} than requested (status {status}, "
                f"{sent or 'no Content-Range'}); use a server that supports ranges"
            )


class _Connection:
    """The client of one event loop, opened under `lock`; closed at the latest when it is garbage-collected."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.file_system: Any = None
        self.client: Any = None

    def open(self, file_system: Any, client: Any) -> None:
        """Take the file system and its client, which is closed when this connection is garbage-collected."""
        from botocore.handlers import add_expect_header

        # "Expect: 100-continue" costs a round trip per write, and waits forever if the server does not respond
        client.meta.events.unregister("before-call.s3", add_expect_header)
        client.meta.events.register("before-call.s3.PutObject", declare_checksum)
        self.file_system, self.client = file_system, client
        self._finalizer = weakref.finalize(self, _close_forgotten, client, asyncio.get_running_loop(), os.getpid())
        self._finalizer.atexit = False  # `_close_all` closes the client at exit, and waits

    async def close(self) -> None:
        """Close the client, if one was opened."""
        if self.client is not None:
            self._finalizer.detach()
            await self.client.close()


_connected: weakref.WeakSet[S3Storage] = weakref.WeakSet()


def _close_forgotten(client: Any, loop: asyncio.AbstractEventLoop, process: int) -> None:
    """Close a client on its loop; in a forked child, leave it to the parent."""
    if process == os.getpid() and not loop.is_closed():
        loop.call_soon_threadsafe(lambda: loop.create_task(client.close()))


@atexit.register
def _close_all() -> None:
    for storage in list(_connected):  # aiohttp complains about sessions that are open when the interpreter ends
        wait_io(storage.close())


def _age(response: Any, written: Any) -> float | None:
    """Return the seconds from `written` to the time of the response, None if either is unknown."""
    date = response["ResponseMetadata"].get("HTTPHeaders", {}).get("date")
    if date is None or written is None:
        return None
    return max(0.0, float((email.utils.parsedate_to_datetime(date) - written).total_seconds()))
