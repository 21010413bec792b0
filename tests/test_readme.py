"""The documents: every code block is executed, and every link, name and command in them exists.

`cli/test_demo.py` compares the recording of the demo, and `test_install.py` has type checkers read the blocks.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import click
import pytest

import tstore.sync
from tests.support import processes
from tests.support.documents import DOCUMENTS, README, ROOT, Document
from tstore.cli.commands import cli
from tstore.lab.simulation.scenario import override_constants

SHELL = [document for document in DOCUMENTS if document.of_language("sh")]
PYTHON = [d for d in DOCUMENTS if d.of_language("python") and d not in SHELL]
"""The documents whose Python blocks run alone; those of the others run before their commands."""

TRAINERS = ("accelerate", "keras", "lightning", "transformers", "ray", "torchtitan", "wandb")
"""The trainers of guides; whoever does not work on these need not install them."""

MAX_LINES = 250


def name_of(document: Document) -> str:
    return document.name


RUN = """
    import json, shlex, sys, warnings
    import tstore.cli

    warnings.filterwarnings("ignore", "'set_vital' is deprecated")  # torchdata calls it
    warnings.filterwarnings("ignore", module="lightning")

    for number, (language, text) in enumerate(json.load(sys.stdin), 1):
        if language == "python":
            exec(compile(text, f"block {number}", "exec"), {"__name__": "__main__"})
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("default")  # a library that a command imports may warn
                assert tstore.cli.main(shlex.split(text)[1:]) == 0, text
