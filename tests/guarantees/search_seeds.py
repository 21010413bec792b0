"""Find for each fault of `test_simulation.py` a run that detects it, and rewrite `seeds.json`.

A seed that still detects its fault stays. For each other fault those runs are tried that, without the fault,
execute a line that it changes: the run with the fewest events first.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import operator
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from types import CodeType, FrameType
from typing import Any, NamedTuple

import pytest

from tests.guarantees.test_simulation import MUTATIONS, QUICK, SEEDS
from tests.support.mutation import Edit
from tstore.lab.simulation.runs import simulate
from tstore.lab.simulation.scenario import prepare_initial_stores

Line = tuple[str, int]  # a file and the number of the line


class Run(NamedTuple):
    """A run without a fault: how many events it has, its seed, and which lines with faults it executes."""

    events: int
    seed: int
    lines: set[Line]


def main() -> int:
    """Search, rewrite the table, and return the exit status: 1 if no run detects one of the faults."""
    parser = argparse.ArgumentParser("python -m tests.guarantees.search_seeds", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="number of runs from which to choose")
    parser.add_argument("--all", action="store_true", help="search shorter runs for all faults")
    options = parser.parse_args()
    prepare_initial_stores()
    seeds = {} if options.all else {name: seed for name, seed in QUICK.items() if detects(name, seed)}
    lines = {name: edited_lines(edits) for name, edits in MUTATIONS.items() if name not in seeds}
    runs = sorted(traced(seed, lines) for seed in range(options.seeds if lines else 0))
    for name, own in lines.items():
        tried = [run.seed for run in runs if not own.isdisjoint(run.lines)]
        seed = next((seed for seed in tried if detects(name, seed)), None)
        print(f"{name}: {f'none of {len(tried)} runs' if seed is None else seed}", flush=True)
        if seed is not None:
            seeds[name] = seed
            SEEDS.write_text(json.dumps(QUICK | seeds, indent=2) + "\n")
    return int(seeds.keys() < MUTATIONS.keys())


def detects(name: str, seed: int) -> bool:
    """Return whether a run breaks a promise with a fault."""
    with pytest.MonkeyPatch.context() as patch:
        for edit in MUTATIONS[name]:
            edit.apply(patch)
        return bool(simulate(seed).violations)


def function_of(edit: Edit) -> Any:
    """Return the function that an edit changes."""
    module, _, path = edit.function.partition(":")
    return operator.attrgetter(path)(importlib.import_module(module))


def edited_lines(edits: Sequence[Edit]) -> set[Line]:
    """Return the lines that edits change."""
    lines = set()
    for edit in edits:
        source, first = inspect.getsourcelines(function_of(edit))
        before, _, _ = textwrap.dedent("".join(source)).partition(edit.old)
        start = first + before.count("\n")
        file = inspect.getfile(function_of(edit))
        lines |= {(file, start + i) for i in range(edit.old.count("\n") + 1)}
    return lines


def traced(seed: int, names: Iterable[str]) -> Run:
    """Make a run and note which lines it executes of the functions that these faults change."""
    executed = set[Line]()
    traced_codes = {id(c) for name in names for edit in MUTATIONS[name] for c in codes(function_of(edit).__code__)}

    def note(frame: FrameType, _event: str, _argument: object) -> Any:
        executed.add((frame.f_code.co_filename, frame.f_lineno))
        return note

    def trace(frame: FrameType, _event: str, _argument: object) -> Any:
        return note if id(frame.f_code) in traced_codes else None

    sys.settrace(trace)
    try:
        return Run(len(simulate(seed).trace), seed, executed)
    finally:
        sys.settrace(None)


def codes(code: CodeType) -> Iterator[CodeType]:
    """Yield the code of a function and of all functions in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes(constant)


if __name__ == "__main__":
    sys.exit(main())
