"""Only verbs that create stores accept a URL without one; all others refuse it and leave nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tstore
import tstore.sync
from tests.support.processes import run_tstore
from tstore.cli import main
from tstore.convert.exporting import export_safetensors
from tstore.convert.importing import import_checkpoint
from tstore.convert.safetensors import Writer
from tstore.core.storage.memory import MemoryStorage
from tstore.errors import NotAStore
from tstore.service.server import Server

Verb = Callable[[str, Path], Coroutine[Any, Any, Any]]


VERBS: dict[str, Verb] = {
    "open r": lambda url, _: tstore.open(url, "r"),
    "open r+": lambda url, _: tstore.open(url, "r+"),
    "restore": lambda url, _: tstore.restore(url),
    "restore a step": lambda url, _: tstore.restore(url, 3),
    "steps": lambda url, _: tstore.steps(url),
    "quantize": lambda url, _: tstore.quantize(url),
    "quantize by rules": lambda url, _: tstore.quantize(url, {"**": "e4m3"}, tag="q"),
    "quantize a version": lambda url, _: tstore.quantize(url, bits=5.0, at=1),
    "quantize_report": lambda url, _: tstore.quantize_report(url),
    "quantization_loss": lambda url, _: tstore.quantization_loss(url, "w"),
    "baseline": lambda url, _: tstore.baseline(url),
    "copy from it": lambda url, folder: tstore.copy(url, folder / "copy"),
    "export": lambda url, folder: export_safetensors(url, folder / "out.safetensors"),
}

COMMANDS: dict[str, list[str]] = {
    "export": ["export", "URL", "OUT/out.safetensors"],
    "log": ["log", "URL"],
    "follow": ["follow", "URL", "--count", "1"],
    "view": ["view", "URL", "--no-browser"],
    "ls": ["ls", "URL"],
    "show": ["show", "URL"],
    "tag": ["tag", "URL"],
    "tag NAME": ["tag", "URL", "best"],
    "rm": ["rm", "URL", "--step", "1"],
    "ls --pending": ["ls", "URL", "--pending"],
    "finish": ["finish", "URL", "step/1"],
    "diff": ["diff", "URL", "1", "2"],
    "stats": ["stats", "URL", "w"],
    "stats --loss": ["stats", "URL", "w", "--loss"],
    "verify": ["verify", "URL"],
    "gc": ["gc", "URL", "--keep-last", "1"],
    "gc --dry-run": ["gc", "URL", "--keep-last", "1", "--dry-run"],
    "quantize": ["quantize", "URL"],
    "quantize --bits": ["quantize", "URL", "--bits", "5"],
    "report": ["report", "URL"],
    "repair": ["repair", "URL"],
    "repair --void": ["repair", "URL", "--void", "1"],
    "copy": ["copy", "URL", "OUT/copy"],
}

OTHERS = {"import", "demo", "bench", "probe", "serve"}
"""Commands that create stores or test storage, and `serve`, which has its own test below."""

KINDS = ["folder", "empty folder", "memory", "http"]
TAKEN = {"folder of other files": "typo/notes.txt", "file": "typo"}
"""Places where no store can be, and the file that is there."""


@contextlib.asynccontextmanager
async def no_store(kind: str, folder: Path) -> AsyncIterator[str]:
    """Yield a URL without a store, and check at the end that nothing was created there."""
    place = folder / "typo"
    if kind == "folder":
        yield str(place)
        assert not place.exists()
    elif kind == "memory":
        yield f"memory://{place}"
        assert not MemoryStorage._objects_by_name.get(str(place))
    elif kind in TAKEN:
        file = folder / TAKEN[kind]
        file.parent.mkdir(exist_ok=True)
        file.write_text("mine")
        yield str(place)
        assert file.read_text() == "mine"
        assert set(place.rglob("*")) <= {file}
    else:
        place.mkdir()
        if kind == "http":
            async with Server(place) as server:
                yield server.url
        else:
            yield str(place)
        assert list(place.rglob("*")) == []
    assert {p.name for p in folder.iterdir()} <= {"typo"}


@pytest.mark.parametrize("kind", [*KINDS, *TAKEN])
async def test_no_verb_makes_a_store_by_mistake(tmp_path: Path, kind: str) -> None:
    async with no_store(kind, tmp_path) as url:
        for name, call in VERBS.items():
            with pytest.raises(NotAStore, match=r"has no tstore\.json"):
                await call(url, tmp_path)
            assert not list(tmp_path.glob("*/tstore.json")), name


def test_every_command_is_listed_here() -> None:
    from tstore.cli.commands import cli

    assert set(cli.commands) == {words[0] for words in COMMANDS.values()} | OTHERS


@pytest.mark.parametrize("kind", [*KINDS, *TAKEN])
async def test_no_command_makes_a_store_by_mistake(
    tmp_path: Path, kind: str, capfd: pytest.CaptureFixture[str]
) -> None:
    async with no_store(kind, tmp_path) as url:
        for name, words in COMMANDS.items():
            arguments = [word.replace("URL", url).replace("OUT", str(tmp_path)) for word in words]
            code = await asyncio.to_thread(main, [*arguments, "--json"])
            document = json.loads(capfd.readouterr().out)
            assert (code, document["error"]["type"]) == (1, "NotAStore"), (name, document)
            assert not list(tmp_path.glob("*/tstore.json")), name


def test_no_command_takes_a_store_of_a_newer_format(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    tstore.sync.save(tmp_path / "s", {"w": [1.0]}, 1)
    marker = tmp_path / "s" / "tstore.json"
    marker.write_text(json.dumps(json.loads(marker.read_text()) | {"format": 99}))
    for words in (*COMMANDS.values(), ["serve", "URL", "--port", "0"]):
        arguments = [word.replace("URL", str(tmp_path / "s")).replace("OUT", str(tmp_path)) for word in words]
        code = main([*arguments, "--json"])
        error = json.loads(capfd.readouterr().out)["error"]
        assert (code, error["type"]) == (1, "UnsupportedFormat"), words
        assert re.search("format version 99.*install a newer", error["message"]), words


@pytest.mark.parametrize("options", [[], ["--read-only"]])
def test_serve_makes_no_store_by_mistake(tmp_path: Path, options: list[str]) -> None:
    ended = run_tstore("serve", tmp_path / "typo", "--port", "0", "--json", *options)
    assert ended.returncode == 1
    assert json.loads(ended.stdout)["error"]["type"] == "NotAStore"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", KINDS)
async def test_reading_a_store_that_is_not_there_makes_none(tmp_path: Path, kind: str) -> None:
    async with no_store(kind, tmp_path) as url, await tstore.open(url) as store:
        snapshot = await store.snapshot()
        assert (snapshot.version, snapshot.paths(), await store.tags()) == (0, [], {})
        assert [commit async for commit in store.history()] == await store.pending() == []
        assert (await store.verify()).ok
        assert (await store.repair()).ok
        assert (await store.collect()).version is None
        with pytest.raises(NotAStore, match="does not exist yet; its first transaction creates it"):
            store.uuid  # noqa: B018


@pytest.mark.parametrize("kind", KINDS)
async def test_the_first_transactions_make_one_store(tmp_path: Path, kind: str) -> None:
    place = tmp_path / "s"
    async with contextlib.AsyncExitStack() as stack:
        url = f"memory://{place}" if kind == "memory" else str(place)
        if kind != "folder":
            place.mkdir()
        if kind == "http":
            url = (await stack.enter_async_context(Server(place))).url
        stores = [await stack.enter_async_context(await tstore.open(url)) for _ in range(4)]

        async def write(number: int) -> None:
            async with stores[number].transaction() as tx:
                await tx.create_array(f"w{number}", data=[number])

        await asyncio.gather(*map(write, range(3)))
        assert (await stores[3].snapshot()).paths() == ["w0", "w1", "w2"]
        assert len({store.uuid for store in stores[:3]}) == 1
        assert (await (await tstore.open(url, "r")).verify()).faults == []


async def test_save_and_import_make_one(tmp_path: Path) -> None:
    values = np.arange(8, dtype="f4")
    assert await tstore.save(tmp_path / "saved", {"w": values}, 0) == 1
    with Writer(tmp_path / "w.safetensors", {"w": (values.dtype, values.shape)}) as file:
        file.write("w", values)
    assert (await import_checkpoint(tmp_path / "w.safetensors", tmp_path / "imported", 0)).version == 1
    assert (await tstore.copy(tmp_path / "saved", tmp_path / "copied")).version == 1
    assert {p.parent.name for p in tmp_path.glob("*/tstore.json")} == {"saved", "imported", "copied"}


def test_the_error_says_what_is_there_instead(tmp_path: Path) -> None:
    tstore.sync.save(tmp_path / "s", {"w": [1.0]}, 1)
    (tmp_path / "s" / "tstore.json").unlink()
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("x")
    for name, advice in {
        "s": "it has records of commits, so restore tstore.json from a copy of the store",
        "none": "it does not exist, or is empty; check the path",
        "empty": "it does not exist, or is empty; check the path",
        "file": "it is a file, not a folder; check the path",
        "other": "check the path",
    }.items():
        with pytest.raises(NotAStore) as raised:
            tstore.sync.open(tmp_path / name, "r")
        assert str(raised.value) == f"{tmp_path / name} is not a tstore store: it has no tstore.json; {advice}"
    with pytest.raises(NotAStore, match=r"no store can be created there; it has records of commits, so restore"):
        tstore.sync.save(tmp_path / "s", {"w": [1.0]}, 2)
