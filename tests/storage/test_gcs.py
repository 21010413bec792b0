"""Google Cloud Storage, on fake-gcs-server and on an endpoint with injected faults."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import trustme

import tstore
from tests.support import gcs, ports
from tests.support.gcs_endpoint import Endpoint, Fault, Wrong, at
from tests.support.processes import python
from tests.support.thresholds import Thresholds
from tstore.core.storage.gcs.store import GcsStorage
from tstore.core.storage.objects import Entry, PutMode
from tstore.core.storage.retry import RetryingStorage
from tstore.errors import (
    AlreadyExists,
    Corrupt,
    Denied,
    InvalidArgument,
    NotAStore,
    NotFound,
    StorageFull,
    TemporaryFailure,
    Throttled,
    TStoreError,
    Unavailable,
)

CREATE, REPLACE = PutMode.CREATE, PutMode.REPLACE


@pytest.fixture
async def endpoint() -> AsyncIterator[Endpoint]:
    made = Endpoint()
    async with made.running():
        yield made


@pytest.fixture
async def faulty(endpoint: Endpoint) -> AsyncIterator[GcsStorage]:
    objects = GcsStorage(f"gs://{endpoint.new_bucket()}/s", endpoint_url=endpoint.url)
    yield objects
    await objects.close()


@pytest.fixture(params=["fake-gcs-server", "endpoint"])
def server(request: pytest.FixtureRequest, emulator: str, endpoint: Endpoint) -> str:
    return emulator if request.param == "fake-gcs-server" else endpoint.url


@pytest.fixture
async def objects(server: str, endpoint: Endpoint) -> AsyncIterator[GcsStorage]:
    bucket = endpoint.new_bucket() if server == endpoint.url else gcs.new_bucket(server)
    made = GcsStorage(f"gs://{bucket}/path of/a store", endpoint_url=server)
    yield made
    await made.close()


async def entries(objects: GcsStorage, prefix: str = "") -> list[Entry]:
    return [entry async for page in objects.pages(prefix) for entry in page.entries]


# ---- promises of every object server


async def test_an_emulator_that_ignores_conditions_is_refused(tmp_path: Path) -> None:
    with gcs.lying_server(tmp_path) as liar:
        options = {"endpoint_url": liar}
        url = f"gs://{gcs.new_bucket(liar)}/s"
        for mode in ("x", "a"):
            with pytest.raises(Denied, match="does not create exclusively"):
                await tstore.save(await tstore.open(url, mode, storage_options=options), {"x": 1}, 1)
        with pytest.raises(NotAStore, match="has no tstore"):  # nothing of it remained
            await tstore.open(url, "r", storage_options=options)


async def test_reads_beyond_the_end_are_corrupt(faulty: GcsStorage) -> None:
    await faulty.put("k", [b"0123456789"], CREATE)
    for offset, size in [(8, 3), (10, 1), (99, 1)]:
        with pytest.raises(Corrupt, match=rf"{faulty.url}: k: expected bytes {offset} to .* but the object"):
            await faulty.read("k", offset, [bytearray(size)], size)


async def test_lists(objects: GcsStorage, server: str, thresholds: Thresholds) -> None:
    thresholds(_PAGE=10)
    other = GcsStorage(f"{objects.url}-2", endpoint_url=server)
    await other.put("not/ours", [b""], CREATE)
    await other.close()
    names = [*(f"many/{i}" for i in range(25)), *(f"at/{i}/x" for i in range(15)), "a/1", "a/b/2", "ab", "b%c d/é"]
    await asyncio.gather(*[objects.put(name, [name.encode()], CREATE) for name in names])
    for prefix in ("", "a", "a/", "many/", "at", "b%", "none"):
        listed = await entries(objects, prefix)
        assert [(e.key, e.size) for e in listed] == [
            (n, len(n.encode())) for n in sorted(names) if n.startswith(prefix)
        ]
        assert all(e.age is not None and 0 <= e.age < 100 for e in listed)
    for prefix in ("", "many/", "at/"):
        keys, folders = [], []
        async for page in RetryingStorage(objects).pages(prefix, "/"):
            keys += [entry.key for entry in page.entries]
            folders += page.folders
        rest = sorted(name[len(prefix) :] for name in names if name.startswith(prefix))
        assert keys == [prefix + name for name in rest if "/" not in name]
        assert folders == sorted({f"{prefix}{name.partition('/')[0]}/" for name in rest if "/" in name})


async def test_a_missing_bucket_is_named_by_every_call(server: str) -> None:
    objects = GcsStorage("gs://not-there/store", endpoint_url=server)
    for call in (
        objects.get("tstore.json"),
        objects.head("latest"),
        objects.read("pack", 0, [bytearray(1)], 1),
        objects.put("tstore.json", [b"{}"], CREATE),
        entries(objects),
    ):
        with pytest.raises(InvalidArgument, match="bucket not-there does not exist; check the URL"):
            await call
    await objects.close()


async def test_a_missing_object_needs_no_further_request(endpoint: Endpoint, faulty: GcsStorage) -> None:
    assert await faulty.head("k") is None
    with pytest.raises(NotFound):
        await faulty.get("k")
    assert len(endpoint.requests) == 2


async def test_a_missing_object_is_reported_without_the_permission_to_list(
    endpoint: Endpoint, faulty: GcsStorage
) -> None:
    faults = iter([Fault(Wrong.REFUSED, 404, reason="notFound"), Fault(Wrong.REFUSED, 403, reason="forbidden")])
    endpoint.faults = lambda request: next(faults)
    with pytest.raises(NotFound, match="k does not exist"):
        await faulty.get("k")


async def test_an_endless_listing_is_given_up(endpoint: Endpoint, faulty: GcsStorage) -> None:
    for name in "abc":
        await faulty.put(name, [b""], CREATE)
    endpoint.stuck = True
    with pytest.raises(Corrupt, match="repeats a page"):
        await entries(faulty)


async def test_replaceable_objects_are_not_cacheable(endpoint: Endpoint, faulty: GcsStorage) -> None:
    await faulty.put("latest", [b"1"], REPLACE)
    await faulty.put("commits/1", [b"1"], CREATE)
    [objects] = endpoint.buckets.values()
    assert {n: o.metadata.get("cacheControl") for n, o in objects.items()} == {
        "s/latest": "no-store",
        "s/commits/1": None,
    }


async def test_folder_placeholders_are_no_objects(endpoint: Endpoint, faulty: GcsStorage) -> None:
    [bucket] = endpoint.buckets
    await faulty.put("x", [b""], CREATE)
    for name in ("s/", "s/empty/"):
        endpoint.buckets[bucket][name] = endpoint.buckets[bucket]["s/x"]
    assert [e.key for e in await entries(faulty)] == ["x"]


# ---- faults


@pytest.mark.parametrize(
    ("status", "reason", "error"),
    [
        (403, "forbidden", Denied),
        (403, "rateLimitExceeded", Throttled),
        (403, "quotaExceeded", StorageFull),
        (429, "rateLimitExceeded", Throttled),
        (503, "backendError", TemporaryFailure),
    ],
)
async def test_the_reason_of_a_refusal_decides_its_kind_of_error(
    endpoint: Endpoint, faulty: GcsStorage, status: int, reason: str, error: type[TStoreError]
) -> None:
    fault = Fault(Wrong.REFUSED, status, {"Retry-After": "7"} if status in (403, 429) else {}, reason)
    for method, call in [
        ("GET", faulty.get("k")),
        ("GET", faulty.head("k")),
        ("GET", entries(faulty)),
        ("POST", faulty.put("k", [b"x"], CREATE)),
        ("DELETE", faulty.delete("k")),
    ]:
        endpoint.faults = at(fault, method)
        with pytest.raises(error, match=faulty.url) as raised:
            await call
        assert type(raised.value) is error
        if isinstance(raised.value, Throttled):
            assert raised.value.retry_after == 7
    assert len(endpoint.requests) == 5  # none is retried here


@pytest.mark.parametrize("wrong", [Wrong.REPLY_LOST, Wrong.REQUEST_LOST, Wrong.CUT, Wrong.REFUSED_LATE])
async def test_a_write_without_a_response_is_unavailable(
    endpoint: Endpoint, faulty: GcsStorage, wrong: Wrong
) -> None:
    endpoint.faults = at(Fault(wrong), "POST")
    with pytest.raises(Unavailable):
        await faulty.put("k", [b"x" * 100_000], CREATE)
    assert (await faulty.head("k") is None) == (wrong is Wrong.REQUEST_LOST)


async def test_a_create_repeated_by_the_server_succeeds(endpoint: Endpoint, faulty: GcsStorage) -> None:
    endpoint.faults = at(Fault(Wrong.REPEATED), "POST")
    await faulty.put("k", [b"x"], CREATE)
    for mine in (b"x", b"y"):  # even equal bytes count as another's
        with pytest.raises(AlreadyExists):
            await faulty.put("k", [mine], CREATE)


@pytest.mark.parametrize("wrong", [Wrong.REPLY_LOST, Wrong.REQUEST_LOST, Wrong.CUT])
async def test_a_read_without_a_response_is_unavailable(
    endpoint: Endpoint, faulty: GcsStorage, wrong: Wrong
) -> None:
    await faulty.put("k", [bytes(100_000)], CREATE)
    # a request on a closed kept connection is repeated, as reading twice is harmless
    for call in (faulty.get("k"), faulty.read("k", 0, [bytearray(100_000)], 100_000), faulty.head("k")):
        endpoint.faults = at(Fault(wrong), "GET", 2)
        with pytest.raises(Unavailable):
            await call
    endpoint.faults = at(Fault(wrong), "GET", 2)
    with pytest.raises(Unavailable):
        await entries(faulty)


async def test_bytes_changed_in_transit_are_detected(endpoint: Endpoint, faulty: GcsStorage) -> None:
    endpoint.faults = at(Fault(Wrong.DAMAGED), "POST", 2)
    with pytest.raises(Unavailable, match="crc32c"):  # a retry may succeed
        await faulty.put("k", [b"x" * 1000], CREATE)
    assert await faulty.head("k") is None
    endpoint.lax = True
    with pytest.raises(Corrupt, match="stored object is damaged"):
        await faulty.put("k", [b"x" * 1000], CREATE)


async def test_a_web_page_is_not_an_object(endpoint: Endpoint, faulty: GcsStorage) -> None:
    for method, call in [
        ("GET", faulty.get("k")),
        ("GET", faulty.head("k")),
        ("GET", faulty.read("k", 0, [bytearray(20)], 20)),
        ("GET", entries(faulty)),
        ("POST", faulty.put("k", [b"x"], CREATE)),
    ]:
        endpoint.faults = at(Fault(Wrong.PAGE), method)
        with pytest.raises(Corrupt, match=faulty.url):
            await call


async def test_a_silent_server_is_given_up(endpoint: Endpoint, faulty: GcsStorage, thresholds: Thresholds) -> None:
    thresholds(IDLE_SECONDS=0.1, CONNECT_SECONDS=1.0)
    for method, call in [("POST", faulty.put("k", [b"x"], CREATE)), ("GET", faulty.get("k"))]:
        endpoint.faults = at(Fault(Wrong.SILENT), method)
        with pytest.raises(Unavailable, match="silent"):
            await call


async def test_a_cancelled_call_leaves_the_session_usable(endpoint: Endpoint, faulty: GcsStorage) -> None:
    asked = asyncio.Event()

    def draw(request: Any) -> Fault:
        asked.set()
        return Fault(Wrong.SILENT)

    endpoint.faults = draw
    put = asyncio.create_task(faulty.put("k", [bytes(1 << 20)], CREATE))
    await asked.wait()
    put.cancel()
    with pytest.raises(asyncio.CancelledError):
        await put
    endpoint.faults = lambda request: None
    await faulty.put("k", [b"x"], CREATE)
    assert await faulty.get("k") == b"x"


async def test_a_wrong_endpoint_fails_at_once() -> None:
    with ports.refusing() as address:
        objects = GcsStorage("gs://bucket/s", endpoint_url=f"http://{address}")
        with pytest.raises(Unavailable, match="no connection"):
            await objects.get("tstore.json")
        await objects.close()


async def test_a_certificate_is_trusted_where_its_authority_is_named(tmp_path: Path) -> None:
    authority, context = trustme.CA(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    endpoint = Endpoint()
    async with endpoint.running(context):
        url = f"gs://{endpoint.new_bucket()}/s"
        objects = GcsStorage(url, endpoint_url=endpoint.url)
        with pytest.raises(Denied, match=r"certificate.*ca_file"):
            await objects.get("k")
        await objects.close()
        objects = GcsStorage(url, endpoint_url=endpoint.url, ca_file=tmp_path / "ca.pem")
        await objects.put("k", [b"x"], CREATE)
        assert await objects.get("k") == b"x"
        await objects.close()


# ---- options


async def test_the_billing_project_is_sent(endpoint: Endpoint) -> None:
    seen: list[str] = []
    endpoint.faults = lambda request: seen.append(request.query.get("userProject"))  # type: ignore[func-returns-value]
    for options in ({"requester_pays": "payer"}, {"requester_pays": True, "project": "payer"}, {"project": "p"}):
        objects = GcsStorage(f"gs://{endpoint.new_bucket()}", endpoint_url=endpoint.url, **options)  # type: ignore[arg-type]
        await objects.put("k", [b"x"], CREATE)
        await objects.close()
    assert seen == ["payer", "payer", None]
    with pytest.raises(InvalidArgument, match="needs project=…"):
        GcsStorage("gs://bucket", requester_pays=True)
    text = "Bucket is a requester pays bucket but no user project provided."  # Google's
    endpoint.faults = lambda request: Fault(Wrong.REFUSED, 400, reason=text)
    objects = GcsStorage(f"gs://{endpoint.new_bucket()}", endpoint_url=endpoint.url)
    with pytest.raises(InvalidArgument, match=r"lets requesters pay.*'requester_pays': …} with the project"):
        await objects.get("k")
    await objects.close()


@pytest.mark.parametrize("endpoint_url", ["nonsense", "http://", "http://user:secret@host", "http://host/?secret"])
def test_an_invalid_endpoint_url_is_refused(endpoint_url: str) -> None:
    with pytest.raises(InvalidArgument, match="gs://bucket/s: endpoint_url: ") as raised:
        GcsStorage("gs://bucket/s", endpoint_url=endpoint_url)
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize(
    "url", ["gs://", "gs:///x", "gs://user:secret@bucket/x", "gs://b?x", "gs://bucket/a/../b"]
)
def test_a_url_without_a_bucket_is_refused(url: str) -> None:
    with pytest.raises(InvalidArgument) as raised:
        GcsStorage(url)
    assert "secret" not in str(raised.value)


def test_gcsfs_is_loaded_only_for_gs() -> None:
    loaded = python("""
        import sys, tstore, tstore.sync
        tstore.sync.open("memory://x")
        print([name for name in ("gcsfs", "google.auth", "requests") if name in sys.modules])
    """)
    assert loaded == "[]\n"


@pytest.mark.parametrize("missing", ["gcsfs", "google_crc32c"])
def test_a_missing_package_is_named_with_the_command(missing: str) -> None:
    said = python(
        """
        import sys
        sys.modules[sys.argv[1]] = None
        import tstore.sync
        try:
            tstore.sync.open("gs://bucket/store")
        except tstore.errors.InvalidArgument as error:
            print(error)
        """,
        missing,
    )
    assert f"needs the package {missing}, which is not installed" in said
    assert "pip install 'tstore[gcs]'" in said
