"""Checks of arguments that are stored: text, tags, steps, numbers and JSON; pure, no I/O.

A call with a value that readers would refuse must fail before any data is written, because records are never
deleted. The rules are those of readers: text is UTF-8, integers have 64 bits, and nesting is far below the limit
of every parser.
"""

from __future__ import annotations

import datetime
import functools
import math
import numbers
import operator
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from tstore.core.format.bounds import (
    MAX_METRICS,
    METADATA_BYTES,
    METADATA_LEVELS,
    METADATA_VALUES,
    msgpack_excess_message,
)
from tstore.errors import InvalidArgument

__all__ = [
    "checked_attributes",
    "checked_budget",
    "checked_commit_timeout",
    "checked_duration",
    "checked_index",
    "checked_indices",
    "checked_metadata",
    "checked_metadata_values",
    "checked_metrics",
    "checked_name",
    "checked_step",
    "checked_tag",
    "checked_text",
    "quote",
    "step_number",
]

_STEP_TAG = re.compile(r"step/(0|[1-9][0-9]{0,17})")

_DEFAULT_TIMEOUT = 300.0  # seconds
_NAME_BYTES = 1024
_MIN_INT, _MAX_INT = -(1 << 63), (1 << 64) - 1
_MAX_STEP = 10**18 - 1
_MAX_LEVELS = METADATA_LEVELS - 1  # nesting below the outermost mapping
_TOO_DEEP = f"expected at most {_MAX_LEVELS} levels of nesting"
_MAX_QUOTED = 60
_MAX_KEYS_QUOTED = 8
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


def checked_text(argument: str, value: Any, max_size: int = 64 << 10) -> str:
    """Return text as a plain `str`; raise `InvalidArgument` if it is not text, not valid Unicode, or too long."""
    if not isinstance(value, str):
        raise InvalidArgument(f"{argument}={quote(value)}: expected text (str)")
    try:
        text = _valid_text(value)
    except _Refusal as refusal:
        raise refusal.error(argument) from None
    size = len(text.encode())
    if size > max_size:
        raise InvalidArgument(f"{argument}={quote(text)} has {size} bytes; expected at most {max_size}")
    return text


def checked_name(argument: str, value: Any) -> str:
    """Return a name; raise `InvalidArgument` if it is not one line of text of at most 1 KiB."""
    text = checked_text(argument, value, _NAME_BYTES)
    if _CONTROL.search(text):
        raise InvalidArgument(f"{argument}={quote(value)}: expected one line without control characters")
    return text


def checked_tag(argument: str, value: Any) -> str:
    """Return a tag.

    Raise `InvalidArgument` if `checked_name` does, or if the tag is empty, has only digits, has white space at an
    end, or begins with `step/` without a valid step after it.
    """
    tag = checked_name(argument, value)
    if not tag or tag != tag.strip() or tag.isdigit():
        raise InvalidArgument(
            f"{argument}={quote(tag)}: expected text that is not a number and has no spaces at its ends"
        )
    if tag.startswith("step/") and not _STEP_TAG.fullmatch("/".join(tag.split("/")[:2])):
        raise InvalidArgument(
            f"{argument}={quote(tag)}: a tag that begins with 'step/' names a checkpoint's step; expected a "
            "number of up to 18 digits without leading zeros after it, such as 'step/7', or another tag"
        )
    return tag


@functools.lru_cache(1 << 16)  # each save looks at all tags
def step_number(tag: str) -> int | None:
    """Return the step whose checkpoint has the tag, or None if the tag is not `step/<number>`."""
    match = _STEP_TAG.fullmatch(tag)
    return None if match is None else int(match[1])


def checked_step(step: Any) -> int:
    """Return a step as an `int`; raise `InvalidArgument` unless it is an integer from 0 to 10^18 - 1."""
    try:
        number = None if isinstance(step, bool) else operator.index(step)
    except TypeError:
        number = None
    if number is None or not 0 <= number <= _MAX_STEP:
        raise InvalidArgument(f"step {quote(step)}: expected an integer of up to 18 digits, 0 or more")
    return number


def checked_index(argument: str, value: Any) -> int:
    """Return an integer of any type as an `int`; raise `InvalidArgument` for any other value."""
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise InvalidArgument(f"{argument}={quote(value)}: expected an integer") from None


def checked_host(host: Any, hosts: Any) -> tuple[int, int]:
    """Return the number of a host and of all hosts; raise `InvalidArgument` unless there is such a host."""
    host, hosts = checked_index("host", host), checked_index("hosts", hosts)
    if not 0 <= host < hosts:
        raise InvalidArgument(f"host={host}, hosts={hosts}: expected a host from 0 to hosts - 1")
    return host, hosts


