"""Calls of which the result is awaited, or used at once: `await store.snapshot().array("w")[0:10].read()`."""

from __future__ import annotations

from collections.abc import Coroutine, Generator
from typing import Any, TypeVar

import numpy.typing as npt

from tstore.core.array import Array, Verify
from tstore.core.data.casting import Casting
from tstore.core.format.arrays.indices import Index

__all__ = ["ArrayCall", "Call"]

T_co = TypeVar("T_co", covariant=True)


class Call(Coroutine[Any, Any, T_co]):
    """A coroutine to which subclasses add methods of its result, each of which returns a coroutine too."""

    def __init__(self, work: Coroutine[Any, Any, T_co]) -> None:
        self._work = work

    def __await__(self) -> Generator[Any, Any, T_co]:
        return self._work.__await__()

    def send(self, value: Any, /) -> Any:
        """Do what `send` of a coroutine does."""
        return self._work.send(value)

    def throw(self, *error: Any) -> Any:
        """Do what `throw` of a coroutine does."""
        return self._work.throw(*error)

    def close(self) -> None:
        """Do what `close` of a coroutine does."""
        self._work.close()


class ArrayCall(Call[Array]):
    """An array that is awaited, or read or written at once: `await snapshot.array("w")[0:10].read()`."""

    def __getitem__(self, index: Index) -> ArrayCall:
        """Return the view that NumPy's indexing selects, to be awaited, read or written."""

        async def view() -> Array:
            return (await self)[index]

        return ArrayCall(view())

    __iter__ = None

    async def read(self, out: npt.NDArray[Any] | None = None) -> npt.NDArray[Any]:
        """Return the values as `Array.read` does."""
        return await (await self).read(out)

    async def map(self, verify: Verify = "first") -> npt.NDArray[Any]:
        """Return the values as `Array.map` does."""
        return await (await self).map(verify)

    async def write(self, values: npt.ArrayLike, casting: Casting = "same_kind") -> None:
        """Stage values as `Array.write` does."""
        await (await self).write(values, casting)
