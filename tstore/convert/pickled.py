"""Pickles read as data: values are built, and nothing that a pickle names is imported or called.

`pickletools` splits a pickle into opcodes, and `parse_pickle` runs those that build values. A name like
`torch.Size` becomes a `Name`, and a call or an object of a class becomes an `Instance`, for the reader to
interpret. A reader may pass a list of allowed names, so that all others are refused; or it puts an `Unreadable` in
the place of what it does not interpret.

A pickle may refer to one value many times, so that its expansion may be exponentially longer than the pickle.
Readers therefore count the values that they visit with `Visits`, which also limits the opcodes, their memory, and
the time that numbers as keys of dicts take.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from tstore.core.format.tree_document import NumberKeys
from tstore.errors import Corrupt, UnsupportedFormat

__all__ = ["Instance", "Name", "PersistentId", "Unreadable", "Visits", "check_key", "parse_pickle"]

_MAX_OPCODES = 1 << 26  # 100 MB of metadata of torch.distributed.checkpoint have 54 million
_MAX_VISITS = 1 << 22
_MEMORY = 64 << 20  # bytes for the values of any pickles
_MEMORY_PER_BYTE = 24  # more, for each byte of a pickle
_MAX_SHOWN = 100  # characters of a name in a message
_MAX_KEY = 1 << 14  # characters, bytes or bits of a key of a dict


class Name(NamedTuple):
    """A class or function that a pickle refers to."""

    module: str
    name: str


class PersistentId(NamedTuple):
    """A pickle's identifier of an object that is stored outside of the pickle."""

    value: Any


class Instance:
    """The result of calling `function`, which may be a class, with `arguments`.

    `state` is what the opcode BUILD set, `items` are what SETITEM and SETITEMS set, and `values` what APPEND and
    APPENDS add. Each is None if not set.
    """

    __slots__ = ("arguments", "function", "items", "state", "values")

    def __init__(self, function: Name, arguments: tuple[Any, ...]) -> None:
        self.function, self.arguments = function, arguments
        self.state: Any = None
        self.items: dict[Any, Any] | None = None
        self.values: list[Any] | None = None


class Unreadable:
    """A placeholder for a value that tstore does not store, with its description for messages."""

    __slots__ = ("what",)

    def __init__(self, what: str) -> None:
        self.what = what


class Visits:
    """Counts the values of one or more pickles that a reader visits; raises `Corrupt` if they are too many.

    `opcodes_left` is how many more opcodes the pickles may have together; `keys` inserts the keys of all dicts.
    """

    def __init__(self, subject: str) -> None:
        self._subject, self._count, self.keys = subject, 0, NumberKeys()
        self.opcodes_left, self._memory_left = _MAX_OPCODES, _MEMORY

    def add(self) -> None:
        """Count one value."""
        self._count += 1
        if self._count > _MAX_VISITS:
            raise Corrupt(f"{self._subject} is a pickle of more than {_MAX_VISITS} values; check where it is from")

    def add_memory(self, size: int) -> None:
        """Count approximate bytes of memory; a negative count raises the allowance."""
        self._memory_left -= size
        if self._memory_left < 0:
            raise UnsupportedFormat(
                f"{self._subject} is a pickle whose values take more than {_MEMORY_PER_BYTE} times its size in "
                "memory, which tstore does not read; load it with PyTorch and save it with tstore.torch"
            )


_Names = Collection[tuple[str, str]]


def parse_pickle(data: bytes, allowed: _Names | None, subject: str, visits: Visits, *, enums: _Names = ()) -> Any:
    """Return the value of a pickle, which may refer only to the `allowed` names; count its opcodes in `visits`.

    If `allowed` is None, it may refer to any. If not, a function named `getattr`, if allowed, may only be called
    for a member of one of the `enums`, which Python 3.11.0 to 3.11.3 pickles so. Raise `UnsupportedFormat` for any
    other name, and for opcodes that are too many or not supported; raise `Corrupt` for bytes that are not a
    pickle. `subject` names the pickle in errors.
    """
    machine = _Machine(allowed, enums, subject, visits)
    visits.add_memory(-_MEMORY_PER_BYTE * len(data))
    try:
        for opcode, argument, _ in pickletools.genops(data):
            visits.opcodes_left -= 1
            if visits.opcodes_left < 0:
                raise UnsupportedFormat(
                    f"{subject} has pickles of more than {_MAX_OPCODES} opcodes, which tstore does not read; load "
                    "it with PyTorch and save it with tstore.torch"
                )
            visits.add_memory(_MEMORY_OF.get(opcode.name, 40))
            handler = _HANDLERS.get(opcode.name)
            if handler is not None:
                handler(machine, argument)
            elif opcode.name not in _IGNORED:
                raise UnsupportedFormat(
                    f"{subject} has the pickle opcode {opcode.name}, which tstore does not read"
                )
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, OverflowError, MemoryError) as error:
        raise Corrupt(f"{subject} is not a valid pickle: {error!r:.200}; check where it is from") from error
    return machine.result


