"""The table of scopes in `examples/guides/http_server.md`, row by row, against a server.

The expected rights are written out here on purpose, not taken from the server: this test is their specification.
"""

from __future__ import annotations

from pathlib import Path

import aiohttp
import msgspec
import numpy as np
import pytest

import tstore
from tests.support.forging import placed_in
from tstore import Keep
from tstore.core.format.layout import archive_key, commit_key, version_of
from tstore.core.format.objects.encoding import Archive, decode, encode
from tstore.core.format.objects.records import Record
from tstore.core.tags import move_tag, set_tag
from tstore.errors import Denied, TStoreError
from tstore.lab.simulation.scenario import override_constants
from tstore.service.server import Access, Server

TOKENS = {scope: f"{scope}-token-of-the-test" for scope in ("read", "write", "admin")}
ACCESS = Access({token: scope for scope, token in TOKENS.items()})
SCOPES = list(TOKENS)
CREATE = {"If-None-Match": "*"}


async def opened(server: Server, scope: str, mode: str = "r+") -> tstore.Store:
    return await tstore.open(server.url, mode, storage_options={"token": TOKENS[scope]})  # type: ignore[arg-type]


async def asked(server: Server, scope: str, method: str, key: str, body: bytes = b"", **more: str) -> int:
    headers = {"Authorization": f"Bearer {TOKENS[scope]}", **more}
    async with aiohttp.request(method, f"{server.url}/{key}", data=body or None, headers=headers) as response:
        return response.status


async def filled(folder: Path) -> list[str]:
    """Save three steps, and return the keys of the store."""
    for step in range(3):
        await tstore.save(folder, {"w": np.arange(2000.0) + step}, step)
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("scope", SCOPES)
async def test_every_scope_reads_and_lists(scope: str, tmp_path: Path) -> None:
    names = await filled(tmp_path)
    (tmp_path / "txn/under-way").mkdir()
    (tmp_path / "txn/under-way/pack-0").write_bytes(b"abc")
    async with Server(tmp_path, access=ACCESS) as server:
        assert [await asked(server, scope, "GET", name) for name in names] == [200] * len(names)
        assert await asked(server, scope, "GET", "txn/under-way/pack-0") == 200
        assert await asked(server, scope, "GET", "?list") == 200
        async with await opened(server, scope) as store:
            assert (await store.verify()).ok


@pytest.mark.parametrize("scope", SCOPES)
async def test_write_commits_and_moves_tags_and_the_hint(scope: str, tmp_path: Path) -> None:
    await filled(tmp_path)
    async with Server(tmp_path, access=ACCESS) as server, await opened(server, scope) as store:
        expected = 403 if scope == "read" else 204
        assert await asked(server, scope, "PUT", "latest", b"2") == expected
        assert await asked(server, scope, "PUT", "txn/of-another/alive-1", b"{}") in (expected, 422)
        assert await asked(server, scope, "DELETE", "txn/of-another/alive-1") == expected
        if scope == "read":
            with pytest.raises(Denied):
                await tstore.save(store, {"w": np.arange(3.0)}, 7)
            with pytest.raises(Denied):
                await set_tag(store, "best", 1)
        else:
            await tstore.save(store, {"w": np.arange(3.0)}, 7)
            assert await tstore.steps(store) == [0, 1, 2, 7]
            await set_tag(store, "best", 1)
            await move_tag(store, "best", 2)
            assert (await store.tags())["best"] == 2


@pytest.mark.parametrize("scope", SCOPES)
async def test_write_makes_the_store_where_there_is_none(scope: str, tmp_path: Path) -> None:
    async with Server(tmp_path, access=ACCESS) as server:
        if scope == "read":
            with pytest.raises(Denied):
                await opened(server, scope, "x")
        else:
            await (await opened(server, scope, "x")).close()
    assert (tmp_path / "tstore.json").exists() == (scope != "read")


