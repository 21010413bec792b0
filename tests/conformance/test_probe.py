"""Creating a store fails if its storage can't keep the promises of a store."""

from __future__ import annotations

import asyncio
import json
import uuid
from pathlib import Path

import numpy as np
import pytest

import tstore
import tstore.sync
from tests.support.broken_storage import LastOneStays, LooksThenWrites, Overwrites
from tests.support.file_systems import Exclusive, register
from tstore.cli import main
from tstore.core.storage.connect import connect
from tstore.core.storage.memory import MemoryStorage
from tstore.core.storage.objects import Buffers, Durability, PutMode
from tstore.core.storage.remote import RemoteStorage
from tstore.errors import AlreadyExists, Denied, InvalidArgument, NotFound, Unavailable
from tstore.lab.conformance.faults import Faults


class Forgets(MemoryStorage):
    """Responds to creates, but stores nothing."""

    async def put(
        self, key: str, buffers: Buffers, mode: PutMode, durability: Durability = Durability.FSYNC
    ) -> None:
        return None


@pytest.mark.parametrize("mode", ["x", "a"])
@pytest.mark.parametrize("liar", [Overwrites, LooksThenWrites, LastOneStays, Forgets])
async def test_a_broken_storage_is_refused_and_left_empty(liar: type[MemoryStorage], mode: tstore.Mode) -> None:
    name = uuid.uuid4().hex
    with pytest.raises(Denied, match=r"does not create exclusively.*two jobs.*Use a local folder") as raised:
        await tstore.save(await tstore.open(RemoteStorage(liar(name)), mode), {"x": 1}, 1)
    assert name in str(raised.value)
    assert await MemoryStorage(name).empty()


async def test_an_honest_storage_is_asked_little() -> None:
    counted = Faults(MemoryStorage(uuid.uuid4().hex))
    await tstore.open(counted, "x")
    assert len(counted.calls) <= 12
    assert await counted.list("") == ["tstore.json"]
    with pytest.raises(AlreadyExists, match="already a store"):
        await tstore.open(counted, "x")
    seen = len(counted.calls)
    await tstore.open(counted)
    assert len(counted.calls) == seen + 1


async def test_of_eight_concurrent_creators_of_a_store_one_wins() -> None:
    url = f"memory://{uuid.uuid4().hex}"
    made = await asyncio.gather(*[tstore.open(url, "x") for _ in range(8)], return_exceptions=True)
    stores = [m for m in made if isinstance(m, tstore.Store)]
    assert len(stores) == 1
    assert all(isinstance(m, AlreadyExists) for m in made if not isinstance(m, tstore.Store))
    assert (await tstore.open(url)).uuid == stores[0].uuid


async def test_a_lost_reply_during_the_creation_of_a_store_is_no_failure() -> None:
    faulty = Faults(MemoryStorage(uuid.uuid4().hex))
    faulty.lose_reply("create", "tstore.json", times=8)
    store = await tstore.open(faulty, "x")
    assert (await tstore.open(faulty)).uuid == store.uuid


async def test_a_storage_that_fails_every_create_is_unavailable() -> None:
    faulty = Faults(MemoryStorage(uuid.uuid4().hex))
    faulty.fail("create", "tstore.json", times=8)
    with pytest.raises(Unavailable):
        await tstore.open(faulty, "x")
    assert await faulty.empty()


# ---- file systems of fsspec


class Careless(Exclusive):
    """Local files whose create overwrites."""

    protocol = "careless"

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: object) -> None:
        super().pipe_file(path, value)


@pytest.fixture(autouse=True, scope="module")
def file_systems() -> None:
    register(Exclusive, Careless)


async def test_a_file_system_that_creates_exclusively_is_written_to(tmp_path: Path) -> None:
    async with await tstore.open(f"exclusive://{tmp_path}/s", "x") as store:
        await tstore.save(store, {"a": [1, 2]}, step=1)
    await tstore.save(f"exclusive://{tmp_path}/s", {"a": [1, 2, 3]}, step=2)
    async with await tstore.open(tmp_path / "s", "r") as store:
        assert (await store.verify()).ok
        assert await tstore.restore(store) == {"a": [1, 2, 3]}