def check_key(key: Any) -> None:
    """Raise `ValueError` for a key of a dict that may take long to hash or to compare, or overflow the C stack.

    A pickle may use one long key many times. Containers are refused, because they may be deep or endless.
    """
    if isinstance(key, (str, bytes)):
        size = len(key)
    elif isinstance(key, (int, float, Instance)):
        size = key.bit_length() if isinstance(key, int) else 0
    else:
        raise ValueError(f"a key of type {type(key).__name__}")
    if size > _MAX_KEY:
        raise ValueError(f"a key that is too long, of type {type(key).__name__}")


class _Machine:
    """The stack and the memo of a pickle while it is read."""

    def __init__(self, allowed: _Names | None, enums: _Names, subject: str, visits: Visits) -> None:
        self.stack: list[Any] = []
        self.outer_stacks: list[list[Any]] = []  # for each open mark, the stack before it
        self.memo: list[Any] = []
        self.result: Any = None
        self._allowed, self._enums, self._subject, self._visits = allowed, enums, subject, visits

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def pop(self) -> Any:
        return self.stack.pop()

    def pop_to_mark(self) -> list[Any]:
        items, self.stack = self.stack, self.outer_stacks.pop()
        return items

    def push_name(self, module: str, name: str) -> None:
        if self._allowed is not None and (module, name) not in self._allowed:
            raise self._refused(f"{module}.{name}")
        self.push(Name(module, name))

    def _refused(self, what: str) -> UnsupportedFormat:
        return UnsupportedFormat(
            f"{self._subject} refers to {what[:_MAX_SHOWN]}, which is neither a tensor nor a plain container or "
            "number, so tstore does not load it; save the checkpoint without that object"
        )

    def call(self) -> None:
        arguments, function = self.pop(), self.pop()
        if not isinstance(function, Name) or not isinstance(arguments, tuple):
            raise ValueError("a call of something that is not a name")
        if self._allowed is not None and function.name == "getattr":
            owner, name = arguments
            if not isinstance(owner, Name) or owner not in self._enums or not isinstance(name, str):
                raise self._refused("an attribute, by builtins.getattr")
        self.push(Instance(function, arguments))

    def build(self) -> None:
        state, target = self.pop(), self.stack[-1]
        if not isinstance(target, Instance):
            raise ValueError("a state for something that is not an object")
        target.state = state

    def set_items(self, pairs: list[Any]) -> None:
        target = self.stack[-1]
        if isinstance(target, Instance):
            if target.items is None:
                target.items = {}
            target = target.items
        if not isinstance(target, dict) or len(pairs) % 2:
            raise ValueError("items for something that is not a dict")
        self._visits.add_memory(_MEMORY_OF_ITEM * (len(pairs) // 2))
        for key, value in zip(pairs[::2], pairs[1::2], strict=True):
            if isinstance(key, tuple):
                raise UnsupportedFormat(f"{self._subject} has a dict with a tuple as a key; use text as keys")
            check_key(key)
            self._visits.keys.insert(target, key, value)

    def push_dict_to_mark(self) -> None:
        items = self.pop_to_mark()
        self.push({})
        self.set_items(items)

    def append(self, values: list[Any]) -> None:
        target = self.stack[-1]
        if isinstance(target, Instance):
            if target.values is None:
                target.values = []
            target = target.values
        if not isinstance(target, list):
            raise ValueError("values for something that is not a list")
        target.extend(values)

    def put(self, index: int) -> None:
        if not 0 <= index <= len(self.memo):  # picklers number their values from 0 on
            raise ValueError(f"memo index {index} for value {len(self.memo)}")
        self.memo[index : index + 1] = self.stack[-1:]

    def get(self, index: int) -> None:
        if index < 0:
            raise ValueError("a negative memo index")
        self.push(self.memo[index])

    def mark(self) -> None:
        self.outer_stacks.append(self.stack)
        self.stack = []

    def tuple_of(self, count: int) -> None:
        if len(self.stack) < count:
            raise ValueError("a tuple longer than the stack")
        items = self.stack[len(self.stack) - count :]
        del self.stack[len(self.stack) - count :]
        self.push(tuple(items))

    def stop(self) -> None:
        self.result = self.pop()

    def push_name_from_stack(self) -> None:
        name, module = self.pop(), self.pop()
        if not isinstance(name, str) or not isinstance(module, str):
            raise ValueError("a name that is not text")
        self.push_name(module, name)


_Handler = Callable[[_Machine, Any], object]

_NUMBERS = ("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT")
_STRINGS = ("UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8")
_BYTES = ("BINBYTES", "SHORT_BINBYTES", "BINBYTES8")
_IGNORED = frozenset({"PROTO", "FRAME"})

_SHARED = (
    "NONE",
    "NEWTRUE",
    "NEWFALSE",
    "EMPTY_TUPLE",
    "BININT1",
    "DUP",
    "POP",
    "POP_MARK",
    "STOP",
    "PROTO",
    "FRAME",
)
_MEMO = ("MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT", "GET", "BINGET", "LONG_BINGET")
_CONTAINERS = ("EMPTY_DICT", "EMPTY_LIST", "LIST", "DICT", "MARK", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3")
_OBJECTS = ("REDUCE", "NEWOBJ", "BINPERSID", "GLOBAL", "STACK_GLOBAL", "APPEND", "APPENDS")
_MEMORY_OF = {
    **dict.fromkeys((*_SHARED, *_MEMO), 10),
    **dict.fromkeys((*_CONTAINERS, *_OBJECTS), 80),
    **dict.fromkeys(("SETITEM", "SETITEMS"), 180),
}
"""The maximum bytes of an opcode's result, not counting the content of numbers and texts; 40 for others."""

_MEMORY_OF_ITEM = 60
"""The bytes that a dict takes for an item, besides the key and the value."""

_HANDLERS: dict[str, _Handler] = {
    **{name: lambda m, value: m.push(value) for name in (*_NUMBERS, *_STRINGS, *_BYTES)},
    "NONE": lambda m, _: m.push(None),
    "NEWTRUE": lambda m, _: m.push(True),
    "NEWFALSE": lambda m, _: m.push(False),
    "EMPTY_DICT": lambda m, _: m.push({}),
    "EMPTY_LIST": lambda m, _: m.push([]),
    "EMPTY_TUPLE": lambda m, _: m.push(()),
    "MARK": lambda m, _: m.mark(),
    "POP": lambda m, _: m.pop(),
    "POP_MARK": lambda m, _: m.pop_to_mark(),
    "DUP": lambda m, _: m.push(m.stack[-1]),
    "TUPLE": lambda m, _: m.push(tuple(m.pop_to_mark())),
    "TUPLE1": lambda m, _: m.tuple_of(1),
    "TUPLE2": lambda m, _: m.tuple_of(2),
    "TUPLE3": lambda m, _: m.tuple_of(3),
    "LIST": lambda m, _: m.push(m.pop_to_mark()),
    "DICT": lambda m, _: m.push_dict_to_mark(),
    "APPEND": lambda m, _: m.append([m.pop()]),
    "APPENDS": lambda m, _: m.append(m.pop_to_mark()),
    "SETITEM": lambda m, _: m.set_items([*reversed((m.pop(), m.pop()))]),
    "SETITEMS": lambda m, _: m.set_items(m.pop_to_mark()),
    "GLOBAL": lambda m, text: m.push_name(*text.split(" ", 1)),
    "STACK_GLOBAL": lambda m, _: m.push_name_from_stack(),
    "REDUCE": lambda m, _: m.call(),
    "NEWOBJ": lambda m, _: m.call(),
    "BUILD": lambda m, _: m.build(),
    "BINPERSID": lambda m, _: m.push(PersistentId(m.pop())),
    "MEMOIZE": lambda m, _: m.put(len(m.memo)),
    "STOP": lambda m, _: m.stop(),
    **{name: lambda m, index: m.put(index) for name in ("PUT", "BINPUT", "LONG_BINPUT")},
    **{name: lambda m, index: m.get(index) for name in ("GET", "BINGET", "LONG_BINGET")},
}