@pytest.mark.parametrize("scope", SCOPES)
async def test_no_scope_replaces_or_removes_committed_objects(scope: str, tmp_path: Path) -> None:
    names = [name for name in await filled(tmp_path) if name != "latest"]
    before = {name: (tmp_path / name).read_bytes() for name in names}
    async with Server(tmp_path, access=ACCESS) as server:
        for name in names:
            assert await asked(server, scope, "PUT", name, b"other") in (403, 422, 428)
            assert await asked(server, scope, "PUT", name, b"other", **CREATE) in (403, 412)
            assert await asked(server, scope, "DELETE", name) == 403
        with pytest.raises(Denied):
            await (await opened(server, scope)).repair(void_intact=[2])
    assert {name: (tmp_path / name).read_bytes() for name in names} == before


@pytest.mark.parametrize("scope", SCOPES)
async def test_admin_restores_what_is_damaged_with_the_committed_bytes(scope: str, tmp_path: Path) -> None:
    wide = {"w": np.arange(2000.0), "wide": {str(i): np.full(2, i) for i in range(400)}}
    await tstore.save(tmp_path, wide, 1)
    [pack] = tmp_path.glob("txn/*/pack-*")
    [manifest] = tmp_path.glob("txn/*/manifest-*")
    expired = tmp_path / "txn/of-nobody/pack-0"
    expired.parent.mkdir()
    expired.write_bytes(b"abc")
    async with Server(tmp_path, access=ACCESS) as server:
        refused = {"read": 403, "write": 428}.get(scope)
        for path in (pack, manifest):
            data, name = path.read_bytes(), path.relative_to(tmp_path).as_posix()
            for wrong in (data[:-1], bytes([data[0] ^ 1]) + data[1:], b""):
                path.write_bytes(wrong)
                assert await asked(server, scope, "PUT", name, wrong) == (refused or 422)
                assert path.read_bytes() == wrong
                assert await asked(server, scope, "PUT", name, data) == (refused or 204)
                assert path.read_bytes() == (wrong if refused else data)
            path.write_bytes(data)
        assert await asked(server, scope, "PUT", "txn/of-nobody/pack-0", b"abc") == (refused or 403)
        assert expired.read_bytes() == b"abc"


@pytest.mark.parametrize("scope", SCOPES)
async def test_no_scope_stores_a_root_that_the_server_would_not_make(scope: str, tmp_path: Path) -> None:
    await filled(tmp_path)
    async with Server(tmp_path, access=ACCESS) as server:
        status = await asked(server, scope, "PUT", f"roots/{64:020d}", b"forged", **CREATE)
        assert status == (403 if scope == "read" else 422)


@pytest.mark.parametrize("scope", SCOPES)
async def test_admin_collects(scope: str, tmp_path: Path) -> None:
    await filled(tmp_path)
    async with Server(tmp_path, access=ACCESS) as server, await opened(server, scope) as store:
        if scope != "admin":
            with pytest.raises(Denied):
                await store.collect(Keep(last=1))
            assert await tstore.steps(tmp_path) == [0, 1, 2]
        else:
            await store.collect(Keep(last=1))
            assert await tstore.steps(tmp_path) == [2]


async def archived_and_repaired(folder: Path) -> Record:
    """Fill a store with archives of four records each and a voided version; return its newest record."""
    for step in range(12):
        await tstore.save(folder, {"w": np.arange(9) + step}, step)
    store = await tstore.open(folder)
    for _ in range(2):  # the first collection archives records, the second one deletes their objects
        await store.collect(None)
    await tstore.save(store, {"w": np.arange(9)}, 12)
    await store.repair(void_intact=[(await store.snapshot()).version])
    assert not (folder / commit_key(1)).exists()
    newest = await (await tstore.open(folder)).log.reader.newest()
    return decode((folder / commit_key(newest)).read_bytes(), Record)


