"""Python processes for tests: started, waited for, and ended with the test."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator

DEADLINE = 60


def start(code: str, *arguments: object, **options: object) -> subprocess.Popen[str]:
    """A process that runs the code; its output is text, in pipes."""
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
    """Ends the processes with the block, whatever happens in it."""
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.communicate(timeout=DEADLINE)


def result(process: subprocess.Popen[str], code: int = 0) -> str:
    """What the process printed, once it has ended; its exit status must be `code`."""
    out, err = process.communicate(timeout=DEADLINE)
    assert process.returncode == code, f"exit status {process.returncode}\n{out}\n{err}"
    return out


def python(code: str, *arguments: object, **options: object) -> str:
    """What the code prints, run in a process of its own."""
    process = start(code, *arguments, **options)
    with running(process):
        return result(process)


def line(process: subprocess.Popen[str]) -> str:
    """The next line that the process prints."""
    assert process.stdout is not None
    text = process.stdout.readline()
    assert text, process.communicate(timeout=DEADLINE)[1]
    return text.strip()
