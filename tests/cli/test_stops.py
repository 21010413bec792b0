"""Ctrl-C and SIGTERM while a hostile file or store is parsed: the process ends, whatever the parser is doing."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import processes
from tests.support.polling import blocking_until

MOST = 15  # seconds of CPU time until the process has ended; parsing takes minutes

STOPS = [(signal.SIGINT, 130), (signal.SIGTERM, 143)]


@pytest.fixture(scope="module")
def pickled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of torch.save whose pickle has 33 million opcodes."""
    path = tmp_path_factory.mktemp("files") / "long.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", b"\x80\x02" + b"N0" * (1 << 24) + b"}.")
    return path


def wait_until_it_reads(process: subprocess.Popen[Any], path: Path) -> None:
    """Wait until a process has mapped a file."""
    maps = Path(f"/proc/{process.pid}/maps")
    blocking_until(lambda: str(path) in maps.read_text() or process.poll() is not None)
    assert process.poll() is None


@contextlib.contextmanager
def soon() -> Iterator[None]:
    """Check that the process that ends in this block took little CPU time; a busy machine changes nothing."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    yield
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < MOST


def ended(process: subprocess.Popen[Any], code: int) -> str:
    """Return what a process printed, which must end soon with this exit status."""
    with soon():
        _, err = process.communicate(timeout=processes.DEADLINE)
    assert process.returncode == code, err
    return str(err)


@pytest.mark.parametrize(("stop", "code"), STOPS)
def test_a_parser_in_a_thread(stop: signal.Signals, code: int, pickled: Path, tmp_path: Path) -> None:
    arguments = "import", "--trust", pickled, tmp_path / "store", "--step", "1"
    process = processes.start_tstore(*arguments, stderr=subprocess.PIPE, text=True)
    with processes.running(process):
        wait_until_it_reads(process, pickled)
        process.send_signal(stop)
        assert "every commit is complete or absent" in ended(process, code)
    assert not (tmp_path / "store").exists()


BUSY_LOOP = """
    import os, sys
    from tstore.cli.console import run

    async def work(progress):
        print("begin", flush=True)
        if sys.argv[1] == "parses":
            while True:
                pass

    sys.exit(run(work, print, False))
"""


@pytest.mark.parametrize("ignoring", [False, True], ids=["", "without Ctrl-C"])
@pytest.mark.parametrize(("stop", "code"), STOPS)
def test_a_parser_in_the_event_loop(stop: signal.Signals, code: int, ignoring: bool) -> None:
    if ignoring and stop == signal.SIGINT:
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN if ignoring else signal.default_int_handler)
    try:
        process = processes.start_fresh(BUSY_LOOP, "parses")
    finally:
        signal.signal(signal.SIGINT, before)
    with processes.running(process):
        assert processes.line(process) == "begin"
        process.send_signal(stop)
        assert "every commit is complete or absent" in ended(process, code)


IMPORTING = """
import sys, time
print("importing", flush=True)
while True:
    try:
        time.sleep(100)
    except BaseException as error:  # as a module may
        print("an import was interrupted by", repr(error))
"""


@pytest.mark.parametrize("module", ["numpy", "click", "exmy"])
@pytest.mark.parametrize(
    ("options", "out"),
    [([], ""), (["--json"], '{"error": {"type": "Interrupted", "message": "interrupted"}}\n')],
    ids=["", "json"],
)
def test_ctrl_c_during_an_import(module: str, options: list[str], out: str, tmp_path: Path) -> None:
    (tmp_path / f"{module}.py").write_text(IMPORTING)
    path = os.pathsep.join([str(tmp_path), *sys.path])
    process = subprocess.Popen(
        [sys.executable, "-m", "tstore", "ls", "store", *options],
        env=os.environ | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with processes.running(process):
        assert processes.line(process) == "importing"
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=processes.DEADLINE) == (out, "tstore: interrupted\n")
        assert process.returncode == 130


IMPORT = """
    import sys
    import tstore.sync as tstore
    from tstore.convert.importing import import_torch_file
    from tstore.sync.facade import blocking
    try:
        blocking(import_torch_file)(sys.argv[1], "memory://x", 1)
    except KeyboardInterrupt:
        print("interrupted")
"""


def test_a_blocking_call(pickled: Path) -> None:
    process = processes.start(IMPORT, pickled)
    with processes.running(process):
        wait_until_it_reads(process, pickled)
        process.send_signal(signal.SIGINT)
        with soon():
            assert processes.result(process) == "interrupted\n"
