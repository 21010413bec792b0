"""Calls whose result can be awaited or chained: `await store.snapshot().array("w")[0:10].read()`."""

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
    """A coroutine with the methods of its result, added by subclasses; each method returns a coroutine too."""

    def __init__(self, work: Coroutine[Any, Any, T_co]) -> None:
        self._work = work

    def __await__(self) -> Generator[Any, Any, T_co]:
        return self._work.__await__()

    def send(self, value: Any, /) -> Any:
        """See `Coroutine.send`."""
        return self._work.send(value)

    def throw(self, *error: Any) -> Any:
        """See `Coroutine.throw`."""
        return self._work.throw(*error)

    def close(self) -> None:
        """See `Coroutine.close`."""
        self._work.close()


class ArrayCall(Call[Array]):
    """An array to await, or to read or write in a chained call: `await snapshot.array("w")[0:10].read()`."""

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