def checked_choice(argument: str, value: Any, choices: Sequence[str | None]) -> None:
    """Raise `InvalidArgument` unless a value is among the choices."""
    if not isinstance(value, str | None) or value not in choices:
        *others, last = map(repr, choices)
        raise InvalidArgument(f"{argument}={quote(value)}: expected {', '.join(others)} or {last}")


def checked_function(argument: str, value: Any) -> None:
    """Raise `InvalidArgument` unless a value is a function or None."""
    if value is not None and not callable(value):
        raise InvalidArgument(f"{argument}={quote(value)}: expected a function")


def checked_budget(budget: Any) -> int | None:
    """Return a number of bytes to read, or None for all; raise `InvalidArgument` for anything else."""
    if budget is None:
        return None
    if isinstance(budget, bool) or not isinstance(budget, int | np.integer) or budget < 1:
        raise InvalidArgument(f"budget={quote(budget)}: expected a number of bytes, at least 1, or None for all")
    return int(budget)


def checked_indices(argument: str, values: Any) -> list[int]:
    """Return a sequence of integers as a list; raise `InvalidArgument` for anything else."""
    try:
        return [checked_index(argument, value) for value in values]
    except (TypeError, InvalidArgument):
        raise InvalidArgument(f"{argument}={quote(values)}: expected a sequence of integers") from None


def checked_commit_timeout(timeout: float | None) -> float:
    """Return the timeout in seconds, or the default; raise `InvalidArgument` unless it is a positive number."""
    if timeout is None:
        return _DEFAULT_TIMEOUT
    if not (isinstance(timeout, numbers.Real) and timeout > 0):
        raise InvalidArgument(f"timeout={quote(timeout)}: expected a number of seconds above 0, or None")
    return timeout


def checked_duration(argument: str, value: Any) -> datetime.timedelta:
    """Return a duration; raise `InvalidArgument` unless it is a timedelta of at least zero."""
    if not isinstance(value, datetime.timedelta) or value < datetime.timedelta(0):
        raise InvalidArgument(f"{argument}={quote(value)}: expected a timedelta of at least zero")
    return value


def checked_attributes(attributes: Any, argument: str = "attributes") -> dict[str, Any]:
    """Return a copy of attributes with only JSON types; NumPy scalars become Python's, and tuples lists.

    Raise `InvalidArgument`, naming the key, for NaN, infinity, an integer beyond 64 bits, a type that JSON lacks,
    text that is not valid Unicode, a key that is not text, or more than 100 levels below the attributes.
    """
    if attributes is None:
        return {}
    try:
        return _json_object(attributes, 0)
    except _Refusal as refusal:
        raise refusal.error(argument) from None


def checked_metrics(metrics: Any, argument: str = "metrics") -> dict[str, float]:
    """Return metrics as Python numbers by name; raise `InvalidArgument` for anything but numbers of 64 bits.

    Scalars and 0-d arrays of any library are accepted, and so are NaN and infinity: a diverged loss must not fail
    a save. `Keep(best=…)` ignores such values.
    """
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping):
        raise InvalidArgument(f"{argument}={quote(metrics)}: expected a mapping of names to numbers")
    numbers: dict[str, float] = {}
    key: Any = None
    try:
        for key, value in metrics.items():
            numbers[_key(key)] = _number(value)
    except _Refusal as refusal:
        raise refusal.below(key).error(argument) from None
    return numbers


def checked_metadata(metadata: Any) -> dict[str, Any]:
    """Return a copy of a commit's metadata: its `metrics` checked as metrics, the rest as attributes.

    Raise `InvalidArgument` for metadata that a record can't contain or that are too large for it.
    """
    checked = checked_metadata_values(metadata)
    if (count := len(checked.get("metrics", ()))) > MAX_METRICS:
        raise InvalidArgument(f"{count:,} metrics; a commit has at most {MAX_METRICS:,}: store them as an array")
    packed = msgspec.msgpack.encode(checked)
    excess = msgpack_excess_message(packed, METADATA_VALUES, METADATA_LEVELS)
    if excess or len(packed) > METADATA_BYTES:
        raise InvalidArgument(
            f"metadata: {excess or f'{len(packed)} bytes'} are too many for the record of a commit; expected at "
            f"most {METADATA_VALUES} values in {METADATA_BYTES} bytes: store them as an array"
        )
    return checked


