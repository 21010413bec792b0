"""What `import tstore` loads, and when the rest is loaded."""

from __future__ import annotations

import ast
import json
import types
from pathlib import Path

import pytest

import tstore
import tstore.sync
from tests.support import processes

LOADED = """
    import json, sys
    {code}
    print(json.dumps([name for name in sys.modules if name.startswith("tstore.")]))
"""

NEEDLESS = ("convert.", "core.copying.", "service.", "lab.", "cli.", "jax.", "torch.", "zarr.")


def loaded(code: str, *arguments: object) -> list[str]:
    names: list[str] = json.loads(processes.fresh_python(LOADED.format(code=code), *arguments))
    return names


def test_the_package_itself_loads_nothing() -> None:
    assert loaded("import tstore") == []
    code = "import sys, tstore, tstore.errors; assert 'numpy' not in sys.modules; tstore.sharding"
    assert {name.split(".")[1] for name in loaded(code)} == {"errors", "sharding"}


@pytest.mark.parametrize(
    "code",
    [
        "import tstore; tstore.open, tstore.Store, tstore.Keep",
        "import tstore; tstore.save, tstore.restore, tstore.steps, tstore.Shards",
        "import tstore.sync; tstore.sync.open(sys.argv[1]).snapshot()",
        "import tstore.sync; c = tstore.sync.Checkpointer(sys.argv[1]); c.save(0, {'w': [1.0]}); c.close()",
    ],
)
def test_stores_and_checkpoints_load_no_converter_and_no_statistics(code: str, tmp_path: Path) -> None:
    names = [f"{name.removeprefix('tstore.')}." for name in loaded(code, tmp_path / "s")]
    assert [name for name in names if name.startswith(NEEDLESS)] == []


def test_a_save_loads_little_more_than_it_uses(tmp_path: Path) -> None:
    save = "import asyncio, tstore; asyncio.run(tstore.save(sys.argv[1], {'w': [1.0]}, 0))"
    names = [name.removeprefix("tstore.") for name in loaded(save, tmp_path / "s")]
    unused = ("core.maintenance.", "core.transactions.cooperative", "quantization.study", "sharding.")
    assert [name for name in names if f"{name}.".startswith((*NEEDLESS, *unused))] == []
    assert len(names) <= 121
    assert len(loaded("import tstore.sync")) <= 120


def test_each_name_is_that_which_type_checkers_see() -> None:
    """The imports for type checkers, and the table from which names are loaded, are the same."""
    syntax = ast.parse(Path(tstore.__file__).read_text())
    imported = {
        alias.name: f"{statement.module}.{alias.name}"
        for statement in ast.walk(syntax)
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
    }
    assert set(tstore.__all__) <= set(imported)
    for name in tstore.__all__:
        thing = getattr(tstore, name)
        home = thing.__name__ if name in ("errors", "sharding") else f"{thing.__module__}.{name}"
        assert home == imported[name]


@pytest.mark.parametrize("module", [tstore, tstore.sync], ids=["tstore", "tstore.sync"])
def test_exactly_the_public_names_complete_and_a_typo_is_an_attribute_error(module: object) -> None:
    others = {"jax", "torch", "zarr"} | ({"sync"} if module is tstore else set())
    assert {*tstore.__all__, *others} == {name for name in dir(module) if not name.startswith("_")}
    with pytest.raises(AttributeError, match="has no attribute 'sav'"):
        module.sav  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.parametrize("module", [tstore, tstore.sync], ids=["tstore", "tstore.sync"])
def test_names_of_other_libraries_are_answered_by_those_of_this_one(module: types.ModuleType) -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'latest'; restore\(url\) reads the newest step"):
        module.latest  # noqa: B018
    for arguments, own in (({"max_to_keep": 3}, "pass keep="), ({"save_interval_steps": 9}, "pass every=")):
        with pytest.raises(TypeError, match=own):
            module.Checkpointer("memory://never", **arguments)


def test_the_blocking_names_are_found_from_the_package() -> None:
    processes.fresh_python("import tstore; tstore.sync.save")
