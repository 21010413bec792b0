"""The README's `pip install -e .` in a clone: imports, type checkers and the command line.

Mypy reads the documents and examples that import neither PyTorch nor JAX, whose sources take it a minute, and
pyright those that do. Both read a script that states its types.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from tests.support.documents import DOCUMENTS, ROOT

pytestmark = pytest.mark.timeout(300)  # compiles, and two type checkers read NumPy

UNTRACKED = shutil.ignore_patterns(
    ".git", ".*_cache", ".hypothesis", ".venv", "__pycache__", "*.so", "build", "dist"
)
PIP = ["-m", "pip", "--disable-pip-version-check", "--no-input"]
OFFLINE = ["--no-index", "--no-deps", "--no-build-isolation"]  # hatchling comes from the environment of the tests

USER = """
import asyncio
import datetime
from collections.abc import AsyncIterator, Iterator
from typing import Any, assert_type

import numpy as np
import numpy.typing as npt
import tstore
import tstore.sync
from tstore.sharding import Mesh, P


async def awaited() -> None:
    async with await tstore.open("s", "x", cache=tstore.Cache("c", size=1)) as store:
        assert_type(store, tstore.Store)
        assert_type(store.uuid, str)
        async with store.transaction("m", tag="t", isolation="serializable", durability="none") as tx:
            assert_type(tx, tstore.Transaction)
            w = await tx.create_array("a", (10, 4), "f4", (5, 4), codecs="e4m3", attributes={"k": 1}, sparse=True)
            assert_type(w, tstore.Array)
            await w[0:10, ::2].write(np.ones((10, 2)))
            await w[..., -1].write(1.5)
            await (await tx.array("a")).resize((20, 4))
        assert_type(tx.version, int | None)
        assert_type(tx.retries, list[tstore.Retry])
        snapshot = await store.snapshot(datetime.datetime.now())
        y = await (await snapshot.array("a")).read()
        assert_type(y, npt.NDArray[Any])
        assert_type(store.history(), AsyncIterator[tstore.Commit])
        async for c in store.history():
            assert_type((c.version, c.tag, c.message, c.time), tuple[int, str | None, str, datetime.datetime])
        keep = tstore.Keep(last=2, best=(1, "loss"), newer_than=datetime.timedelta(7))
        assert_type(await store.collect(keep, dry_run=True), tstore.CollectReport)
        part = tstore.Shards((4,), "f4", [((slice(0, 2),), np.ones(2))])
        shards = tstore.Shards.of(np.ones(8), Mesh({"x": 2}), P("x"), 0)
        rules = {"a": "e4m3", "**": {"format": "e3m2", "block": 32}, "**/norm": None}
        version = await tstore.save(store, {"p": part, "q": [shards]}, 1, codecs=rules, metrics={"loss": 1})
        assert_type(version, int)
        assert_type(await tstore.restore(store, only=["a"]), Any)
        assert_type(await tstore.steps(store), list[int])
        assert_type(await tstore.quantize(store, bits=5, error="relative"), tstore.QuantizeReport)
        assert_type(await tstore.copy(store, "d", at="t"), tstore.CopyReport)


def blocking() -> None:
    with tstore.sync.open("s") as store:
        assert_type(store, tstore.sync.Store)
        with store.transaction("m", move_tag="t", metadata={"k": 1}) as tx:
            assert_type(tx, tstore.sync.Transaction)
            w = tx.create_array("a", shape=[10, 4], dtype=np.float32)
            assert_type(w, tstore.sync.Array)
            assert_type(w[0:10, ::2], tstore.sync.Array)
            w[0:10, ::2].write(1)
            tx.array("a").resize((20, 4))
            tx.create_array("b", (3,), "f4", None, ["bytes", {"name": "zstd", "configuration": {"level": 3}}])
            tx.copy_array(w, "c", codecs=["bytes", "zstd"])
        assert_type(tx.commit(timeout=1), int)
        snapshot = store.snapshot("t")
        assert_type(snapshot, tstore.sync.Snapshot)
        assert_type(snapshot.array("a"), tstore.sync.Array)
        assert_type(snapshot.array("a").shape, tuple[int, ...])
        assert_type(snapshot.array("a").read(), npt.NDArray[Any])
        assert_type(store.history(), Iterator[tstore.sync.Commit])
        assert_type(store.collect(tstore.sync.Keep(last=5)), tstore.sync.CollectReport)
        assert_type(store.verify().ok, bool)
        assert_type(store.pending(), list[tstore.sync.PendingTransaction])
        assert_type(tstore.sync.save(store, {}, step=1, codecs=tstore.sync.MinSqnr(30)), int)
        assert_type(tstore.sync.restore(store, 1), Any)
        assert_type(tstore.sync.steps(store), list[int])
        assert_type(tstore.sync.copy(store, store), tstore.sync.CopyReport)
        try:
            tstore.sync.quantize(store)
        except tstore.sync.errors.AlreadyExists:
            pass
