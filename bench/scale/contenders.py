"""A store with many chunks, arrays or commits: the interface of all contenders, and tstore.

A store has either an array `big` of many chunks of 64 bytes beside an array `small`, or groups of `GROUP` arrays.
Element n of `big` and `small` is `value_at(n)`, and the elements of array n of the groups are n.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from bench.cost import Cost, measured

WIDTH = 8
"""The int64 values of a chunk, 64 bytes."""

GROUP = 10
"""The arrays of a group."""

_MULTIPLIER = -7046029254386353131  # 2⁶⁴ ÷ the golden ratio, modulo 2⁶⁴
_SMALL = 4  # chunks of the array `small`

Values = npt.NDArray[np.int64]


class Contender:
    """One process that uses the store in a folder; its methods that return a `Cost` check what they read."""

    title: ClassVar[str]

    def __init__(self, number: int, count: int, folder: Path) -> None:
        self.folder = str(folder)
        self.prepare()

    def prepare(self) -> None:
        """Set up the library."""

    def prepare_to_list(self) -> None:
        """Import what only listing needs."""

    def write(self, chunks: int) -> Cost:
        """Create a store with an array `big` of this number of chunks, and the array `small`."""
        big, small = _values(chunks * WIDTH), _values(_SMALL * WIDTH)
        return measured(lambda: self.create({"big": big, "small": small}))

    def write_arrays(self, count: int) -> Cost:
        """Create a store with this number of arrays in groups."""
        arrays = {array_name(n): np.full(4, n) for n in range(count)}
        return measured(lambda: self.create_arrays(arrays))

    def read_one(self, name: str, index: int, value: int) -> Cost:
        """Read one element of the newest version of an array; the first call opens the store."""
        values: list[int] = []
        cost = measured(lambda: values.append(int(self.read(name, index))))
        if values != [value]:
            raise ValueError(f"element {index} of {name} is {values[0]}, not {value}")
        return cost

    def list_one(self, number: int) -> Cost:
        """List the arrays of the group of that number."""
        self.prepare_to_list()
        first = number * GROUP
        expected = sorted(array_name(n).rpartition("/")[2] for n in range(first, first + GROUP))
        names: list[str] = []
        cost = measured(lambda: names.extend(self.names(array_name(first).rpartition("/")[0])))
        if sorted(names) != expected:
            raise ValueError(f"group {number} has the arrays {names}, not {expected}")
        return cost

    def restore_group(self, number: int) -> Cost:
        """Open the store and read the first element of each array of the group of that number."""
        first = number * GROUP
        paths = [array_name(n) for n in range(first, first + GROUP)]
        values: list[int] = []
        cost = measured(lambda: values.extend(map(int, self.read_group(paths))))
        if values != list(range(first, first + GROUP)):
            raise ValueError(f"group {number} has the values {values}")
        return cost

    def change(self, chunks: Sequence[int], value: int) -> Cost:
        """Set the elements of these chunks of `big` to the value, in a commit for each; return the cost of one."""
        values = np.full(WIDTH, value)

        def commits() -> None:
            for chunk in chunks:
                self.commit(slice(chunk * WIDTH, (chunk + 1) * WIDTH), values)

        return measured(commits).per(len(chunks))

    def create(self, arrays: dict[str, Values]) -> None:
        """Create a store with these arrays, in chunks of 64 bytes."""
        raise NotImplementedError

    def create_arrays(self, arrays: dict[str, Values]) -> None:
        """Create a store with these small arrays."""
        raise NotImplementedError

    def read(self, name: str, index: int) -> Any:
        """Return an element of the newest version of an array."""
        raise NotImplementedError

    def read_group(self, paths: Sequence[str]) -> list[Any]:
        """Return the first element of each array of one group."""
        return [self.read(path, 0) for path in paths]

    def names(self, group: str) -> list[str]:
        """Return the names of the arrays of a group."""
        raise NotImplementedError

    def commit(self, index: slice, values: Values) -> None:
        """Commit new values of elements of `big`."""
        raise NotImplementedError


def array_name(number: int) -> str:
    """Return the path of the array of that number."""
    return f"group{number // GROUP:06}/array{number % GROUP}"


class TStore(Contender):
    title = "tstore"

    def prepare(self) -> None:
        import tstore

        self.tstore = tstore
        self.runner = asyncio.Runner()

    def prepare_to_list(self) -> None:
        from tstore.cli import main

        self.command = main

    @cached_property
    def store(self) -> Any:
        return self.runner.run(self.tstore.open(self.folder, "r+"))

    def create(self, arrays: dict[str, Values]) -> None:
        async def work() -> None:
            async with await self.tstore.open(self.folder, "x") as store, store.transaction() as tx:
                for name, values in arrays.items():
                    array = await tx.create_array(name, values.shape, "int64", chunks=(WIDTH,))
                    await array.write(values)

        self.runner.run(work())

    def create_arrays(self, arrays: dict[str, Values]) -> None:
        tree: dict[str, dict[str, Values]] = {}
        for path, values in arrays.items():
            group, _, name = path.rpartition("/")
            tree.setdefault(group, {})[name] = values
        self.runner.run(self.tstore.save(self.folder, tree, 0))

    def read(self, name: str, index: int) -> Any:
        async def work(store: Any) -> Any:
            snapshot = await store.snapshot()
            return await (await snapshot.array(name))[index].read()

        return self.runner.run(work(self.store))

    def read_group(self, paths: Sequence[str]) -> list[Any]:
        group = paths[0].rpartition("/")[0]
        tree = self.runner.run(self.tstore.restore(self.folder, only=f"{group}/**"))
        return [tree[group][path.rpartition("/")[2]][0] for path in paths]

    def names(self, group: str) -> list[str]:
        with contextlib.redirect_stdout(io.StringIO()) as output:
            self.command(["ls", self.folder, group, "--json"])
        return [array["path"].rpartition("/")[2] for array in json.loads(output.getvalue())["arrays"]]

    def commit(self, index: slice, values: Values) -> None:
        async def work(store: Any) -> None:
            async with store.transaction() as tx:
                await (await tx.array("big"))[index].write(values)

        self.runner.run(work(self.store))


def value_at(index: int) -> int:
    """Return the value of an element of `big` or `small` when it is created; their chunks can't be compressed."""
    value = index * _MULTIPLIER % 2**64
    return value - 2**64 if value >= 2**63 else value


def _values(count: int) -> Values:
    """Return the values of the first elements."""
    return np.arange(count) * np.int64(_MULTIPLIER)
