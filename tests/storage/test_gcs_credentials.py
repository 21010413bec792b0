"""Credentials for Google Cloud Storage, how they are renewed, and proxies."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace

import google.auth.compute_engine
import pytest
import trustme
from aiohttp import web
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from google.auth.compute_engine import _metadata

from tests.support import web_server
from tests.support.gcs_endpoint import Endpoint, Fault, Wrong, at
from tests.support.thresholds import Thresholds
from tstore.core.storage.gcs.store import GcsStorage
from tstore.core.storage.objects import Entry, PutMode
from tstore.errors import (
    Denied,
    InvalidArgument,
    TemporaryFailure,
    TStoreError,
    Unreachable,
)

CREATE = PutMode.CREATE
SECRET = "ya29.secret-access-token"


@pytest.fixture
async def endpoint() -> AsyncIterator[Endpoint]:
    made = Endpoint()
    async with made.running():
        yield made


async def entries(objects: GcsStorage) -> list[Entry]:
    return [entry async for page in objects.pages("") for entry in page.entries]


# ---- credentials


async def refused(endpoint: Endpoint, token: object) -> str:
    """Return the message of `Denied` for a request with this token."""
    objects = GcsStorage(f"gs://{endpoint.new_bucket()}/s", token=token, endpoint_url=endpoint.url)
    with pytest.raises(Denied) as raised:
        await objects.get("k")
    await objects.close()
    assert SECRET not in f"{raised.value!r} {raised.value.__cause__!r} {objects!r}"
    return str(raised.value)


async def test_an_access_token_is_sent_with_each_request(endpoint: Endpoint) -> None:
    endpoint.token = SECRET
    objects = GcsStorage(f"gs://{endpoint.new_bucket()}", token=SECRET, endpoint_url=endpoint.url)
    await objects.put("k", [b"x"], CREATE)
    assert await objects.get("k") == b"x"
    assert [e.key for e in await entries(objects)] == ["k"]
    await objects.delete("k")
    assert endpoint.shown == [f"Bearer {SECRET}"] * 4
    await objects.close()


async def test_an_expired_token_is_denied_with_advice(endpoint: Endpoint) -> None:
    endpoint.token = "another"
    assert "refused the credentials as wrong or expired: Invalid Credentials; log in again" in await refused(
        endpoint, SECRET
    )
    assert "requires credentials: Invalid Credentials; log in (gcloud" in await refused(endpoint, None)


async def test_a_token_does_not_follow_a_redirect(endpoint: Endpoint) -> None:
    other = Endpoint()
    async with other.running():
        endpoint.faults = at(Fault(Wrong.REFUSED, 302, {"Location": f"{other.url}/x"}), "GET")
        objects = GcsStorage(f"gs://{endpoint.new_bucket()}", token=SECRET, endpoint_url=endpoint.url)
        with pytest.raises(TStoreError):
            await objects.get("k")
        assert other.shown == [None]
        await objects.close()


def service_account(folder: Path, token_url: str) -> Path:
    """Write a credentials file whose access tokens come from this URL."""
    key = rsa.generate_private_key(65537, 2048).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    told = {
        "type": "service_account",
        "project_id": "p",
        "client_email": "writer@p.iam.gserviceaccount.com",
        "token_uri": token_url,
        "private_key": key.decode(),
    }
    path = folder / "service-account.json"
    path.write_text(json.dumps(told))
    return path


async def test_a_service_account_renews_its_token(endpoint: Endpoint, tmp_path: Path) -> None:
    path = service_account(tmp_path, f"{endpoint.url}/token")
    endpoint.token = "first"
    objects = GcsStorage(f"gs://{endpoint.new_bucket()}", token=str(path), endpoint_url=endpoint.url)
    await objects.put("k", [b"x"], CREATE)
    endpoint.token = "second"  # the first is revoked
    assert await asyncio.gather(*[objects.get("k") for _ in range(5)]) == [b"x"] * 5
    assert [asked for asked in endpoint.requests if asked == "POST /token"] == ["POST /token"] * 2
    await objects.close()


class TokenService:
    """Issues access tokens as a service account's token service and as a metadata server; can fail."""

    def __init__(self) -> None:
        self.seconds = 3600
        self.status = 200
        self.issued = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.url = ""

    async def respond(self, request: web.Request) -> web.Response:
        flavor = {"Metadata-Flavor": "Google"}
        if not request.path.endswith("/token"):
            return web.json_response({"email": "writer@p", "scopes": [], "aliases": []}, headers=flavor)
        await self.gate.wait()
        if self.status != 200:
            return web.json_response({"error": "failed"}, status=self.status, headers=flavor)
        self.issued += 1
        token = {"access_token": f"token-{self.issued}", "expires_in": self.seconds, "token_type": "Bearer"}
        return web.json_response(token, headers=flavor)