"""
"""Runs code blocks, each with its own names, and commands, whose modules are imported once for all of them."""


FRAMEWORKS = tuple(name for name in ("jax", "torch") if importlib.util.find_spec(name))


def run(document: Document, blocks: list[tuple[str, str]], folder: Path) -> None:
    """Run blocks of a document in a process, which need not import a framework: that takes seconds."""
    needs = re.search(r"^ *(import|from) (jax|torch|lightning|transformers|keras)\b", document.text, re.M)
    process = processes.start(RUN, cwd=folder, modules=FRAMEWORKS if needs else ())
    with processes.running(process):
        out, err = process.communicate(json.dumps(blocks), timeout=250)
    assert process.returncode == 0, f"{out}\n{err}"


def python_blocks(document: Document) -> list[tuple[str, str]]:
    return [("python", text) for text in document.of_language("python")]


def skip_without_trainer(document: Document) -> None:
    """Skip the test of a guide to a trainer that is not installed."""
    for trainer in TRAINERS:
        is_used = re.search(rf"^(import|from) {trainer}\b", document.text, re.M)
        if is_used and importlib.util.find_spec(trainer) is None:
            pytest.skip(f"{trainer} is not installed")


def commands(document: Document) -> list[tuple[str, str]]:
    """Return the commands, without the installation."""
    blocks = [text for text in document.of_language("sh") if not text.startswith("pip install ")]
    lines = [line for text in blocks for line in text.splitlines()]
    assert all(line.startswith("tstore ") for line in lines)
    return [("sh", line) for line in lines]


def test_every_document_is_tested() -> None:
    listed = {document.path for document in DOCUMENTS}
    folders = (".github", "tests", "codecs", "examples", "bench", "tstore")
    assert {path for folder in folders for path in (ROOT / folder).rglob("*.md")} <= listed


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_every_code_block_has_a_tested_language(document: Document) -> None:
    assert document.text.count("\n```") == 2 * len(document.blocks)
    assert {block.language for block in document.blocks} <= {"python", "sh", "text"}
    assert document is README or not document.of_language("text")


@pytest.mark.parametrize("document", PYTHON, ids=name_of)
def test_python_blocks_run_in_order(document: Document, tmp_path: Path) -> None:
    skip_without_trainer(document)
    run(document, python_blocks(document), tmp_path)


@pytest.mark.parametrize("document", SHELL, ids=name_of)
def test_commands_run_in_order(document: Document, tmp_path: Path) -> None:
    """They run after the Python blocks, whose stores they use."""
    skip_without_trainer(document)
    run(document, python_blocks(document) + commands(document), tmp_path)
    if document is README:
        assert (tmp_path / "out.safetensors").read_bytes() == (tmp_path / "model.safetensors").read_bytes()


def test_the_first_two_commands_install_and_test_a_clone() -> None:
    install, test = README.of_language("sh")[0].splitlines()
    assert install == "pip install -e . && tstore demo"
    assert test.startswith("pip install -e '.[test]' && ")
    assert test.endswith(" && pytest -n auto")


def test_the_documented_layout_matches_a_store(tmp_path: Path) -> None:
    layout = README.of_language("text")[1]
    names = {re.split(r"[/<]", line.split()[0])[0] for line in layout.splitlines()}
    tree = {f"w{i}": [float(i)] * 10 for i in range(3)}
    with override_constants(ARCHIVE_EVERY=8):
        for step in range(72):
            tstore.sync.save(tmp_path / "store", tree, step, durability="none")
        with tstore.sync.open(tmp_path / "store") as store:
            store.collect(tstore.sync.Keep(last=1))
    assert {path.name for path in (tmp_path / "store").iterdir()} <= names
    assert names == {"tstore.json", "archives", "commits", "roots", "txn", "latest"}


def test_the_readme_is_short() -> None:
    assert README.text.count("\n") <= MAX_LINES
    assert len([line for line in README.of_language("python")[0].splitlines() if line.strip()]) <= 12


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_every_link_leads_somewhere(document: Document) -> None:
    by_path = {other.path: other for other in DOCUMENTS}
    for link in document.links:
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (document.path.parent / path).resolve() if path else document.path
        assert target.exists(), link
        assert not anchor or anchor in by_path[target].anchors, link


def test_the_readme_links_every_guide() -> None:
    assert {d.name for d in DOCUMENTS if d.name.startswith("examples/")} <= set(README.links)


LOGGERS = {"tstore.checkpoint", "tstore.log", "tstore.server", "tstore.storage"}


@pytest.mark.parametrize("document", [d for d in DOCUMENTS if d.name != "CHANGELOG.md"], ids=name_of)
def test_every_name_in_the_documents_exists(document: Document) -> None:
    for span in document.code:
        for dotted in re.findall(r"(?<![\w./-])((?:tstore|exmy)(?:\.\w+)+)(?![\w/]|\.\w)", span):
            if dotted != "tstore.json" and dotted not in LOGGERS:
                assert resolves(dotted), dotted


def resolves(dotted: str) -> bool:
    """Return whether the blocking module has the name, or a module of the packages defines or exports it."""
    frameworks = r"(exmy|tstore(?:\.sync)?)\.(jax|torch)|(tstore\.trainers)\.(\w+)"
    if of_framework := re.fullmatch(rf"(?:{frameworks})(?:\.(\w+))?", dotted):
        package, module, name = [*filter(None, of_framework.groups()[:4]), of_framework[5]]
        return name is None or name in exported(package, module)
    for start in (tstore.sync, importlib.import_module(dotted.partition(".")[0])):
        known: Any = start
        for name in dotted.split(".")[1:]:
            if not hasattr(known, name):
                with contextlib.suppress(ImportError, AttributeError):
                    importlib.import_module(f"{known.__name__}.{name}")
            known = getattr(known, name, None)
        if known is not None:
            return True
    return False


def exported(package: str, module: str) -> list[str]:
    """Return `__all__` of a module that imports a framework, which takes seconds, without importing it."""
    folder = ROOT / ("codecs" if package == "exmy" else ".") / package.replace(".", "/")
    path = folder / module / "__init__.py" if (folder / module).is_dir() else folder / f"{module}.py"
    [names] = re.findall(r"^__all__ = (\[.*?\])$", path.read_text(), re.M | re.S)
    listed: list[str] = ast.literal_eval(names)
    return listed


@pytest.mark.parametrize("document", [d for d in DOCUMENTS if d.name != "CHANGELOG.md"], ids=name_of)
def test_every_command_and_option_exists(document: Document) -> None:
    assert isinstance(cli, click.Group)
    options = {
        "--help",
        *(option for command in cli.commands.values() for p in command.params for option in p.opts),
    }
    for span in document.code:
        if command := re.match(r"tstore ([a-z]+)\b", span):
            known = {option for p in cli.commands[command[1]].params for option in p.opts} | {"--help"}
            assert set(re.findall(r"--[a-z-]+", span)) <= known, span
        elif span.startswith("--") and document.name.startswith("examples/guides/"):
            assert span.split()[0] in options, span


def test_the_walks_name_functions_that_exist() -> None:
    walks = README.text.partition("## Reading the source")[2]
    steps = re.findall(r"`([\w.]+)`\s+in\s+`([\w/]+\.py)`", walks)
    assert len(steps) == walks.count(".py`") > 8
    for name, file in steps:
        assert name in definitions(ROOT / "tstore" / file), f"{name} in {file}"


def definitions(path: Path) -> set[str]:
    """Return the functions, classes and methods of a module."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = [n for n in node.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
            names |= {f"{node.name}.{method.name}" for method in methods}
    return names


def test_every_promise_is_held_up_by_tests() -> None:
    document = Document("tests/README.md")
    [table] = re.findall(r"^\| promise \| held up by \|\n\|---\|---\|\n((?:\|.*\n)+)", document.text, re.M)
    for row in table.splitlines():
        promise, proofs = row.strip("| ").rsplit(" | ", 1)
        links = re.findall(r"\[(\w+)\]\(([\w/]+\.py)\)", proofs)
        assert links, promise
        assert ", ".join(f"[{name}]({link})" for name, link in links) == proofs, promise
        for name, link in links:
            assert Path(link).stem == name
            text = (document.path.parent / link).read_text()
            assert re.search(r"^(async )?def test_|^class Test", text, re.M), link


def test_every_folder_of_tests_is_introduced() -> None:
    text = Document("tests/README.md").text
    folders = {path.parent.name for path in (ROOT / "tests").glob("*/*.py")}
    files = {path.name for path in (ROOT / "tests").glob("test_*.py")}
    names = [*(f"{folder}/" for folder in folders), *files]
    assert [name for name in sorted(names) if f"`{name}`" not in text] == []
