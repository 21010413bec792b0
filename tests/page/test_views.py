"""The documents of the views: what they count, in which order, and what they would remove."""

from __future__ import annotations

import asyncio
import datetime
import html
import itertools
import json
import math
import re
import shlex
import shutil
import subprocess
import time
import tracemalloc
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlencode

import msgspec
import numpy as np
import pytest

import tstore
from tests.support import processes
from tests.support.forging import forged, placed_in
from tests.support.http_server import READ, WRITE, client_of, everybody
from tests.support.thresholds import Thresholds
from tstore.core.format.layout import commit_key
from tstore.core.maintenance.verify import VerifyReport
from tstore.core.storage.local.store import LocalStorage
from tstore.core.tags import drop_tag, set_tag
from tstore.service.page import Site
from tstore.service.page.distributions import value_plot
from tstore.service.page.plots import bars, line, treemap
from tstore.service.page.rendering import format_percent
from tstore.service.page.views import choices, shell_command
from tstore.service.server import Access, Server


async def document(server: Server, view: str, token: str = READ, **parameters: Any) -> dict[str, Any]:
    async with client_of(server, token) as client:
        query = urlencode({name: value for name, value in parameters.items() if value is not None})
        response = await client("GET", f"/-/page/{view}?{query}", Accept="application/json")
        found: dict[str, Any] = json.loads(response.body)
        return {"status": response.status, **found}


def form_token(page: str) -> str:
    return str(re.findall('value="([0-9a-f]{64})"', page)[0])