@pytest.mark.parametrize("scope", SCOPES)
async def test_no_scope_changes_archives_or_what_a_repair_voided(scope: str, tmp_path: Path) -> None:
    with override_constants(ARCHIVE_EVERY=4, ROOT_EVERY=4):
        newest = await archived_and_repaired(tmp_path)
        before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        archive = before[tmp_path / archive_key(4)]
        [saved] = tmp_path.glob("damaged/*")
        kept, voided = saved.relative_to(tmp_path).as_posix(), commit_key(version_of(saved.name))
        other, version = decode(archive, Archive).records[1], newest.base + 2
        repair = msgspec.structs.replace(newest, base=version - 1, tags=(), dropped=(), metadata={"voided": [8]})
        void = msgspec.structs.replace(repair, void=True, metadata={"replaced": ["00" * 16], "resumes": 12})
        requests = [
            ("PUT", archive_key(4), archive, {}),
            ("PUT", archive_key(4), encode(Archive(4, (other,) * 4)), CREATE),
            ("PUT", archive_key(16), encode(Archive(16, (other,) * 4)), CREATE),
            ("PUT", archive_key(1 << 40), encode(Archive(1 << 40, (other,) * 4)), CREATE),
            ("DELETE", archive_key(4), b"", {}),
            ("PUT", commit_key(2), other, CREATE),
            ("PUT", commit_key(3), other, CREATE),
            ("PUT", voided, before[saved], {}),
            ("DELETE", voided, b"", {}),
            ("PUT", kept, b"other", {}),
            ("PUT", f"damaged/{3:020d}-{'0' * 32}", b"other", CREATE),
            ("DELETE", kept, b"", {}),
        ]
        if scope != "admin":  # who may copy the store with its repairs
            for forged in (repair, void):
                requests.append(("PUT", commit_key(version), placed_in(tmp_path, version, encode(forged)), CREATE))
        async with Server(tmp_path, access=ACCESS) as server:
            for method, key, body, headers in requests:
                assert await asked(server, scope, method, key, body, **headers) in (403, 412, 422, 428)
        assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
        assert (await (await tstore.open(tmp_path)).verify()).ok


@pytest.mark.parametrize("scope", SCOPES)
async def test_admin_copies_a_collected_store(scope: str, tmp_path: Path) -> None:
    await filled(tmp_path / "source")
    async with await tstore.open(tmp_path / "source") as store:
        await store.collect(Keep(last=1))
    async with Server(tmp_path / "copy", access=ACCESS) as server:
        options = {"token": TOKENS[scope]}
        if scope == "admin":
            await tstore.copy(tmp_path / "source", server.url, storage_options=options)
            assert await tstore.steps(tmp_path / "copy") == [2]
        else:
            with pytest.raises(Denied, match=r"needs a token with the scope (write|admin)"):
                await tstore.copy(tmp_path / "source", server.url, storage_options=options)


@pytest.mark.parametrize("scope", SCOPES)
async def test_only_admin_stores_a_record_with_missing_objects(scope: str, tmp_path: Path) -> None:
    await filled(tmp_path)
    record = decode((tmp_path / f"commits/{3:020d}").read_bytes(), Record)
    for path in list(tmp_path.glob(f"txn/{record.transaction}/*")):
        path.unlink()
    (tmp_path / f"commits/{3:020d}").unlink()
    (tmp_path / "latest").unlink(missing_ok=True)
    data = placed_in(tmp_path, 3, encode(msgspec.structs.replace(record, message="again")))
    async with Server(tmp_path, access=ACCESS) as server:
        status = await asked(server, scope, "PUT", f"commits/{3:020d}", data, **CREATE)
        assert status == (201 if scope == "admin" else 403)


@pytest.mark.parametrize("scope", SCOPES)
async def test_read_only_bounds_every_scope(scope: str, tmp_path: Path) -> None:
    await filled(tmp_path)
    async with Server(tmp_path, mode="r", access=ACCESS) as server, await opened(server, scope) as store:
        with pytest.raises(TStoreError, match="served read-only"):
            await tstore.save(store, {"w": np.arange(3.0)}, 7)
