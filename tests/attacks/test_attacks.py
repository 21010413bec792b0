"""`python -m tests.attacks` on a small scale: some cases of each group must hold, and broken ones are reported."""

from __future__ import annotations

import asyncio
import contextlib
import io
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from tests.attacks import floods
from tests.attacks.case import Case, check
from tests.attacks.children import Children
from tests.attacks.groups import NAMES, PRELOAD, groups
from tests.attacks.harness import Harness
from tests.attacks.runner import Group, Result, run, share, untried
from tests.attacks.sample_store import SampleStore
from tests.attacks.table import show
from tests.attacks.target import lay_out
from tests.support import processes
from tests.support.documents import ROOT

CHOSEN = {
    "requests": ["path: /../secret", "line: TRACE", "token: ''", "random requests: 7"],
    "scopes": [
        "scope: none, commits",
        "scope: read, pack",
        "honest record",
        "object: a record behind a gap",
        "poison: of the next save",
    ],
    "metadata": ["object: record of 100,000 levels", "object: hint of 4,000 digits"],
    "floods": ["silent connections"],
    "stores": [
        "server: redirects round",
        "document: codecs of text",
        "heavy folder: a gc of 7,000,000 names, restore",
        "bomb: zstd, no frame",
    ],
}


COMMAND = """
    import runpy
    runpy.run_module("tests.attacks", run_name="__main__", alter_sys=True)
"""


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, SampleStore]:
    bare, whole = tmp_path_factory.mktemp("bare"), tmp_path_factory.mktemp("whole")
    lay_out(bare)
    return bare, whole, asyncio.run(SampleStore.make(whole / "store"))


@contextlib.contextmanager
def shorter(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(floods, "SETTLED", 0.1)
    monkeypatch.setattr(floods, "SECONDS", 0.5)
    yield


async def judged(group: Group, samples: tuple[Path, Path, SampleStore]) -> Result:
    bare, whole, sample = samples
    harness, result = Harness(bare if group.bare else whole, sample, Children(PRELOAD), 0), Result(group.name)
    await run(group, harness, 100, result, lambda case, message: None)
    return result


def chosen() -> list[Group]:
    chosen_groups = [group for group in groups(0) if not group.tls]
    return [g._replace(cases=[c for c in g.cases if c.name in CHOSEN[g.name]]) for g in chosen_groups]


@pytest.mark.parametrize("group", chosen(), ids=lambda group: group.name)
async def test_some_cases_of_each_group_hold(
    group: Group, samples: tuple[Path, Path, SampleStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    with shorter(monkeypatch):
        result = await judged(group, samples)
    assert (result.held, result.broken) == (len(group.cases), [])


def test_the_cases_chosen_above_exist() -> None:
    assert {c.name for group in chosen() for c in group.cases} == {
        name for names in CHOSEN.values() for name in names
    }


def test_case_names_are_unique() -> None:
    for group in groups(0):
        names = [case.name for case in group.cases]
        assert [name for name in set(names) if names.count(name) > 1] == [], group.name
    assert {group.name for group in groups(0)} == set(NAMES)


async def test_a_broken_case_is_reported(samples: tuple[Path, Path, SampleStore]) -> None:
    """A file disappears below the server: the audit detects it, and the next case starts with a new copy."""

    async def loses(harness: Harness) -> None:
        next((harness.target.place / "txn").glob("*/pack-*")).unlink()
        await harness.check_audit(None)

    async def fails(harness: Harness) -> None:
        raise ValueError("a case that can't go on")

    async def grows(harness: Harness) -> None:
        harness.meter.memory = 10 << 30

    cases = [Case(f.__name__, "", "", f) for f in (loses, grows)]
    cases[1:1] = [Case("holds", "", "", lambda harness: harness.check_audit(None))]
    result = await judged(Group("scopes", cases, lambda harness: harness), samples)
    assert result.held == 1
    told = {case.name: message for case, message in result.broken}
    away = [Case("fails", "", "", fails)]
    result = await judged(Group("stores", away, lambda harness: harness, together=1), samples)
    told |= {case.name: message for case, message in result.broken}
    assert "is missing in" in told["loses"] or "no such object" in told["loses"]
    assert told["fails"] == "ValueError: a case that can't go on"
    assert "MiB resident" in told["grows"]
    text = io.StringIO()
    show([result], Console(file=text, width=200))
    assert "stores: fails: ValueError" in text.getvalue()


async def test_a_client_that_dies_hangs_or_raises_is_reported() -> None:
    children = Children(PRELOAD)
    assert "ZeroDivisionError" in (await children.run(divided, seconds=20)).error
    assert (await children.run(asyncio.sleep, 60, seconds=0.5)).error == "not done after 0.5 s"
    assert (await children.run(asyncio.sleep, 0, seconds=20)).error == ""
    with pytest.raises(AssertionError, match="why"):
        check(False, "why")


async def divided() -> None:
    _ = 1 / 0


def test_the_command_lists_its_cases() -> None:
    said = processes.python(COMMAND, "--list", "--group", "floods", cwd=ROOT)
    assert "floods: slow packs: sends 128 packs" in said


def test_a_group_may_use_time_that_others_leave() -> None:
    assert share(400, 50, 150) == 150
    assert share(100, 50, 150) == 25
    assert share(60, 50, 0) == 55


def test_cases_that_did_not_run_are_reported() -> None:
    assert untried([Result("requests", held=3)], 5) == ""
    assert untried([Result("requests", untried=36)], 5).startswith("Not tried within 5 s: 36 of requests.")


@pytest.mark.timeout(120)
def test_the_exit_status_shows_that_cases_did_not_run() -> None:
    process = processes.start(COMMAND, "--group", "metadata", "--seconds", "0.001", cwd=ROOT)
    with processes.running(process):
        _, told = process.communicate(timeout=250)
    assert (process.returncode, "of metadata" in told) == (3, True), told