@pytest.fixture
async def tokens() -> AsyncIterator[TokenService]:
    service = TokenService()
    async with web_server.serving(service.respond) as service.url:
        yield service
        service.gate.set()


@pytest.fixture(scope="module")
def no_pauses() -> Iterator[None]:
    """Remove the pauses of google.auth, also from renewals that are cancelled after a test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("google.auth._exponential_backoff.time", SimpleNamespace(sleep=lambda seconds: None))
        yield


@pytest.fixture(params=["service account", "metadata server"])
async def renewed(
    request: pytest.FixtureRequest,
    endpoint: Endpoint,
    tokens: TokenService,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    no_pauses: None,
) -> AsyncIterator[GcsStorage]:
    """A storage whose tokens come from `tokens`."""
    if request.param == "service account":
        token: object = str(service_account(tmp_path, f"{tokens.url}/token"))
    else:
        monkeypatch.setenv("GCE_METADATA_HOST", tokens.url.removeprefix("http://"))
        monkeypatch.setattr(_metadata, "_GCE_METADATA_HOST", tokens.url.removeprefix("http://"))
        token = google.auth.compute_engine.Credentials()
    objects = GcsStorage(f"gs://{endpoint.new_bucket()}", token=token, endpoint_url=endpoint.url)
    yield objects
    tokens.gate.set()
    await objects.close()


@pytest.mark.parametrize("failure", [503, 500, 429, 400, 403, "silent"])
async def test_a_token_is_used_until_it_expires(
    endpoint: Endpoint, tokens: TokenService, renewed: GcsStorage, failure: int | str
) -> None:
    tokens.seconds = 100  # google.auth wants another from 225 s before the end
    await renewed.put("k", [b"x"], CREATE)
    if failure == "silent":
        tokens.gate.clear()
    else:
        tokens.status = int(failure)
    for _ in range(5):
        assert await asyncio.wait_for(renewed.get("k"), 25) == b"x"
    assert endpoint.shown == ["Bearer token-1"] * 6


async def test_a_token_is_renewed_before_it_expires(
    endpoint: Endpoint, tokens: TokenService, renewed: GcsStorage
) -> None:
    tokens.seconds = 100
    await renewed.put("k", [b"x"], CREATE)
    tokens.seconds = 3600
    async with asyncio.timeout(60):
        while endpoint.shown[-1] != "Bearer token-2":
            await renewed.get("k")
    await renewed.get("k")
    assert tokens.issued == 2


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (503, TemporaryFailure),
        (500, TemporaryFailure),
        (504, TemporaryFailure),
        (429, TemporaryFailure),
        (400, Denied),
        (401, Denied),
        (403, Denied),
        (404, Denied),
    ],
)
async def test_a_token_service_that_fails_is_waited_for_if_it_may_recover(
    tokens: TokenService, renewed: GcsStorage, status: int, error: type[TStoreError]
) -> None:
    tokens.status = status
    with pytest.raises(error, match="credentials") as raised:
        await renewed.put("k", [b"x"], CREATE)
    assert isinstance(raised.value, TemporaryFailure) == (error is TemporaryFailure)
    tokens.status = 200
    await renewed.put("k", [b"x"], CREATE)


async def test_a_silent_token_service_costs_no_more_than_a_silent_server(
    tokens: TokenService, renewed: GcsStorage, monkeypatch: pytest.MonkeyPatch, thresholds: Thresholds
) -> None:
    thresholds(IDLE_SECONDS=0.2, CONNECT_SECONDS=0.1)
    tokens.gate.clear()
    async with asyncio.timeout(25):
        with pytest.raises(TemporaryFailure, match=r"credentials can't be obtained now .*silent"):
            await renewed.put("k", [b"x"], CREATE)
    tokens.gate.set()
    monkeypatch.undo()
    await renewed.put("k", [b"x"], CREATE)


async def test_no_credentials_are_sent_to_an_emulator(
    endpoint: Endpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = service_account(tmp_path, f"{endpoint.url}/token")
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(path))
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", endpoint.url.removeprefix("http://"))
    objects = GcsStorage(f"gs://{endpoint.new_bucket()}")
    await objects.put("k", [b"x"], CREATE)
    await objects.close()
    assert endpoint.shown == [None]


@pytest.mark.parametrize("given", ["missing", "no json", "not credentials"])
async def test_bad_credentials_of_the_environment_are_named(
    given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "login.json"
    if given != "missing":
        path.write_text("{" if given == "no json" else "{}")
    monkeypatch.delenv("STORAGE_EMULATOR_HOST", raising=False)
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(path))
    with pytest.raises(Denied, match=r"gs://bucket/s: no usable credentials .* correct GOOGLE_APPL"):
        await GcsStorage("gs://bucket/s").get("k")
    if given != "missing":
        with pytest.raises(Denied, match="no usable credentials"):
            await GcsStorage("gs://bucket/s", token=str(path)).get("k")
    else:
        with pytest.raises(InvalidArgument, match=r"the file .*login\.json"):
            await GcsStorage("gs://bucket/s", token=str(path)).get("k")


class Proxy:
    """A proxy that tunnels connections (CONNECT), or refuses them with a status."""

    def __init__(self) -> None:
        self.status = 200
        self.asked: list[str] = []
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        self.asked.append(head)
        writer.write(f"HTTP/1.1 {self.status} Told\r\n\r\n".encode())
        if self.status == 200:
            host, port = head.split(" ")[1].split(":")
            inner = await asyncio.open_connection(host, int(port))
            await asyncio.gather(self._pump(reader, inner[1]), self._pump(inner[0], writer))
        writer.close()

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await source.read(1 << 16):
                sink.write(data)
                await sink.drain()
        sink.close()


@pytest.fixture
async def proxy(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Proxy]:
    made = Proxy()
    listener = await asyncio.start_server(made.serve, "127.0.0.1", 0)
    made.url = f"127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    for name in ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "NO_PROXY", "no_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    yield made
    listener.close()


@contextlib.asynccontextmanager
async def over_tls(folder: Path) -> AsyncIterator[tuple[Endpoint, GcsStorage]]:
    authority, context = trustme.CA(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    authority.cert_pem.write_to_path(str(folder / "ca.pem"))
    endpoint = Endpoint()
    async with endpoint.running(context):
        objects = GcsStorage(
            f"gs://{endpoint.new_bucket()}", token=SECRET, endpoint_url=endpoint.url, ca_file=folder / "ca.pem"
        )
        yield endpoint, objects
        await objects.close()


@pytest.mark.parametrize("name", ["HTTPS_PROXY", "https_proxy", "ALL_PROXY"])
@pytest.mark.parametrize("form", ["http://{}", "{}", "http://user:pass@{}/"])
async def test_the_proxy_of_the_environment_is_used(
    tmp_path: Path, proxy: Proxy, monkeypatch: pytest.MonkeyPatch, name: str, form: str
) -> None:
    monkeypatch.setenv(name, form.format(proxy.url))
    async with over_tls(tmp_path) as (endpoint, objects):
        data = bytes(range(256)) * 4096
        await objects.put("k", [data], CREATE)
        room = bytearray(len(data))
        await objects.read("k", 0, [room], len(data))
        assert room == data
        assert proxy.asked
        assert all(
            asked.startswith(f"CONNECT {endpoint.url[8:]}") and SECRET not in asked for asked in proxy.asked
        )
        assert ("Proxy-Authorization: Basic" in proxy.asked[0]) == ("user" in form)
        assert endpoint.shown == [f"Bearer {SECRET}"] * 2


async def test_no_proxy_for_servers_that_need_none(
    tmp_path: Path, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", proxy.url)
    monkeypatch.setenv("NO_PROXY", "example.com,127.0.0.1")
    async with over_tls(tmp_path) as (_, objects):
        await objects.put("k", [b"x"], CREATE)
    assert not proxy.asked


@pytest.mark.parametrize(
    ("status", "error"), [(407, Denied), (403, Denied), (503, TemporaryFailure), (502, TemporaryFailure)]
)
async def test_the_refusal_of_a_proxy_is_named(
    tmp_path: Path, proxy: Proxy, monkeypatch: pytest.MonkeyPatch, status: int, error: type[TStoreError]
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", f"http://user:hidden@{proxy.url}")
    proxy.status = status
    async with over_tls(tmp_path) as (_, objects):
        with pytest.raises(error, match=rf"the proxy refused the connection with status {status} .*NO_PROXY") as r:
            await objects.get("k")
        monkeypatch.setenv("HTTPS_PROXY", "http://user:hidden@127.0.0.1:9")
        other = GcsStorage(objects.url, token=SECRET, endpoint_url="https://127.0.0.1:8")
        with pytest.raises(Unreachable, match="no connection to the proxy that HTTPS_PROXY") as u:
            await other.get("k")
        await other.close()
    for raised in (r, u):
        assert "hidden" not in f"{raised.value!r} {raised.value.__cause__!r}"


@pytest.mark.parametrize("value", ["socks5://user:hidden@host:1", "http://", "http://user:hidden@host:port"])
async def test_a_proxy_that_cannot_be_used_is_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", value)
    with pytest.raises(InvalidArgument, match="HTTPS_PROXY can't be used") as raised:
        await GcsStorage("gs://b/s", token=SECRET, endpoint_url="https://127.0.0.1:8").get("k")
    assert "hidden" not in str(raised.value)