def checked_metadata_values(metadata: Any) -> dict[str, Any]:
    """Return a copy of a commit's metadata; check its values, but not its size, which decoding checks."""
    metrics: dict[str, float] | None = None
    if isinstance(metadata, Mapping) and "metrics" in metadata:
        metrics = checked_metrics(metadata["metrics"], "metadata['metrics']")
        metadata = {key: value for key, value in metadata.items() if key != "metrics"}
    checked = checked_attributes(metadata, "metadata")
    if metrics is not None:
        checked["metrics"] = metrics
    return checked


class _Refusal(Exception):
    """Raised for a value that cannot be stored, with the reason and the keys that lead to the value."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.keys: list[Any] = []

    def below(self, key: Any) -> _Refusal:
        """Prepend the key of the enclosing container to `keys`, and return the exception."""
        self.keys.insert(0, key)
        return self

    def error(self, argument: str) -> InvalidArgument:
        """Return the error that names the argument and the keys."""
        keys = "".join(f"[{quote(key)}]" for key in self.keys[:_MAX_KEYS_QUOTED])
        more = "…" if len(self.keys) > _MAX_KEYS_QUOTED else ""
        return InvalidArgument(f"{argument}{keys}{more}: {self.reason}")


def _json_value(value: Any, level: int) -> Any:
    value_type = type(value)
    if (value_type is str and value.isascii()) or value is None or value_type is bool:
        return value
    if value_type is int and _MIN_INT <= value <= _MAX_INT:
        return value
    if value_type is list or value_type is tuple:
        return _json_list(value, level)
    if isinstance(value, str):
        return _valid_text(value)
    if isinstance(value, Mapping):
        return _json_object(value, level)
    if isinstance(value, (list, tuple)):
        return _json_list(value, level)
    return _json_scalar(value)


def _json_object(value: Any, level: int) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise _Refusal(f"expected a mapping of names to values, not {quote(value)}")
    if level > _MAX_LEVELS:
        raise _Refusal(_TOO_DEEP)
    members: dict[str, Any] = {}
    key: Any = None
    try:
        for key, item in value.items():
            known = type(key) is str and key.isascii()
            members[key if known else _key(key)] = _json_value(item, level + 1)
    except _Refusal as refusal:
        raise refusal.below(key) from None
    return members


def _json_list(value: Sequence[Any], level: int) -> list[Any]:
    if level > _MAX_LEVELS:
        raise _Refusal(_TOO_DEEP)
    elements: list[Any] = []
    try:
        for item in value:
            elements.append(_json_value(item, level + 1))
    except _Refusal as refusal:
        raise refusal.below(len(elements)) from None
    return elements


def _key(key: Any) -> str:
    if not isinstance(key, str):
        raise _Refusal(f"expected text as a key, not {quote(key)}")
    return _valid_text(key)


def _json_scalar(value: Any) -> Any:
    """Return a number as a JSON type."""
    if isinstance(value, np.bool_):
        return bool(value)
    if not (isinstance(value, (int, float, np.generic)) or (isinstance(value, np.ndarray) and not value.ndim)):
        raise _Refusal(f"{quote(value)} is not a JSON value; expected numbers, text, None, lists and mappings")
    number = _number(value)
    if not math.isfinite(number):
        raise _Refusal(f"JSON has no {number}; expected a finite number, text or None")
    return number


def _number(value: Any) -> float:
    """Return the number in a scalar or 0-d array of any library."""
    if type(value) is float:
        return value
    try:
        if isinstance(value, (str, bytes, bytearray)) or getattr(value, "shape", ()) != ():
            raise TypeError
        try:
            number: float = operator.index(value)
        except TypeError:
            number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise _Refusal(f"expected a number, not {quote(value)}") from None
    if isinstance(number, int) and not _MIN_INT <= number <= _MAX_INT:
        raise _Refusal("the integer does not fit in 64 bits; pass a float or text")
    return number


def _valid_text(text: str) -> str:
    """Return the text as a plain `str`; raise `_Refusal` if it can't be encoded as UTF-8."""
    if type(text) is str and text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        raise _Refusal(f"the text {quote(text)} is not valid Unicode: it has lone surrogates") from None
    return str.__str__(text)


def quote(value: Any) -> str:
    """Quote a value of any type on one short line of an error message."""
    try:
        text = ascii(value[:_MAX_QUOTED]) if isinstance(value, (str, bytes)) else " ".join(repr(value).split())
    except Exception as error:  # repr may raise, for example for an integer of 5,000 digits
        return f"a value of type {type(value).__name__} ({type(error).__name__} from its repr)"
    return text if len(text) <= _MAX_QUOTED else f"{text[:_MAX_QUOTED]}…"
