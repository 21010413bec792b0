"""How much code the everyday calls enter: calls, functions and modules of tstore, and the modules that they load.

    python -m bench.breadth

Each call is made in a new process by `tstore.sync`: once unmeasured, then some times with a profiler in all
threads. A call is the entry into a function, comprehension or class body of tstore; a coroutine that goes on after
it has waited is not called again. The figures are medians, since threads share the work differently each time.
"""

from __future__ import annotations

import dis
import functools
import itertools
import json
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from types import CodeType, FrameType
from typing import Any

import click

from bench import program
from bench.report import table

IMPORTS = ("import tstore", "import tstore.sync")
WORKS = {
    "save": "a second save of one array of 16 MiB",
    "restore": "its restore",
    "read": "Array.read of all of it",
    "commit": "a commit of one small array",
}
FIGURES = ("calls", "functions", "modules", "loaded")


class Profile:
    """Counts the calls of tstore's functions, in all threads that start after it is installed, while it is on."""

    def __init__(self) -> None:
        self.calls: Counter[tuple[str, CodeType]] = Counter()
        self.on = False

    def install(self) -> None:
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def figures(self) -> dict[str, int]:
        modules = {module for module, _ in self.calls}
        return {"calls": self.calls.total(), "functions": len(self.calls), "modules": len(modules)}

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        if self.on and event == "call" and frame.f_lasti <= _start(frame.f_code):
            module = frame.f_globals.get("__name__", "")
            if _is_tstore(module):
                self.calls[module, frame.f_code] += 1


@functools.cache
def _start(code: CodeType) -> int:
    """Return the offset at which a function begins; a coroutine that has waited goes on at a later one."""
    return next((i.offset for i in dis.get_instructions(code) if i.opname == "RESUME"), 0)


def _is_tstore(module: str) -> bool:
    return module.partition(".")[0] == "tstore"


def loaded() -> int:
    """Return the number of tstore's modules that this process has imported."""
    return sum(map(_is_tstore, sys.modules))


def prepared(work: str, folder: str) -> Iterator[Callable[[], Any]]:
    """Yield a call of one of the works, again and again, with all that it needs; the first one is the longest."""
    import numpy as np

    import tstore.sync as tstore

    if work == "save":
        first, second = (np.random.default_rng(step).standard_normal((2048, 2048), np.float32) for step in (0, 1))
        for number in itertools.count():
            tstore.save(f"{folder}{number}", {"w": first}, 0)
            yield functools.partial(tstore.save, f"{folder}{number}", {"w": second}, 1)
    folder += "0"
    if work == "restore":
        yield from itertools.repeat(functools.partial(tstore.restore, folder))
    store = tstore.open(folder)
    if work == "read":
        yield from itertools.repeat(store.snapshot().array("w").read)

    def commit(value: int) -> None:
        with store.transaction() as tx:
            array = tx.array("small") if value else tx.create_array("small", (8,), "int64")
            array.write(value)

    for value in itertools.count():
        yield functools.partial(commit, value)


def measure(work: str, folder: str, repeats: int) -> None:
    """Print the figures of one of the works in this new process as JSON."""
    profile = Profile()
    profile.install()
    calls = prepared(work, folder)
    next(calls)()
    modules, rows = loaded(), []
    for call in itertools.islice(calls, repeats):
        profile.calls.clear()
        profile.on = True
        call()
        profile.on = False
        rows.append(profile.figures())
    print(json.dumps({name: median(row[name] for row in rows) for name in rows[0]} | {"loaded": modules}))


def _in_a_new_process(code: str) -> Any:
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout)


def rows(folder: Path, repeats: int) -> dict[str, dict[str, float]]:
    """Return the figures of the imports and the works by name; `folder` is empty at first."""
    report, store = "from bench.breadth import loaded, measure;", str(folder / "store")

    out = {code: {"loaded": _in_a_new_process(f"{report} {code}; print(loaded())")} for code in IMPORTS}
    for work in WORKS:  # the save comes first: the others use the first of its stores
        out[work] = _in_a_new_process(f"{report} measure({work!r}, {store!r}, {repeats})")
    return out


@program.command(__doc__)
@click.option("--repeats", default=5, type=program.COUNT, help="Profiled calls of each work.")
@program.json_option
def main(run: program.Run, repeats: int) -> None:
    measured = rows(run.folder, repeats)
    cells = [
        [WORKS.get(name, name), *(f"{row[f]:,.0f}" if f in row else "–" for f in FIGURES)]
        for name, row in measured.items()
    ]
    run.show(table("breadth", ("", "calls", "functions", "modules entered", "modules loaded"), cells))
    run.write([], **measured)


if __name__ == "__main__":
    main()
