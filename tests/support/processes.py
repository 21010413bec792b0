"""Python processes for tests: start them, wait for them, and end them with the test."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

from tests.support.template import Forked

DEADLINE = 250  # seconds, also on a busy machine


def start(
    code: str, *arguments: object, modules: tuple[str, ...] = (), **options: object
) -> subprocess.Popen[str]:
    """Start a process that runs the code, with tstore and these modules imported, and its output in pipes."""
    return Forked(textwrap.dedent(code), *arguments, modules=modules, **_with_pipes(options))


def start_fresh(code: str, *arguments: object, **options: object) -> subprocess.Popen[str]:
    """Start a new interpreter that runs the code: it has imported nothing, and its memory is its own."""
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(code), *map(str, arguments)]
    return subprocess.Popen(command, **_with_pipes(options))  # type: ignore[call-overload, no-any-return]


def _with_pipes(options: dict[str, object]) -> dict[str, object]:
    environment = {**os.environ, **options.pop("env", {})}  # type: ignore[dict-item]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    return {**pipes, "text": True, "env": environment, **options}


@contextlib.contextmanager
def running(*processes: subprocess.Popen[str]) -> Iterator[None]:
    """End the processes at the end of the block, even after an exception."""
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.communicate(timeout=DEADLINE)


def result(process: subprocess.Popen[str], code: int = 0) -> str:
    """Wait for the process to end with exit status `code`, and return its output."""
    out, err = process.communicate(timeout=DEADLINE)
    assert process.returncode == code, f"exit status {process.returncode}\n{out}\n{err}"
    return out


def python(code: str, *arguments: object, **options: object) -> str:
    """Run the code in a process that has tstore imported, and return its output."""
    process = start(code, *arguments, **options)
    with running(process):
        return result(process)


def fresh_python(code: str, *arguments: object, **options: object) -> str:
    """Run the code in a new interpreter and return its output."""
    process = start_fresh(code, *arguments, **options)
    with running(process):
        return result(process)


_COMMAND = """
    import sys
    from tstore.cli import main
    sys.exit(main())
"""


def start_tstore(*arguments: object, **options: object) -> subprocess.Popen[Any]:
    """Start the command `tstore`, with pipes only as in these options of `Popen`."""
    return Forked(textwrap.dedent(_COMMAND), *arguments, **options)


def run_tstore(*arguments: object, **options: object) -> subprocess.CompletedProcess[str]:
    """Run the command `tstore`, and return its exit status and what it wrote to pipes, as text."""
    process = start_tstore(*arguments, **_with_pipes(options))
    with running(process):
        out, err = process.communicate(timeout=DEADLINE)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def line(process: subprocess.Popen[str]) -> str:
    """Return the next line of the process's output."""
    assert process.stdout is not None
    text = process.stdout.readline()
    assert text, process.communicate(timeout=DEADLINE)[1]
    return text.strip()