@pytest.mark.parametrize("mode", ["x", "a"])
@pytest.mark.parametrize("scheme", ["local", "careless"])
async def test_a_file_system_that_does_not_is_refused(tmp_path: Path, scheme: str, mode: tstore.Mode) -> None:
    with pytest.raises(Denied, match="does not create exclusively"):
        await tstore.save(await tstore.open(f"{scheme}://{tmp_path}/s", mode), {"x": 1}, 1)
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == []
    async with await tstore.open(tmp_path / "s", "x"):  # the folder is still usable by one that does
        pass


async def test_a_store_on_such_a_file_system_is_readable(tmp_path: Path) -> None:
    tree = {"a": [1, 2, 3]}
    async with await tstore.open(tmp_path) as store:
        await tstore.save(store, tree, step=7)
    async with await tstore.open(f"local://{tmp_path}", "r") as store:
        assert await tstore.restore(store) == tree
        assert (await store.verify()).ok
    async with await tstore.open(f"local://{tmp_path}", "a") as store:
        with pytest.raises(Denied, match="exclusively"):
            await tstore.save(store, tree, step=8)
    await tstore.open(f"careless://{tmp_path}", "r")
    with pytest.raises(Denied, match="exclusively"):
        await tstore.open(f"careless://{tmp_path}", "a")
    async with await tstore.open(tmp_path, "r") as store:
        assert [c.version async for c in store.history()] == [1]


async def test_an_unknown_scheme_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"gopher.*s3://"):
        await tstore.open("gopher://x")
    with pytest.raises(InvalidArgument, match="Install adlfs"):
        await tstore.open("abfs://container/x")
    with pytest.raises(NotFound):
        await tstore.open(f"local://{tmp_path}/none", "r")
    assert connect("ftp://user:geheim@host/x").url == "ftp://host/x"


# ---- the command


def probed(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["probe", *arguments])
    out, err = capsys.readouterr()
    return code, out, err


def test_the_command_shows_its_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = probed(capsys, str(tmp_path / "s"))
    assert (code, err) == (0, "")
    assert "holds" in out
    assert "of racing creates of one key exactly one wins" in out
    assert out.splitlines()[-1].startswith(f"{tmp_path}/s: no fault found")
    assert list(tmp_path.iterdir()) == []
    assert probed(capsys, str(tmp_path / "a" / "b"))[0] == 0
    assert list(tmp_path.iterdir()) == []  # none of the folders it created


def test_the_command_reports_that_memory_is_private_to_a_process(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = probed(capsys, "memory://probed")
    assert (code, err) == (0, "")
    assert out.splitlines()[-1].startswith("memory://probed: no fault found")


def test_the_command_reports_a_broken_storage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = probed(capsys, f"careless://{tmp_path}/s", "--json")
    report = json.loads(out)
    assert (code, report["ok"]) == (1, False)
    outcomes = {c["check"]: c["outcome"] for c in report["checks"]}
    assert outcomes["create_never_replaces"] == outcomes["one_winner"] == "fails"
    assert outcomes["ranges"] == outcomes["listing"] == outcomes["long_lists"] == "holds"
    assert report["fails"] == sum(o == "fails" for o in outcomes.values())


def test_the_command_refuses_an_unknown_scheme(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = probed(capsys, "gopher://x")
    assert (code, out) == (2, "")
    assert err.startswith("tstore: gopher://x: unknown scheme")


@pytest.mark.parametrize("command", ["probe", "bench", "ls"])
def test_a_url_with_one_slash_makes_no_folder(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([command, "s3:/bucket/x"]) == 2
    assert "'s3:/bucket/x': a URL has two slashes after s3:, as s3:// (or pass ./s3:/" in capsys.readouterr().err
    with pytest.raises(InvalidArgument, match="two slashes"):
        tstore.sync.save("s3:/bucket", {"w": np.zeros(2)}, 1)
    assert not list(tmp_path.iterdir())
    assert tstore.sync.save("./s3:/bucket", {"w": np.zeros(2)}, 1) == 1