"""

MYPY = """
[mypy]
strict = true
[mypy-torch.*,jax.*,jaxlib.*,matplotlib.*,distributed.*,moto.*,rich.*,aiohttp.*,zarr.*,tokenizers.*,jinja2.*,grain.*]
follow_imports = skip
ignore_missing_imports = true
"""
"""What tstore and its guides import from these is no matter of users' types, and takes mypy most of its time."""

MISUSE = """
import tstore as awaited
import tstore.sync as tstore
store = tstore.open("s")
awaited.sav("s", {}, 1)
store.transaction(1)
store.transaction(tags="t")
store.snapshot().version()
store.snapshot().array("w").reed()
[row for row in store.snapshot().array("w")]
tstore.save(store, {})
tstore.steps(tstore.open)
"""


TRANSFORMERS = "from typing import Any\ndef __getattr__(name: str) -> Any: ...\n"
"""A stub: reading the sources takes pyright three quarters of its time."""


class Clone:
    """A clone in a folder named `tstore`, installed in a new environment."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        shutil.copytree(ROOT, folder / "tstore", ignore=UNTRACKED)
        environment = folder / "environment"
        venv.create(environment, symlinks=True)
        self.scripts = environment / "bin"
        self.python = self.scripts / "python"
        packages = self.run("-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
        dependencies = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
        (Path(packages) / "dependencies.pth").write_text("\n".join(dependencies) + "\n")

    def run(self, *arguments: str | Path, cwd: Path | None = None, **more: str) -> str:
        """Run Python of the environment, as from a shell in the folder, and return its output."""
        environ = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "MYPY"))} | more
        command = [self.python, *arguments]
        done = subprocess.run(
            command, cwd=cwd or self.folder, env=environ, capture_output=True, text=True, timeout=240, check=False
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Clone:
    clone = Clone(tmp_path_factory.mktemp("clones"))
    compiler = clone.folder / "cc"
    compiler.write_text('#!/bin/sh\nexec cc "$@" -O0\n')  # the modules are only imported, and compile in a quarter
    compiler.chmod(0o755)
    clone.run(*PIP, "install", "--ignore-installed", *OFFLINE, "-e", "./tstore", CC=str(compiler))
    return clone


def places(clone: Clone) -> list[Path]:
    """Folders to import from: the parent of the clone, the clone, one inside it, and an unrelated one."""
    return [clone.folder, clone.folder / "tstore", clone.folder / "tstore" / "tests", Path("/")]


def test_the_packages_are_importable_from_any_folder(clone: Clone) -> None:
    for folder in places(clone):
        code = "import exmy, tstore.sync; tstore.save, tstore.sync.save; print(tstore.__file__, exmy.__file__)"
        imported = clone.run("-c", code, cwd=folder).split()
        assert imported == [str(clone.folder / p / "__init__.py") for p in ("tstore/tstore", "tstore/codecs/exmy")]


def test_the_command_runs_beside_and_inside_the_clone(clone: Clone) -> None:
    script = clone.run(clone.scripts / "tstore", "--version")
    assert re.fullmatch(r"tstore.* \d+\.\d+\.\d+\n", script)
    assert clone.run("-m", "tstore", "--version") == script
    assert clone.run("-m", "tstore", "--version", cwd=clone.folder / "tstore") == script


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
@pytest.mark.parametrize(
    ("module", "folder"), [("exmy._kernels", "codecs/exmy"), ("tstore.core.format.kernels", "tstore/core/format")]
)
def test_the_modules_in_c_are_compiled(clone: Clone, module: str, folder: str) -> None:
    file = clone.run("-c", f"import {module} as module; print(module.__file__)").strip()
    assert Path(file).parent == clone.folder / "tstore" / folder


UNTYPED = re.compile(
    r"^\s*(import|from) (accelerate|dask|distributed|keras|lightning|mlflow|optax|ray|torchtitan|vllm|wandb|"
    r"torch.distributed.checkpoint)\b",
    re.MULTILINE,
)
"""Packages that have no types, wrong ones, or are not installed with the tests."""


def scripts() -> dict[str, str]:
    """Return the documents' Python blocks and the examples with types, by file name."""
    texts = {}
    for document in DOCUMENTS:
        stem = document.name.removesuffix(".md").replace("/", "_")
        texts |= {f"{stem}_{number}.py": text for number, text in enumerate(document.of_language("python"))}
    texts |= {path.name: path.read_text() for path in (ROOT / "examples").glob("*.py")}
    return {name: text for name, text in texts.items() if not UNTYPED.search(text)}


