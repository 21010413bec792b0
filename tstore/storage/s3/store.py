"""Objects in a bucket of S3, or of a server that speaks its protocol.

s3fs holds the session, for it takes credentials and options as its users know them; the requests go to its client
directly, each exactly once, since repeating a write is `retry`'s business: s3fs and botocore would repeat a
create blindly and then report its own object as another's.

Create, so that of many writers exactly one is told that it has won:

1. PUT with `If-None-Match: *`, and with a random token in the object's metadata.
2. 412 says that the key is taken. The HTTP client may have sent the request twice (on a connection that was closed
   under it), so HEAD tells whether the object carries our token: then it was this very request that made it.
3. 409 says that another write of the key is under way: not decided, so `Unavailable`, and the caller asks again.

Bodies are checked by the server (CRC32, by botocore), and answers by the checksums of what is in them.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import email.utils
import io
import os
import secrets
import weakref
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

from tstore.errors import (
    AlreadyExists,
    Corrupt,
    InvalidArgument,
    NotFound,
    TStoreError,
    Unavailable,
)
from tstore.format.bounds import HEAD
from tstore.runtime.io_loop import wait_io
from tstore.storage.base import LONGEST, Buffers, Capabilities, bound, checked_key, overlong
from tstore.storage.http.responses import sanitize
from tstore.storage.objects import WHOLE, Entry, Page, PutMode, Span
from tstore.storage.pace import CONNECT_SECONDS, IDLE_SECONDS, Pace
from tstore.storage.room import Room
from tstore.storage.s3.responses import explained, status_of

__all__ = ["S3Objects"]

_CONNECTIONS = 64
_SLOWEST = 64 << 10  # bytes a second at which a write is still waited for
_PIECE = 256 << 10
_TOKEN = "tstore-put"


class S3Objects:
    """The objects of a bucket whose keys begin with a prefix: `s3://bucket/prefix`."""

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
        """Takes options of s3fs, which documents each, and connects at the first request.

        `s3_additional_kwargs` go with every write. What is not given comes from where botocore finds it: the
        environment, its files, the machine's role. Raises `InvalidArgument` where the URL names no bucket.
        """
        from tstore.storage.s3.session import BoundedSession  # takes 0.3 s

        path = url.partition("://")[2].strip("/")
        self._bucket, _, prefix = path.partition("/")
        if not self._bucket or "@" in self._bucket:
            raise InvalidArgument(
                "the URL of a store on S3 is s3://bucket/prefix; credentials go into storage_options, as key and "
                "secret, or into the environment"
            )
        self.url = f"s3://{path}"
        self._prefix = f"{prefix}/" if prefix else ""
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
            "config_kwargs": {
                "connect_timeout": CONNECT_SECONDS,
                "read_timeout": IDLE_SECONDS,
                "max_pool_connections": _CONNECTIONS,
                "retries": {"total_max_attempts": 1},
                "response_checksum_validation": "when_required",  # chunks and records carry their own
                "http_session_cls": BoundedSession,
                **(config_kwargs or {}),
            },
        }
        self._silence = float(self._options["config_kwargs"]["read_timeout"])
        if profile is not None:
            self._options["profile"] = profile
        from s3fs import S3FileSystem

        self._file_system = S3FileSystem
        self._loop: asyncio.AbstractEventLoop | None = None
        self._connecting = asyncio.Lock()
        self._files: Any = None
        self._client: Any = None

    async def get(self, key: str, span: Span = WHOLE, most: int = LONGEST) -> bytes:
        """See `Objects.get`."""
        start, stop = span
        if (start < 0 and stop is not None) or (stop is not None and stop < 0):
            size = await self._size(key)
            start, stop, _ = slice(start, stop).indices(size)
        if stop is not None and stop <= start:
            await self._size(key)
            return b""
        if (start, stop) == (0, None):
            return await self._read(key, None, most, most)
        asked = f"bytes={start}" if start < 0 else f"bytes={start}-{'' if stop is None else stop - 1}"
        try:
            return await self._read(key, asked, most if stop is None else stop - start, most)
        except _BeyondTheEnd:
            return b""

    async def read(self, key: str, offset: int, buffers: Buffers, size: int) -> None:
        """See `Objects.read`."""
        if size == 0:
            return
        async with self._answers("read", key) as (client, pace):
            try:
                answer = await client.get_object(
                    Bucket=self._bucket,
                    Key=self._name(key),
                    Range=f"bytes={offset}-{offset + size - 1}",
                    **self._files.req_kw,
                )
            except Exception as error:
                if status_of(error) == 416:
                    raise self._short(key, offset, size, 0) from error
                raise
            pace.begin()
            async with answer["Body"] as body:
                self._check_range(key, answer, offset)
                await self._fill(key, body, offset, buffers, size, pace)

    async def head(self, key: str) -> Entry | None:
        """See `Objects.head`."""
        try:
            answer = await self._head(key)
        except NotFound:
            return None
        with self._understood(key):
            return Entry(key, int(answer["ContentLength"]), _age(answer, answer.get("LastModified")))

    async def put(self, key: str, data: Buffers, mode: PutMode) -> None:
        """See `Objects.put`; the joined buffers are at most 5 GB."""
        token = secrets.token_hex(8)
        asked: dict[str, Any] = {"IfNoneMatch": "*"} if mode is PutMode.CREATE else {}
        body = data[0] if len(data) == 1 and isinstance(data[0], (bytes, bytearray)) else b"".join(data)
        longest = IDLE_SECONDS + len(body) / _SLOWEST  # the HTTP client waits for ever for one that stops taking
        try:
            async with self._answers("write", key, longest) as (client, _):
                asked |= self._files.s3_additional_kwargs | self._files.req_kw
                asked["Metadata"] = {**asked.get("Metadata", {}), _TOKEN: token}
                await client.put_object(Bucket=self._bucket, Key=self._name(key), Body=body, **asked)
        except AlreadyExists:
            try:
                found = (await self._head(key)).get("Metadata", {}).get(_TOKEN)
            except NotFound as error:
                raise Unavailable(f"{self.url}: {key} existed, and then it did not; try again") from error
            if found != token:
                raise

    async def pages(self, prefix: str, delimiter: str = "") -> AsyncIterator[Page]:
        """See `Objects.pages`."""
        asked: dict[str, Any] = {"Bucket": self._bucket, "Prefix": self._prefix + prefix, "Delimiter": delimiter}
        skip = len(self._prefix)
        while True:
            async with self._answers("list", prefix) as (client, _):
                answer = await client.list_objects_v2(**asked, **self._files.req_kw)
            if "IsTruncated" not in answer:  # what is no list must not pass for an empty one
                raise Corrupt(f"{self.url}: the server's answer is no list of {prefix!r}; check endpoint_url")
            with self._understood(f"the list of {prefix!r}"):
                entries = [
                    Entry(found["Key"][skip:], found["Size"], _age(answer, found.get("LastModified")))
                    for found in answer.get("Contents", [])
                    if not found["Key"].endswith("/")  # a "folder" that some console made
                ]
                page = Page(entries, [found["Prefix"][skip:] for found in answer.get("CommonPrefixes", [])])
                more = answer["NextContinuationToken"] if answer["IsTruncated"] else None
            yield page
            if more is None:
                return
            asked["ContinuationToken"] = more

    async def delete(self, key: str) -> None:
        """See `Objects.delete`."""
        async with self._answers("delete", key) as (client, _):
            await client.delete_object(Bucket=self._bucket, Key=self._name(key), **self._files.req_kw)

    async def close(self) -> None:
        """See `Objects.close`; the next call connects again."""
        client, self._client = self._client, None
        if client is not None and self._loop is asyncio.get_running_loop():  # another loop has died with a fork
            self._forget.detach()
            await client.close()

    def __repr__(self) -> str:
        return f"<S3Objects {self.url}>"

    def _name(self, key: str) -> str:
        return self._prefix + checked_key(key, self.url)

    async def _connected(self) -> Any:
        if self._loop is not (loop := asyncio.get_running_loop()):  # the first, or another after a fork
            self._loop, self._connecting, self._client = loop, asyncio.Lock(), None
        async with self._connecting:
            if self._client is None:
                from botocore.handlers import add_expect_header

                self._files = self._file_system(
                    **self._options,
                    asynchronous=True,
                    skip_instance_cache=True,
                    use_listings_cache=False,
                )
                await self._files.set_session()
                self._client = await self._files.get_s3(self._bucket)
                # "Expect: 100-continue" costs a round trip for each write, and a server that never says "continue"
                # would be waited for without an end
                self._client.meta.events.unregister("before-call.s3", add_expect_header)
                self._forget = weakref.finalize(self, _forgotten, self._client, loop, os.getpid())
                self._forget.atexit = False  # then `_close_all` also waits
                _in_use.add(self)
        return self._client

    @contextlib.asynccontextmanager
    async def _answers(
        self, action: str, key: str, longest: float | None = None
    ) -> AsyncIterator[tuple[Any, Pace]]:
        """The client, and the pace of one request to it; what it raises becomes an error of tstore."""
        from tstore.storage.s3.session import closing_responses

        pace: Pace | None = None
        try:
            with closing_responses():
                client = await self._connected()
                async with Pace(longest or self._silence) as pace:
                    yield client, pace
        except TStoreError:
            raise
        except Exception as error:
            if isinstance(error, TimeoutError) and pace is not None:
                raise Unavailable(f"{self.url}: can't {action} {key!r}: {pace.lost}") from error
            raise explained(self.url, action, key, error) from error

    @contextlib.contextmanager
    def _understood(self, what: str) -> Iterator[None]:
        """Raises `Corrupt` where an answer lacks something, or has what can't be."""
        try:
            yield
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise Corrupt(
                f"{self.url}: {what}: the server's answer can't be understood ({sanitize(repr(error))}); check "
                "endpoint_url"
            ) from error

    async def _head(self, key: str) -> Any:
        async with self._answers("look at", key) as (client, _):
            return await client.head_object(Bucket=self._bucket, Key=self._name(key), **self._files.req_kw)

    async def _size(self, key: str) -> int:
        answer = await self._head(key)
        with self._understood(key):
            return int(answer["ContentLength"])

    async def _read(self, key: str, asked: str | None, longest: int, most: int) -> bytes:
        """The body of a whole object, or of a range of at most `longest` bytes."""
        async with self._answers("read", key) as (client, pace):
            span = {} if asked is None else {"Range": asked}
            name = self._name(key)
            try:
                answer = await client.get_object(Bucket=self._bucket, Key=name, **span, **self._files.req_kw)
            except Exception as error:
                if status_of(error) == 416:
                    raise _BeyondTheEnd from error
                raise
            pace.begin()
            async with answer["Body"] as body:
                told = int(answer.get("ContentLength", 0))
                if asked is not None:
                    start, _, stop = asked.removeprefix("bytes=").partition("-")
                    if start or told > int(stop):  # all of a short object answers a suffix as well
                        self._check_range(key, answer, int(start) if start else None)
                if told > longest < most:
                    raise Corrupt(f"{self.url}: {told} bytes of {key} came where {longest} were asked for")
                return await self._whole(key, body, told, min(longest, most), pace)

    async def _whole(self, key: str, body: Any, told: int, most: int, pace: Pace) -> bytes:
        limit = bound(key, most)
        with io.BytesIO() as found:  # closed, it leaves nothing in the traceback of an error
            async with Room() as room:
                while told <= limit and (piece := await body.read(_PIECE)):
                    pace.moved(len(piece))
                    size = found.tell() + len(piece)
                    if found.tell() < HEAD <= size:
                        limit = bound(key, most, found.getvalue() + piece[:HEAD])
                    told = max(told, size)
                    if not room.has(len(piece)):
                        await pace.pause(room.wait())
                    found.write(piece)
            if told > limit:
                raise overlong(f"{self.url}: {key}", limit)
            return found.getvalue()

    async def _fill(self, key: str, body: Any, offset: int, buffers: Buffers, size: int, pace: Pace) -> None:
        done = 0
        for buffer in buffers:
            view = memoryview(buffer)
            at = 0
            while at < len(view):
                piece = await body.read(min(_PIECE, len(view) - at))
                if not piece:
                    raise self._short(key, offset, size, done)
                pace.moved(len(piece))
                view[at : at + len(piece)] = piece
                at += len(piece)
                done += len(piece)

    def _check_range(self, key: str, answer: Any, start: int | None) -> None:
        """A server that ignores ranges answers 200 and sends everything."""
        status, found = answer["ResponseMetadata"]["HTTPStatusCode"], str(answer.get("ContentRange", ""))
        if status != 206 or (start is not None and not found.startswith(f"bytes {start}-")):
            raise Corrupt(
                f"{self.url}: the server sent another range of {key} than it was asked for (status {status}, "
                f"{found or 'no Content-Range'}); it can't be used for a store"
            )

    def _short(self, key: str, offset: int, size: int, done: int) -> Corrupt:
        return Corrupt(
            f"{self.url}: {key} is cut short: {size} bytes expected at {offset}, {done} are there; "
            "restore the object from a copy of the store"
        )


_in_use: weakref.WeakSet[S3Objects] = weakref.WeakSet()


def _forgotten(client: Any, loop: asyncio.AbstractEventLoop, process: int) -> None:
    """Closes what nobody closed, on its own loop; a forked child leaves its copy alone."""
    if process == os.getpid() and not loop.is_closed():
        loop.call_soon_threadsafe(lambda: loop.create_task(client.close()))


@atexit.register
def _close_all() -> None:
    for objects in list(_in_use):  # aiohttp complains of what is open when the interpreter ends
        wait_io(objects.close())


class _BeyondTheEnd(NotFound):
    """The range begins behind the object's last byte."""


def _age(answer: Any, written: Any) -> float | None:
    """Seconds between the two times of the server's clock."""
    date = answer["ResponseMetadata"].get("HTTPHeaders", {}).get("date")
    if date is None or written is None:
        return None
    return max(0.0, float((email.utils.parsedate_to_datetime(date) - written).total_seconds()))
