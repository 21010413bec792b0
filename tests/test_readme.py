"""Every code block of the README and every example is executed, as a reader would."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.weights import real_weights

ROOT = Path(__file__).resolve().parent.parent
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
PYTHON = [text for kind, text in BLOCKS if kind == "python"]
SHELL = [text for kind, text in BLOCKS if kind == "sh"]


def run(command: list[str], folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, f"{shlex.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_python_blocks_in_order(tmp_path: Path) -> None:
    assert len(PYTHON) == 16
    for text in PYTHON:
        run([sys.executable, "-W", "error", "-c", text], tmp_path)


def test_every_promise_is_held_up_by_tests_that_are_there() -> None:
    text = (ROOT / "README.md").read_text()
    [table] = re.findall(r"^\| promise \| held up by \|\n\|---\|---\|\n((?:\|.*\n)+)", text, re.M)
    for row in table.splitlines():
        promise, proofs = row.strip("| ").rsplit(" | ", 1)
        links = re.findall(r"\[(\w+)\]\((tests/[\w/]+\.py)\)", proofs)
        assert ", ".join(f"[{name}]({link})" for name, link in links) == proofs, promise
        for name, link in links:
            assert Path(link).stem == name
            assert re.search(r"^(async )?def test_|^class Test", (ROOT / link).read_text(), re.M), link


def test_every_link_to_a_file_of_the_repository_leads_there() -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", (ROOT / "README.md").read_text())
    assert len(links) > 20
    for link in links:
        assert "://" in link or (ROOT / link.partition("#")[0]).exists(), link


def test_the_example_has_at_most_twelve_lines() -> None:
    for text in PYTHON[:2]:
        assert len([line for line in text.splitlines() if line.strip()]) <= 12


def test_command_line_block(tmp_path: Path) -> None:
    shutil.copy(real_weights(), tmp_path / "model.safetensors")
    [commands] = [text for text in SHELL if text.startswith("tstore ")]
    for line in commands.splitlines():
        run([sys.executable, "-m", *shlex.split(line)], tmp_path)
    assert (tmp_path / "out.safetensors").read_bytes() == real_weights().read_bytes()


def test_install_blocks_are_the_two_that_ci_runs() -> None:
    rest = [text for text in SHELL if not text.startswith("tstore ")]
    assert [text.count("\n") for text in rest] == [1, 1]
    assert rest[0] == "pip install -e . && tstore demo\n"
    assert rest[1].startswith("pip install -e '.[test]' && ")
    assert rest[1].endswith("&& pytest -n auto\n")


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.stem)
def test_examples(example: Path, tmp_path: Path) -> None:
    assert run([sys.executable, "-W", "error", str(example)], tmp_path)
