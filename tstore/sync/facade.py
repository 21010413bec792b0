"""The blocking counterparts of async functions and objects."""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from typing import Any, TypeVar

from tstore.core.runtime.event_loops import BACKGROUND
from tstore.errors import Misuse

__all__ = ["BLOCKING_TYPES", "BlockingWrapper", "blocking", "call_unwrapped", "iterated", "unwrapped", "wraps"]


T = TypeVar("T")


class BlockingWrapper:
    """The blocking counterpart of an async object, to which all calls are delegated."""

    def __init__(self, wrapped: Any) -> None:
        self._wrapped = self.__wrapped__ = wrapped  # for `inspect.unwrap`

    def __repr__(self) -> str:
        return repr(self._wrapped).replace("<tstore.", "<tstore.sync.", 1)


BLOCKING_TYPES: dict[type, type[BlockingWrapper]] = {}
"""The blocking type of each async type."""


def blocking(call: Any, module: str = "tstore.sync") -> Any:
    """Return the blocking version of a function, method or property, which takes and returns blocking objects.

    `module` becomes the `__module__` of the blocking version.
    """
    if isinstance(call, property):
        return property(blocking(call.fget))

    @wraps(call)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        result = call_unwrapped(call, *args, **kwargs)
        if isinstance(result, AsyncGenerator):
            return iterated(result)
        if isinstance(result, Coroutine):
            result = BACKGROUND.run(result)
        blocking_type = BLOCKING_TYPES.get(type(result))
        return result if blocking_type is None else blocking_type(result)

    wrapper.__module__ = module
    wrapper.__doc__ = call.__doc__ and call.__doc__.replace("`async with`", "`with`")
    return wrapper


_iterations: set[AsyncGenerator[Any, None]] = set()
"""Iterations under way, referenced here so that the cycle collector cannot close their generators concurrently."""


def iterated(items: AsyncGenerator[T, None]) -> Iterator[T]:
    """Yield the items of an iteration, which ends when this generator is closed."""
    end: Any = object()

    async def next_item() -> T:  # a coroutine, which `anext` does not return
        return await anext(items, end)

    async def close() -> None:
        await items.aclose()

    _iterations.add(items)
    try:
        while (item := BACKGROUND.run(next_item())) is not end:
            yield item
    finally:
        with contextlib.suppress(Misuse):  # on the loop itself, which then closes the iteration, and at exit
            BACKGROUND.run(close())
        _iterations.discard(items)


def wraps(call: Any) -> Callable[[Any], Any]:
    """Decorate the blocking version of a function as `functools.wraps` does; its signature has its result."""

    def decorate(wrapper: Any) -> Any:
        functools.update_wrapper(wrapper, call)
        returned = re.sub(r"^AsyncGenerator\[(.*), None\]$", r"AsyncIterator[\1]", call.__annotations__["return"])
        awaited = r"Coroutine\[Any, Any, (.*)\]|(Array|Snapshot)Call|Async(Iterator.*)"
        result = re.sub(f"^(?:{awaited})$", r"\1\2\3", returned)
        if result != returned:  # `inspect.signature` would show the one of `call`
            wrapper.__signature__ = inspect.signature(call).replace(return_annotation=result)
        return wrapper

    return decorate


def call_unwrapped(call: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a function with the wrapped async object of each blocking argument, and return the result."""
    return call(*map(unwrapped, args), **{name: unwrapped(value) for name, value in kwargs.items()})


def unwrapped(value: Any) -> Any:
    """Return the async object in a blocking one, any other value unchanged."""
    return value._wrapped if isinstance(value, BlockingWrapper) else value
