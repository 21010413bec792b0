"""`tstore bench`: real processes on real storage, which is left empty."""

from __future__ import annotations

import json
import secrets
from pathlib import Path

import pytest

import tstore
from tests.support import moto_server
from tstore.cli import main
from tstore.core.storage.connect import connect
from tstore.errors import InvalidArgument, NotAStore
from tstore.lab.hosts.benchmark import bench
from tstore.service.server import Access, Server


def test_the_report_is_complete_and_nothing_is_left(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    place = tmp_path / "place"
    options = ["--hosts", "3", "--size", "1", "--rounds", "2", "--seconds", "0.3"]
    assert main(["bench", str(place), *options, "--json"]) == 0
    report = json.loads(capfd.readouterr().out)
    assert (report["store"], report["hosts"], report["durability"]) == (str(place), 3, "fsync")
    assert abs(report["bytes"] - 1_000_000) < 200_000
    assert [len(report[f"{what}_seconds"]) for what in ("save", "restore")] == [2, 2]
    assert 0 < report["median_seconds"] <= report["p99_seconds"]
    assert report["commits"] >= 3  # each host makes one at least, however slow the machine is
    assert (report["ok"], report["lost"], report["differing"], report["removed"]) == (True, 0, 0, True)
    assert not place.exists()
    assert main(["bench", str(place), *options, "--durability", "none"]) == 0
    out, err = capfd.readouterr()
    assert "3 hosts × 3" in out.splitlines()[0]
    assert "acknowledged commits and every checkpoint were read back" in out.splitlines()[-1]
    assert err == ""


async def test_a_nonempty_folder_is_refused_and_left_unchanged(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("dear")
    with pytest.raises(NotAStore):
        await bench(str(tmp_path), hosts=2, size=1)
    assert [p.name for p in tmp_path.iterdir()] == ["mine"]
    with pytest.raises(InvalidArgument, match="not shared between processes"):
        await bench("memory://bench", hosts=2, size=1)


async def test_a_server_refuses_to_remove_commits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    token = secrets.token_urlsafe(32)
    monkeypatch.setenv("TSTORE_TOKEN_127_0_0_1", token)
    async with Server(tmp_path, access=Access({token: "admin"})) as server:
        report = await bench(server.url, hosts=2, size=1, rounds=1, seconds=0.2)
    assert (report["ok"], report["removed"]) == (True, False)
    async with await tstore.open(tmp_path, "r") as store:
        assert (await store.verify()).ok


async def test_object_storage_is_left_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    with moto_server.running() as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        url = f"s3://{moto_server.BUCKET}/bench"
        report = await bench(url, hosts=2, size=1, rounds=1, seconds=0.2)
        assert (report["store"], report["ok"], report["removed"]) == (url, True, True)
        left = connect(url)
        assert await left.empty()
        await left.close()
