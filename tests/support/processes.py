"""Python processes for tests: start them, wait for them, and end them with the test."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator

DEADLINE = 60


def start(code: str, *arguments: object, **options: object) -> subprocess.Popen[str]:
    """Start a process that runs the code, with its output as text in pipes."""
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code), *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **options.pop("env", {})},  # type: ignore[dict-item]
        **options,  # type: ignore[call-overload]
    )


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
    """Run the code in a new process and return its output."""
    process = start(code, *arguments, **options)
    with running(process):
        return result(process)


def line(process: subprocess.Popen[str]) -> str:
    """Return the next line of the process's output."""
    assert process.stdout is not None
    text = process.stdout.readline()
    assert text, process.communicate(timeout=DEADLINE)[1]
    return text.strip()