def files(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


async def test_the_run_has_the_figures_of_the_history(server: Server, store: Path) -> None:
    async with await tstore.open(store, "r") as opened:
        commits = [commit async for commit in opened.history()]
    run = await document(server, "")
    assert [row["step"] for row in run["rows"]] == [20, 10]
    assert [row["bytes_added"] for row in run["rows"]] == [commit.bytes_added for commit in commits]
    assert run["rows"][0]["seconds"] == (commits[0].time - commits[1].time).total_seconds()
    assert run["series"]["metrics"] == {"loss": [0.1, 0.05]}
    assert run["rows"][1]["seconds"] is None


async def test_a_copy_stands_beside_its_source(server: Server, store: Path) -> None:
    report = await tstore.quantize(store, {"**/w": "e4m3"}, tag="small")
    run = await document(server, "")
    [copy] = run["rows"][0]["copies"]
    assert (copy["version"], copy["tags"]) == (report.version, ["small"])
    version = await document(server, "version", at=report.version)
    assert version["sqnr_db"] == pytest.approx(report.sqnr)
    assert version["bits_per_value"] == pytest.approx(report.bits_per_value)
    shared = await document(server, "version", at=2)
    assert shared["shared_bytes"] == 32 * 8  # b is the same in both steps
    assert not shared["quantized"]


async def test_retention_is_shown_and_nothing_is_removed(server: Server, store: Path) -> None:
    before = files(store)
    run = await document(server, "", keep_last=1)
    assert run["removed"]["versions"] == [1]
    assert [row["expiring"] for row in run["rows"]] == [False, True]
    assert run["command"] == f"tstore gc {server.url} --keep-last 1 --dry-run"
    assert (await document(server, "", keep_best="1:loss:max"))["removed"]["versions"] == []
    assert (await document(server, "", keep_best="1:accuracy"))["status"] == 404
    for wrong in ("loss", "0:loss", "1:", "-1"):
        assert (await document(server, "", keep_best=wrong))["status"] == 400
    assert files(store) == before


async def test_copies_that_retention_would_remove_are_marked(server: Server, store: Path) -> None:
    await tstore.quantize(store, {"**/w": "e4m3"}, at="step/10", tag="old")
    await tstore.quantize(store, {"**/w": "e4m3"}, at="old", tag="older")
    assert (await document(server, ""))["version"] == 4
    await tstore.quantize(store, {"**/w": "e4m3"}, tag="new")

    async def marked(**rules: Any) -> dict[str, bool]:
        run = await document(server, "", **rules)
        assert [commit["version"] for commit in run["others"]] == []
        return {copy["tags"][0]: copy["expiring"] for row in run["rows"] for copy in row["copies"]}

    assert await marked() == {"old": False, "older": False, "new": False}
    assert await marked(keep_last=1) == {"old": True, "older": True, "new": False}
    assert await marked(keep_last=1, keep_tags="older", keep_copies=0) == {
        "old": True,
        "older": False,
        "new": True,
    }
    async with client_of(server, READ) as client:
        page = (await client("GET", "/-/page/?keep_last=1", Accept="text/html")).body.decode()
    assert page.count("would be removed</span>") == 3  # step 10 and its copies


async def test_pages_of_a_long_run_follow_each_other(tmp_path: Path) -> None:
    async with await tstore.open(tmp_path / "long") as store:
        for step in range(120):
            await tstore.save(store, {"w": [float(step)]}, step=step, durability="none")
    async with Server(tmp_path / "long", access=everybody(), page=Site()) as server:
        seen: list[int] = []
        before = None
        while True:
            run = await document(server, "", before=before)
            seen += [row["step"] for row in run["rows"]]
            before = run["older"]
            if before is None:
                break
        assert seen == list(range(119, -1, -1))
        assert len(run["series"]["x"]) == 120


async def test_a_new_version_reads_only_the_new_records(
    server: Server, store: Path, monkeypatch: pytest.MonkeyPatch, thresholds: Thresholds
) -> None:
    read: list[str] = []
    short_objects = LocalStorage.short_objects

    async def noted(self: LocalStorage, keys: Iterable[str]) -> list[bytes | None]:
        read.extend(keys := list(keys))
        return await short_objects(self, keys)

    monkeypatch.setattr(LocalStorage, "short_objects", noted)
    thresholds(CACHED_RECORDS=1)
    w = np.zeros(100)
    for step in range(30, 400, 10):  # more records than are read with the first one
        await tstore.save(store, {"w": w}, step=step)
    assert (await document(server, ""))["count"] == 39
    await tstore.save(store, {"w": w + 1}, step=400)
    read.clear()
    assert (await document(server, ""))["count"] == 40
    assert len(read) <= 3  # the new one, and those before it that it and the last one follow


async def test_a_history_that_changed_is_shown_as_a_new_server_shows_it(
    server: Server, store: Path, thresholds: Thresholds
) -> None:
    thresholds(CACHED_RECORDS=1)  # a repair of a cached one opens it again

    async def shown() -> None:
        async with Server(store, access=everybody(), page=Site()) as other:
            fresh = await document(other, "")
        run = await document(server, "")
        assert {name: run[name] for name in ("rows", "others", "series")} == {
            name: fresh[name] for name in ("rows", "others", "series")
        }

    await shown()
    async with await tstore.open(store) as opened:
        async with opened.transaction(tag="best") as tx:
            await (await tx.create_array("v", (4,), "float32")).write(1)
        await shown()
        await drop_tag(opened, "best")
        await shown()
        await set_tag(opened, "best", 2)
        await shown()
    await tstore.save(store, {"w": np.zeros(3)}, step=30)
    await shown()
    version = await tstore.save(store, {"w": np.ones(3)}, step=40)
    await tstore.save(store, {"w": np.ones(4)}, step=50)
    await shown()
    async with await tstore.open(store) as opened:
        await opened.collect(tstore.Keep(last=3))
        await shown()
        record = store / "commits" / f"{version:020}"
        record.write_bytes(record.read_bytes()[:-1])
    async with await tstore.open(store) as opened:
        assert (await opened.repair([version])).voided
        await shown()


async def test_a_restored_backup_shows_its_own_history(server: Server, store: Path, tmp_path: Path) -> None:
    shutil.copytree(store, tmp_path / "backup")
    await tstore.save(store, {"lost": np.zeros(3)}, step=30)
    assert [row["name"] for row in (await document(server, "tree", at=3))["rows"]] == ["lost"]
    assert (await document(server, "version", at=3))["values"] == 3
    shutil.rmtree(store)
    shutil.copytree(tmp_path / "backup", store)
    await tstore.save(store, {"kept": np.zeros(4)}, step=31)
    assert [row["step"] for row in (await document(server, ""))["rows"]] == [31, 20, 10]
    assert [row["name"] for row in (await document(server, "tree", at=3))["rows"]] == ["kept"]
    assert (await document(server, "version", at=3))["values"] == 4


async def test_a_store_without_steps_shows_its_versions(tmp_path: Path) -> None:
    async with await tstore.open(tmp_path / "plain") as store:
        for value in range(3):
            async with store.transaction(f"set {value}", f"tag{value}") as tx:
                w = await (tx.array("w") if value else tx.create_array("w", shape=(64,), dtype="int64"))
                await w.write(value)
    async with Server(tmp_path / "plain", access=everybody(), page=Site()) as server:
        run = await document(server, "")
        assert run["unit"] == "version"
        assert [row["version"] for row in run["rows"]] == [3, 2, 1]


async def test_hosts_under_way_have_their_states(server: Server, store: Path) -> None:
    async with await tstore.open(store) as opened:
        members = [opened.transaction(name="step/30", host=h, hosts=3, attempt="a.0") for h in (0, 1)]
        for host, member in enumerate(members):
            w = await member.create_array(f"host/{host}", shape=(4,), dtype="int32")
            await w.write(np.arange(4, dtype="int32"))
        with pytest.raises(tstore.errors.DeadlineExceeded):
            await members[0].commit(timeout=0.05)
        [pending] = (await document(server, "hosts"))["pending"]
        assert pending["states"] == ["delivered", "missing", "missing"]
        assert pending["committed"] is None
        assert pending["counts"] == {"delivered": 1, "working": 0, "silent": 0, "missing": 2}
        await members[1].abort()


async def test_an_attempt_that_another_overtook_names_the_version(server: Server, store: Path) -> None:
    async with await tstore.open(store) as opened:
        late = opened.transaction(name="step/30", tag="step/30", host=0, hosts=2, attempt="before.0")
        await (await late.create_array("w", shape=(4,), dtype="int32")).write(1)
        with pytest.raises(tstore.errors.DeadlineExceeded):
            await late.commit(timeout=0.05)
    version = await tstore.save(store, {"w": np.zeros(4)}, step=30)
    [pending] = (await document(server, "hosts"))["pending"]
    assert pending["committed"] == version


async def test_the_newest_value_of_a_metric_is_told_even_if_it_is_not_finite(server: Server, store: Path) -> None:
    await tstore.save(store, {"w": np.zeros(4)}, step=30, metrics={"loss": math.nan, "norm": math.inf})
    async with client_of(server, READ) as client:
        page = (await client("GET", "/-/page/", Accept="text/html")).body.decode()
    assert '<span class="newest bad">NaN</span> <span class="note" title="0.05 to 0.1">' in page
    assert '<span class="newest bad">∞</span> <span class="note">no finite value</span>' in page


async def test_the_status_of_a_run(server: Server, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = await document(server, "")
    now = datetime.datetime.fromisoformat(run["rows"][0]["time"]).timestamp() + 30
    monkeypatch.setattr("tstore.service.page.status.time", SimpleNamespace(time=lambda: now))
    status = (await document(server, "status"))["status"]
    assert (status["state"], status["look_at"]) == ("good", [])
    assert (status["step"]["state"], status["step"]["step"], status["step"]["age"]) == ("good", 20, 30)
    assert status["hosts"] == {"state": "", "hosts": 1, "under_way": []}
    assert status["values"]["search"]["complete"]
    assert status["values"]["search"]["values_read"] == 64 * 32 + 32
    assert status["verified"] == {"state": "", "running": False, "faults": None, "age": None}
    run = await document(server, "")
    assert status["bytes_added"] == sum(row["bytes_added"] for row in run["rows"])
    assert run["status"]["values"] == status["values"]  # what another request found
    usual = status["step"]["usual"]
    assert usual == run["rows"][0]["seconds"]
    now += 3600
    late = (await document(server, "status"))["status"]
    assert (late["state"], late["look_at"]) == ("warn", ["step"])
    assert late["step"]["age"] == 3630
    async with client_of(server, READ) as client:
        page = (await client("GET", "/-/page/", Accept="text/html")).body.decode()
    assert "it has ended or is stuck" in page
    monkeypatch.undo()
    w = np.zeros((64, 32), "float32")
    w[3, 5], w[7, 7] = np.nan, -np.inf
    await tstore.save(
        store, {"params": {"w": w, "b": np.zeros(32)}}, step=30, metrics={"loss": math.inf, "lr": 1.0}
    )
    bad = (await document(server, "status"))["status"]
    assert (bad["state"], bad["look_at"]) == ("bad", ["values"])
    assert bad["values"]["metrics"] == ["loss"]
    assert bad["values"]["search"]["found"] == {"params/w": 2}
    assert (await document(server, ""))["status"]["state"] == "bad"


async def test_the_status_of_a_step_that_cannot_be_read(server: Server, store: Path) -> None:
    await tstore.save(store, {"w": np.ones((512, 64))}, step=30)  # too long to be in a record
    pack = max(store.glob("txn/*/pack-*"), key=lambda path: path.stat().st_mtime)
    data = bytearray(pack.read_bytes())
    data[100] ^= 1
    pack.write_bytes(data)
    status = (await document(server, "status"))["status"]
    assert status["state"] == "bad"
    assert "w, chunk (0, 0): checksum mismatch" in status["values"]["search"]["problem"]
    assert str(store) not in json.dumps(status)
    async with client_of(server, READ) as client:
        page = (await client("GET", "/-/page/status", Accept="text/html")).body.decode()
    assert "can't be read" in html.unescape(page)


async def test_the_status_of_stores_without_steps_or_floats(tmp_path: Path) -> None:
    async with await tstore.open(tmp_path / "plain") as store:
        async with store.transaction() as tx:
            await tx.create_group("g")
        async with Server(tmp_path / "plain", access=everybody(), page=Site()) as server:
            empty = (await document(server, "status"))["status"]
            assert (empty["state"], empty["step"], empty["values"]) == ("", None, None)
            async with store.transaction() as tx:
                await (await tx.create_array("w", shape=(64,), dtype="int64")).write(1)
            status = (await document(server, "status"))["status"]
            assert (status["step"]["step"], status["step"]["version"]) == (None, 2)
            assert (status["values"]["state"], status["values"]["search"]["values_read"]) == ("", 0)
            async with client_of(server, READ) as client:
                for view in ("", "status"):
                    page = (await client("GET", f"/-/page/{view}", Accept="text/html")).body.decode()
                    assert "no floats" in page


async def test_the_status_tells_of_hosts(server: Server, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attempt = store / "txn" / f"step.0.{0:032x}-of-00004"
    attempt.mkdir()
    (attempt / "part-00000-of-00004").touch()
    seconds = itertools.count()
    monkeypatch.setattr("tstore.service.page.hosts.time", SimpleNamespace(monotonic=lambda: next(seconds)))

    async def hosts(beat: float) -> dict[str, Any]:
        (attempt / "alive-00001-of-00004").write_text(json.dumps({"name": "step/30", "time": beat}))
        found: dict[str, Any] = (await document(server, "status"))["status"]["hosts"]
        return found

    working = await hosts(time.time())
    assert (working["state"], working["under_way"][0]["name"]) == ("good", "step/30")
    assert working["under_way"][0]["counts"] == {"delivered": 1, "working": 1, "silent": 0, "missing": 2}
    assert (await hosts(time.time() - 100))["state"] == "warn"
    async with client_of(server, READ) as client:
        page = (await client("GET", "/-/page/", Accept="text/html")).body.decode()
    assert "1 of 4 delivered" in page
    assert "no host is at work" in page
    await tstore.save(store, {"w": np.zeros(3)}, step=40)
    assert await hosts(time.time() - 100) == {"state": "", "hosts": 1, "under_way": []}  # the job went on
    assert (await hosts(time.time()))["state"] == "good"


async def test_the_status_tells_of_the_last_verification(
    server: Server, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def verify(*_: object) -> VerifyReport:
        return VerifyReport(2, 3, 3, 100, ["a fault"], [], [])

    monkeypatch.setattr(tstore.Store, "verify", verify)
    async with client_of(server, READ) as client:
        page = (await client("GET", "/-/page/health", Accept="text/html")).body.decode()
        await client("POST", "/-/page/health/start", {"form_token": form_token(page)})
        while (await document(server, "health"))["running"]:
            pass
        page = (await client("GET", "/-/page/status", Accept="text/html")).body.decode()
    verified = (await document(server, "status"))["status"]["verified"]
    assert (verified["state"], verified["faults"]) == ("bad", 1)
    assert 0 <= verified["age"] < 100
    assert "1 fault <small>" in page


TREE = {
    "layers": {str(i): {"w": np.zeros((4, i + 1), "float32")} for i in range(12)},
    "größe": np.zeros(3, "int8"),
    "重み": {"w": np.zeros(100, "float64")},
}


@pytest.fixture
async def tree(tmp_path: Path) -> Path:
    await tstore.save(tmp_path / "tree", TREE, step=1)
    return tmp_path / "tree"


async def test_groups_are_folded_and_add_up(tree: Path) -> None:
    async with Server(tree, access=everybody(), page=Site()) as server:
        top = await document(server, "tree")
        rows = {row["path"]: row for row in top["rows"]}
        assert set(rows) == {"layers", "größe", "重み"}
        assert rows["layers"]["arrays"] == 12
        assert rows["layers"]["stored_bytes"] == 16 * sum(range(1, 13))
        assert top["total"]["values"] == sum(row["values"] for row in top["rows"])
        inner = await document(server, "tree", group="layers")
        assert [row["name"] for row in inner["rows"]] == [str(i) for i in range(12)]  # 2 before 10
        leaf = (await document(server, "tree", group="layers/3"))["rows"]
        assert [(row["kind"], row["shape"], row["dtype"]) for row in leaf] == [("array", [4, 4], "float32")]
        assert (await document(server, "tree", group="none"))["status"] == 404


async def test_groups_have_their_own_spaces(tmp_path: Path) -> None:
    await tstore.save(tmp_path / "spaces", {" a ": {"x": np.ones(1)}, "\u3000": {"y": np.ones(1)}}, step=1)
    async with Server(tmp_path / "spaces", access=everybody(), page=Site()) as server:
        for group, name in ((" a ", "x"), ("\u3000", "y")):
            assert [row["name"] for row in (await document(server, "tree", group=group))["rows"]] == [name]


async def test_arrays_are_found_and_sorted(tree: Path) -> None:
    async with Server(tree, access=everybody(), page=Site()) as server:
        found = await document(server, "tree", find="layers/**/w", sort="bytes")
        assert [row["path"] for row in found["rows"]] == [f"layers/{i}/w" for i in range(11, -1, -1)]
        assert [row["path"] for row in (await document(server, "tree", find="重"))["rows"]] == ["重み/w"]
        up = await document(server, "tree", sort="bytes", order="up")
        assert [row["path"] for row in up["rows"]] == ["größe", "重み", "layers"]
        assert (await document(server, "tree", sort="secrets"))["status"] == 400
        assert (await document(server, "tree", first="x"))["status"] == 400


@pytest.mark.parametrize("parameters", [{}, {"group": "layers"}, {"find": "w"}, {"find": "**/w", "at": "step/1"}])
async def test_the_command_and_python_list_what_the_tree_shows(tree: Path, parameters: dict[str, str]) -> None:
    async with Server(tree, access=everybody(), page=Site(str(tree))) as server:
        shown = await document(server, "tree", **parameters)
    printed = await asyncio.to_thread(processes.python, shown["python"])
    listed = await asyncio.to_thread(processes.run_tstore, *shlex.split(shown["command"])[1:], "--json")
    assert listed.returncode == 0
    paths = [array["path"] for array in json.loads(listed.stdout)["arrays"]]
    assert len(paths) == shown["total"]["arrays"]
    assert all(repr(path) in printed for path in paths)
    assert printed.count("'") == 2 * len(paths)


async def test_the_first_levels_of_a_tree_are_open(tree: Path) -> None:
    async with Server(tree, access=everybody(), page=Site()) as server:
        rows = {row["name"]: row for row in (await document(server, "tree", sort="bytes"))["rows"]}
        assert rows["größe"]["rows"] is None
        assert [row["name"] for row in rows["layers"]["rows"]] == [str(i) for i in range(11, -1, -1)]
        assert all([below["name"] for below in row["rows"]] == ["w"] for row in rows["layers"]["rows"])
        await tstore.save(
            tree, {"many": {str(i): {"w": np.zeros(1)} for i in range(39)}, "b": np.zeros(1)}, step=2
        )
        rows = {row["name"]: row for row in (await document(server, "tree"))["rows"]}
        assert rows["many"]["rows"] is None  # 41 rows
        deeper = (await document(server, "tree", group="many", level=1))["rows"]
        assert [row["rows"] for row in deeper] == [None] * 39  # rows for a script


def test_a_list_of_many_steps_has_the_newest_and_some_of_the_others() -> None:
    tags = {f"step/{step}": step + 1 for step in range(3000)} | {"small": 3001, "good": 7, "step/7/e4m3": 3002}
    listed = choices(tags)
    steps = [int(tag.removeprefix("step/")) for tag, _ in listed["steps"]]
    assert steps[:500] == list(range(2999, 2499, -1))
    assert 300 <= len(steps[500:]) <= 500
    assert len({before - after for before, after in itertools.pairwise(steps[500:])}) == 1
    assert listed["tags"] == [("step/7/e4m3", 3002), ("small", 3001), ("good", 7)]


async def test_rows_come_in_pages(tmp_path: Path) -> None:
    await tstore.save(tmp_path / "many", {f"w{i}": np.zeros(1) for i in range(250)}, step=1)
    async with Server(tmp_path / "many", access=everybody(), page=Site()) as server:
        names, first = [], 0
        while first is not None:
            page = await document(server, "tree", first=first)
            assert len(page["rows"]) <= 100
            names += [row["name"] for row in page["rows"]]
            first = page["next"]
        assert names == [f"w{i}" for i in range(250)]


async def test_a_verification_is_started_by_whoever_may(store: Path) -> None:
    site = Site()
    async with Server(store, access=Access({WRITE: "write"}, anonymous="read"), page=site) as server:
        async with client_of(server) as client:
            page = (await client("GET", "/-/page/health", Accept="text/html")).body.decode()
            assert "sign in with a token" in page
            assert (await client("POST", "/-/page/health/start", {})).status == 403
            for of in (Site(), site):  # another server, and this one
                form = {"form_token": of._sessions.form_token("")}
                assert (await client("POST", "/-/page/health/start", form)).status == 403
        assert (await document(server, "health", token=WRITE))["running"] is False


async def test_a_stopped_verification_finds_no_store_whole(
    server: Server, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = "report"

    async def verify(self: tstore.Store, note: object) -> VerifyReport:
        if outcome == "wait":
            await asyncio.Event().wait()
        if outcome == "fail":
            raise ValueError("unforeseen")
        return VerifyReport(2, 3, 3, 100, [f"{store}: a fault <b>"], ["<i>"], [])

    monkeypatch.setattr(tstore.Store, "verify", verify)

    async with client_of(server, READ) as client:
        page = (await client("GET", "/-/page/health", Accept="text/html")).body.decode()
        form = {"form_token": form_token(page)}

        async def ended() -> dict[str, Any]:
            found = await document(server, "health")
            return await ended() if found["running"] else found

        await client("POST", "/-/page/health/start", form)
        assert (await ended())["report"]["faults"] == [f"{server.url}: a fault <b>"]
        page = (await client("GET", "/-/page/health", Accept="text/html")).body.decode()
        assert "a fault &lt;b&gt;" in page
        assert "&lt;i&gt;" in page
        outcome = "wait"
        await client("POST", "/-/page/health/start", form)
        await client("POST", "/-/page/health/stop", form)
        stopped = await ended()
        assert (stopped["report"], stopped["error"]) == (None, "it was stopped before its end")
        outcome = "fail"
        await client("POST", "/-/page/health/start", form)
        failed = await ended()
        assert (failed["report"], failed["error"]) == (None, "internal error; see the server's log")
        page = (await client("GET", "/-/page/health", Accept="text/html")).body.decode()
        assert "The verification failed: " in page


async def test_a_look_for_hosts_reads_no_commits_if_nothing_is_under_way(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*_: object) -> None:
        raise AssertionError("commits are read")

    monkeypatch.setattr("tstore.core.log.reader.LogReader.each_record", read)
    assert (await document(server, "hosts"))["pending"] == []


async def test_many_hosts_under_way_are_shown_in_part(server: Server, store: Path) -> None:
    for number in range(40):
        folder = store / "txn" / f"step.{number:02}.{number:032x}-of-99999"
        folder.mkdir()
        name = "alive-00007-of-99999" if number == 39 else "part-00007-of-99999"
        (folder / name).write_text(json.dumps({"name": "step/30", "time": time.time()}))
    found = await document(server, "hosts")
    assert (len(found["pending"]), found["more"]) == (32, 8)
    active = found["pending"][-1]
    assert active["active"]
    assert active["counts"] == {"delivered": 0, "working": 1, "silent": 0, "missing": 99998}
    assert len(active["states"]) == 1024
    assert active["missing"] == ["0-6", "8-99998"]
    async with client_of(server, READ) as client:
        assert b"8 more are not committed" in (await client("GET", "/-/page/hosts", Accept="text/html")).body


async def test_what_is_kept_of_a_commit_is_bounded(server: Server, store: Path) -> None:
    metrics = {f"metric {i}": 1.0 for i in range(4000)}
    long_names = {f"{i}" * 5000: 1.0 for i in range(1, 10)}
    async with await tstore.open(store) as opened:
        async with opened.transaction(tag="step/25", metadata={"metrics": long_names}) as tx:
            await (await tx.create_array("v", (4,), "float32")).write(1)
        for message in ("m" * 60_000, ""):
            tag = None if message else "step/30"
            async with opened.transaction(message, tag, metadata={"metrics": metrics}) as tx:
                await (await tx.create_array(f"w{len(message)}", (4,), "float32")).write(1)
    run = await document(server, "")
    rows = run["rows"]
    assert (len(rows[0]["metrics"]), rows[0]["metric_count"]) == (64, 4000)
    assert ([name[0] for name in rows[1]["metrics"]], rows[1]["metric_count"]) == (["1", "2", "3"], 9)
    assert (len(run["series"]["metrics"]), run["series"]["metric_count"]) == (32, 4000)
    async with client_of(server, READ) as client:
        page = (await client("GET", "/-/page/", Accept="text/html")).body.decode()
    assert page.count('data-format="number"') == 8
    assert "metric 27</bdi> and 3,968 more metrics." in page
    assert [len(commit["message"]) for commit in run["others"]] == [4096]


async def test_a_commit_with_many_tags_is_shown_in_part(server: Server, store: Path) -> None:
    async with await tstore.open(store) as opened:
        newest = await opened.log.reader.newest()
        record = await opened.log.reader.record(newest)
    tags = ["step/30", *(f"tag {i}" for i in range(1000))]
    following = msgspec.structs.replace(record, transaction=f"{1:024x}", base=newest, manifests=(), metadata={})
    data = placed_in(store, newest + 1, forged(following, tags=tags))
    (store / commit_key(newest + 1)).write_bytes(data)
    row = (await document(server, ""))["rows"][0]
    assert (row["step"], row["tag_count"], row["tags"]) == (30, 1001, tags[:64])
    async with client_of(server, READ) as client:
        assert b"and 993 more" in (await client("GET", "/-/page/", Accept="text/html")).body


@pytest.mark.parametrize(
    "metadata", [b"{", b"[]", b'{"zarr_format":3,"node_type":"group","attributes":{"a":NaN}}']
)
async def test_a_damaged_root_group_is_named(
    server: Server, store: Path, monkeypatch: pytest.MonkeyPatch, metadata: bytes
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("tstore.core.transactions.staged_tree.group_document", lambda *_: metadata)
        await tstore.save(store, {"w": np.ones(3)}, step=30)
    for view in ("tree", "compare"):
        found = await document(server, view)
        assert found["status"] == 500
        assert found["error"].startswith("the root group: the metadata of a node does not parse")


async def test_the_memory_of_a_tree_is_that_of_its_paths(tmp_path: Path) -> None:
    inner = "/".join(["g" * 14] * 250)
    async with await tstore.open(tmp_path / "deep") as opened, opened.transaction() as tx:
        for number in range(100):
            await tx.create_array(f"{number}/{inner}", (2,), "float32", sparse=True)
    async with Server(tmp_path / "deep", access=everybody(), page=Site()) as server:
        await document(server, "tree")
        tracemalloc.start()
        try:
            async with await tstore.open(tmp_path / "deep") as opened, opened.transaction() as tx:
                await tx.create_array("another", (2,), "float32", sparse=True)
            assert (await document(server, "tree"))["total"]["arrays"] == 101
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert peak < 30 * 100 * len(inner)


async def test_a_search_is_bounded(tmp_path: Path) -> None:
    async with await tstore.open(tmp_path / "long") as opened, opened.transaction() as tx:
        for number in range(50):
            await tx.create_array(f"{number}{'a' * 4000}", (1,), "float32", sparse=True)
            await tx.create_array("1a" * 2000 + str(number), (1,), "float32", sparse=True)
    async with Server(tmp_path / "long", access=everybody(), page=Site()) as server:
        assert "at most 256 characters" in (await document(server, "tree", find="a*" * 129))["error"]
        assert (await document(server, "tree", find="a*" * 127 + "b"))["count"] == 0
        assert (await document(server, "tree", find="1a*"))["count"] == 50 + 1
        assert (await document(server, "tree"))["count"] == 100


HOSTILE_WORDS = [
    "-x",
    "--help",
    "a'b\"c",
    "$(touch run)",
    "`touch run`; touch run & touch run | touch run",
    "!touch",
    "größe",
    "a\nb",
    "\x15touch run\n",
    "\x1b[201~\ntouch run\n",
    "\u202egnirts'\\",
    "\x7f'; touch run; '",
    "'\n'touch run\n",
]


@pytest.mark.parametrize("word", HOSTILE_WORDS, ids=ascii)
def test_a_copied_command_runs_nothing_else(tmp_path: Path, word: str) -> None:
    command = shell_command("ls", ["http://localhost:1", word], ["--at", word])
    assert command.isprintable()
    printing = "tstore() { for word; do printf '%s\\0' \"$word\"; done; }"
    for shell in filter(shutil.which, ("bash", "zsh", "dash", "sh")):
        result = subprocess.run(
            [shell, "-c", f"{printing}; {command}"], cwd=tmp_path, capture_output=True, check=True
        )
        words = result.stdout.decode().split("\0")[:-1]
        assert len(words) == 5 + word.startswith("-")
        if shell in ("bash", "zsh"):  # others need not know $'…'
            assert words.count(word) == 2
    assert not list(tmp_path.iterdir())


async def test_a_path_that_looks_like_an_option_is_an_argument(server: Server, store: Path) -> None:
    await tstore.save(store, {"--help": np.zeros(3), "-g": {"w": np.zeros(3)}}, step=30)
    url = server.url
    assert (await document(server, "tensor", path="--help"))["command"] == f"tstore stats -- {url} --help"
    assert (await document(server, "tree", group="-g", at=3))["command"] == f"tstore ls --at 3 -- {url} -g"


async def test_a_store_that_does_not_exist_yet_is_named(tmp_path: Path) -> None:
    async with Server(tmp_path / "later", access=everybody(), page=Site()) as server:
        assert (await document(server, ""))["status"] == 404
        await tstore.save(tmp_path / "later", {"w": [1.0]}, step=1)
        assert (await document(server, ""))["count"] == 1


async def test_an_error_names_no_path_of_the_server(server: Server, store: Path) -> None:
    missing = await document(server, "tree", at=99)
    assert missing["status"] == 404
    assert str(store) not in missing["error"]
    unpaired = await document(server, "compare", after=1)
    assert str(store) not in unpaired["problem"]
    assert f"{server.url}: no version before 1" in unpaired["problem"]
    assert "has no version 99" in missing["error"]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (0.0493, "4.9 %"),
        (0.01, "1.0 %"),
        (0.0994, "9.9 %"),
        (0.09999, "10 %"),
        (12.5, "1,250 %"),
        (1e-9, "1.0e-07 %"),
        (0.0, "0 %"),
        (None, "not finite"),
    ],
)
def test_changes_are_in_percent(change: float | None, text: str) -> None:
    assert format_percent(change) == text


async def test_the_relative_change_is_that_of_all_values(server: Server, store: Path) -> None:
    await tstore.save(store, {"w": np.full(300, 3.0), "v": np.full(100, 5.0)}, step=30)
    await tstore.save(store, {"w": np.full(300, 3.3), "v": np.full(100, 5.0)}, step=40)
    await tstore.save(store, {"w": np.full(300, 3.3), "v": np.full(100, np.nan)}, step=50)
    assert (await document(server, "compare", after="step/40"))["relative_change"] == pytest.approx(0.1)
    both = await document(server, "compare", before="step/40", after="step/50")
    assert both["relative_change"] is None
    same = await document(server, "compare", before="step/40", after="step/40")
    assert same["relative_change"] == 0
    async with client_of(server, READ) as client:
        page = (await client("GET", "/-/page/compare?after=step/40", Accept="text/html")).body.decode()
    assert "Relative change 10 %" in page


# ---- plots


def test_a_line_encloses_its_values_and_leaves_gaps() -> None:
    drawn = line([0, 10, 20, 30], [1.0, None, 3.0, math.nan])
    assert drawn.path.count("M") == 2
    assert [(x, y) for _, _, x, y in drawn.positions] == [(0, 1.0), (20, 3.0)]
    assert float(drawn.y_labels[0]) <= 1.0
    assert float(drawn.y_labels[-1]) >= 3.0


@pytest.mark.parametrize(
    "values",
    [
        [],
        [0.0],
        [5.0, 5.0],
        [-1e300, 1e300],
        [-1.7e308, 1.7e308],
        [1.7e308, 1.7e308],
        [1.0, 1.7e308],
        [5e-324, 1.7e308],
        [5e-324, 5e-324],
        [0.0, 1e-310],
        [1e-320, 1.0],
        [1e16, math.nextafter(1e16, math.inf)],
        [2**64 - 1, -(2**63)],
        [None, math.inf],
        list(range(5000)),
    ],
)
def test_any_values_have_finite_places(values: list[float | None]) -> None:
    xs = list(range(len(values)))
    for drawn in (line(xs, values), bars(xs, values)):
        assert "nan" not in drawn.path
        assert "inf" not in drawn.path
        assert len(drawn.positions) <= 610
        assert all(0 <= x <= 1000 and -0.1 <= y <= 1000.1 for x, y, _, _ in drawn.positions)
        assert all(len(label) < 20 for label in drawn.y_labels)


@pytest.mark.parametrize(
    ("steps", "labels"),
    [([1, 2, 3, 4], ["1", "4"]), ([0, 10], ["0", "5", "10"]), ([0, 9999], ["0", "5,000", "9,999"]), ([7], ["7"])],
)
def test_steps_are_labelled_where_they_are(steps: list[int], labels: list[str]) -> None:
    assert bars(steps, [1.0] * len(steps)).x_labels == labels


def test_values_over_many_decades_have_a_logarithmic_axis() -> None:
    drawn = line([0, 1, 2], [1e-6, 1e-3, 1.0])
    assert drawn.logarithmic
    assert [y for _, y, _, _ in drawn.positions] == pytest.approx([1000, 500, 0])


@pytest.mark.parametrize(
    ("low", "high", "labels"),
    [
        (-0.0885, 0.0941, ["-0.10", "-0.05", "0.00", "0.05", "0.10"]),
        (-0.00726, 0.00363, ["-0.010", "-0.005", "0.000", "0.005"]),
        (0.0, 1.0, ["0.00", "0.25", "0.50", "0.75", "1.00"]),
        (-1.7e308, 1.7e308, ["-1.7e+308", "-8.5e+307", "0", "8.5e+307", "1.7e+308"]),
        (5e-324, 1e-300, ["4.94e-324", "2.5e-301", "5e-301", "7.5e-301", "1e-300"]),
    ],
)
def test_a_histogram_has_round_ticks(low: float, high: float, labels: list[str]) -> None:
    edges = [low * (1 - i / 64) + high * (i / 64) for i in range(65)]
    plot = value_plot({"edges": edges, "counts": [1] * 64}, None)
    assert plot.x_labels == labels
    places = [x for x, *_ in plot.positions]
    assert places == sorted(places)
    assert all(0 <= x <= 1000 for x in places)
    assert places[-1] - places[0] > 500


def test_bars_begin_at_zero_and_keep_the_highest_of_many() -> None:
    values = [1.0] * 3000
    values[1234] = 7.0
    drawn = bars(list(range(3000)), values)
    assert max(y for _, _, _, y in drawn.positions) == 7.0
    assert drawn.y_labels[0] == "0"


def test_tiles_have_areas_in_proportion_and_fill_the_map() -> None:
    sizes = [60, 0, 25, 10, 5]
    tiles = treemap(sizes)
    assert [tile.item for tile in tiles] == [0, 2, 3, 4]
    for tile in tiles:
        assert tile.width * tile.height == pytest.approx(100 * sizes[tile.item])
        assert tile.x + tile.width <= 100 + 1e-9
        assert tile.y + tile.height <= 100 + 1e-9