def write(clone: Clone, texts: dict[str, str]) -> list[str]:
    """Write scripts, and two that state their types and misuse tstore, beside the clone; return their names."""
    assert len(texts) > 1
    written = {**texts, "user.py": USER, "misuse.py": MISUSE}
    for name, text in written.items():
        (clone.folder / name).write_text(text)
    return list(written)


def imports_torch_or_jax(text: str) -> bool:
    return re.search(r"^\s*(import|from) (torch|jax)\b", text, re.M) is not None


def judge(errors: set[tuple[str, int]]) -> None:
    """Assert that exactly the lines of misuse have errors."""
    assert errors == {("misuse.py", line) for line in range(5, 1 + MISUSE.count("\n"))}


def test_mypy_accepts_the_documents_and_a_users_script(clone: Clone, pytestconfig: pytest.Config) -> None:
    user = write(clone, {name: text for name, text in scripts().items() if not imports_torch_or_jax(text)})
    (clone.folder / "mypy.ini").write_text(MYPY)
    assert pytestconfig.cache is not None
    cache = pytestconfig.cache.mkdir("mypy")  # the cached analysis of NumPy outlives the run
    command = [sys.executable, "-m", "mypy", "--output=json", f"--cache-dir={cache}"]
    command.append(f"--python-executable={clone.python}")
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "MYPY"))}
    done = subprocess.run(
        [*command, *user], cwd=clone.folder, env=environ, capture_output=True, text=True, check=False
    )
    diagnostics = [json.loads(line) for line in done.stdout.splitlines()]
    assert diagnostics, done.stderr
    judge({(e["file"], e["line"]) for e in diagnostics if e["severity"] == "error"})


def test_pyright_accepts_the_documents_and_a_users_script(clone: Clone) -> None:
    user = write(clone, {name: text for name, text in scripts().items() if imports_torch_or_jax(text)})
    (stub := clone.folder / "typings" / "transformers").mkdir(parents=True)
    (stub / "__init__.pyi").write_text(TRANSFORMERS)
    project = {"typeCheckingMode": "standard", "include": user}
    (clone.folder / "pyrightconfig.json").write_text(json.dumps(project))
    command = [sys.executable, "-m", "basedpyright", "--outputjson", f"--pythonpath={clone.python}"]
    environ = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    done = subprocess.run(command, cwd=clone.folder, env=environ, capture_output=True, text=True, check=False)
    diagnostics = json.loads(done.stdout)["generalDiagnostics"]
    judge({(Path(e["file"]).name, e["range"]["start"]["line"] + 1) for e in diagnostics})


def test_a_wheel_of_the_sdist_has_every_file_of_both_packages(clone: Clone) -> None:
    """But for the simulation, which only tests use; also without a compiler, as a platform-independent wheel."""
    clone.run(
        "-m", "hatchling", "build", "--target", "sdist", "--directory", "../dist", cwd=clone.folder / "tstore"
    )
    [sdist] = (clone.folder / "dist").iterdir()
    clone.run(*PIP, "wheel", *OFFLINE, "--wheel-dir", "wheels", sdist, CC="false")
    [wheel] = (clone.folder / "wheels").iterdir()
    assert wheel.name.endswith("-py3-none-any.whl")
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    source = clone.folder / "tstore"
    packages = {"tstore": source / "tstore", "exmy": source / "codecs" / "exmy"}
    assert held == {
        f"{name}/{path.relative_to(folder)}"
        for name, folder in packages.items()
        for path in folder.rglob("*")
        if path.is_file() and path.suffix not in (".so", ".pyc") and "simulation" not in path.parts
    }
    assert {
        "tstore/py.typed",
        "tstore/sync/__init__.pyi",
        "exmy/py.typed",
        "exmy/_kernels.c",
        "tstore/core/format/FORMAT.md",
        "tstore/core/format/kernels.c",
        "exmy/FORMAT.md",
        "exmy/README.md",
    } <= held
