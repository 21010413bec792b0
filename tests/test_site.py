"""The site: it builds without a warning, describes every public name, and takes nothing from other hosts."""

from __future__ import annotations

import doctest
import functools
import importlib
import importlib.util
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import exmy
import numpy as np
import pytest

from tests.support.browser import browser, missing
from tests.support.documents import ROOT
from tests.support.fileservers import python_files
from tests.support.modules import module_at

griffe = pytest.importorskip("griffe", reason="the site needs the extra docs")
pytest.importorskip("material", reason="the site needs the extra docs")

CONFIGURATION = ROOT / "examples" / "site"
MODULES = (
    *("tstore", "tstore.sync", "tstore.jax", "tstore.torch", "tstore.zarr", "tstore.sharding", "tstore.errors"),
    *("exmy", "exmy.zarr", "exmy.numcodecs"),
)
FRAMEWORKS = ("tstore.sync.jax", "tstore.sync.torch", "exmy.jax", "exmy.torch")
NAMED_HOSTS = {
    "bit.ly",  # the sources and licenses of the theme's scripts and icons
    "clipboardjs.com",
    "fontawesome.com",
    "lunrjs.com",
    "tartarus.org",
    "www.sitemaps.org",  # names of XML's vocabularies
    "www.w3.org",
    "host:7341",  # the documents' own examples
    "minio:9000",
}


@functools.cache
def pages() -> ModuleType:
    """Return the module with the pages of the reference."""
    return module_at(CONFIGURATION / "pages.py")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built strictly."""
    folder = tmp_path_factory.mktemp("site") / "site"
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "-f",
        CONFIGURATION / "mkdocs.yml",
        "-d",
        folder,
    ]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250, check=False)
    assert built.returncode == 0, built.stderr
    return folder


def test_every_public_name_is_in_the_reference(site: Path) -> None:
    shown = {
        name
        for page in (site / "reference").glob("*.html")
        for name in re.findall(r'\bid="([\w.]+)"', page.read_text())
    }
    for module in (*MODULES, *FRAMEWORKS):
        names = importlib.import_module(module).__all__
        assert [f"{module}.{name}" for name in names if f"{module}.{name}" not in shown] == []


def test_the_site_takes_nothing_from_other_hosts_and_names_none(site: Path) -> None:
    for path in site.rglob("*"):
        if path.suffix in {".html", ".css", ".js", ".json", ".xml"}:
            hosts = re.findall(r"https?://([\w.:-]+)|(?:src|href)=[\"']?//([\w.:-]+)", path.read_text())
            assert {a or b for a, b in hosts} <= NAMED_HOSTS, path


@pytest.mark.skipif(bool(missing()), reason=missing())
@pytest.mark.parametrize("step", [4, pytest.param(1, marks=pytest.mark.deep)])
def test_pages_fit_a_phone_and_load_only_the_site(site: Path, tmp_path: Path, step: int) -> None:
    with python_files(site) as url, browser(tmp_path / "profile") as window:
        for path in sorted(site.rglob("*.html"))[::step]:
            window.show(f"{url}/{path.relative_to(site)}", width=390)
            assert window.overflow() == 0, path
            loaded = window.script("return performance.getEntriesByType('resource').map(entry => entry.name)")
            assert loaded
            assert all(address.startswith(url) for address in loaded), path
            assert window.complaints() == []


@pytest.mark.skipif(bool(missing()), reason=missing())
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_pages_have_no_barriers(site: Path, tmp_path: Path, theme: str) -> None:
    with browser(tmp_path / "profile") as window:
        for page in ("index.html", "operation.html", "reference/exmy.html"):
            window.show((site / page).as_uri(), width=390, theme=theme)
            scheme = {"light": "default", "dark": "slate"}[theme]
            assert window.script("return document.body.dataset.mdColorScheme") == scheme
            assert window.barriers() == [], page


# ---- docstrings


@functools.cache
def sources() -> Any:
    """Return the packages as their sources and stubs describe them."""

    class Overloads(griffe.Extension):  # type: ignore[misc]
        on_module_members = pages().Docstrings.on_module_members

    extensions = griffe.load_extensions(Overloads())
    folders = [ROOT, ROOT / "codecs"]
    loader = griffe.GriffeLoader(search_paths=folders, allow_inspection=False, extensions=extensions)
    loader.load("tstore")
    loader.load("exmy")
    loader.resolve_aliases(implicit=True, external=False)
    return loader.modules_collection


def test_every_public_name_has_a_docstring() -> None:
    """A field is described by a docstring of its own, or in that of the class, also as an attribute."""
    for entry in pages().entries():
        thing = sources()[entry]
        text = thing.docstring.value if thing.docstring else ""
        assert text, entry
        members = thing.members if thing.is_class else {}
        for name, member in members.items():
            is_described = member.docstring or re.search(rf"`{name}\b|^(\w+, )*{name}(, \w+)*$", text, re.M)
            assert name.startswith("_") or is_described, f"{entry}.{name} has no docstring"


def docstrings(module: str) -> dict[str, str]:
    """Return the docstrings of a module's public names, and of the public members of its classes."""
    things: dict[str, Any] = {"": importlib.import_module(module)}
    for name in importlib.import_module(module).__all__:
        things[name] = thing = getattr(importlib.import_module(module), name)
        if inspect.isclass(thing):
            things |= {f"{name}.{member}": value for member, value in vars(thing).items() if member[0] != "_"}
    return {name: text for name, thing in things.items() if (text := inspect.getdoc(thing)) and ">>> " in text}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")  # DCP in one process
@pytest.mark.parametrize(
    "module", ["tstore.sync", "tstore.sharding", "tstore.zarr", "exmy", "exmy.numcodecs", "exmy.zarr", *FRAMEWORKS]
)
def test_examples_in_docstrings_run(module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = {"exmy": exmy, "np": np}
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    texts = docstrings(module)
    assert texts
    for name, text in texts.items():
        runner.run(doctest.DocTestParser().get_doctest(text, dict(names), f"{module}.{name}", None, 0))
    assert runner.summarize(verbose=False).failed == 0
