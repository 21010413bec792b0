"""The weight of each array's error in a budget: weights by path, or a loss that measures them.

1. The weight of an array is that of its relative squared error, Σ(x−y)²/Σx² of values x and stored values y. To
   first order, the loss of a model grows by the sum of weight times error over its arrays.
2. A loss is measured with normal noise in one array at a time, whose root mean square is a tenth of the array's.
   The growth of the loss, divided by the error of 1 %, is the weight.
3. Importance i, a weight for each row or column of an array, is a part of the error itself: Σi(x−y)²/Σix². It
   decides the array's step, or its offsets and scales, too.
"""

from __future__ import annotations

import math
import statistics
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tstore.core.data.pieces import ReadJob
from tstore.core.format.arguments import quote
from tstore.core.format.arrays.array_metadata import ArrayMeta
from tstore.core.format.arrays.codecs import FLOATS
from tstore.core.runtime.pool import run
from tstore.core.snapshot import Snapshot
from tstore.errors import InvalidArgument, bullet_list

__all__ = ["Importance", "Loss", "Sensitivity", "measured_importance", "parsed_importance"]

Loss = Callable[[dict[str, npt.NDArray[Any]]], float]
"""A function that returns the loss of a model whose arrays, by path, are passed to it; it must not change them."""

Sensitivity = Mapping[str, float | npt.ArrayLike] | Loss
"""Weights by path: a number for an array, or for each of its rows or columns; or a loss that measures them."""

_NOISE = 0.1  # the root mean square of the noise in an array, divided by that of its values
_LEAST = 0.01  # the least weight, as a fraction of the median: a loss that falls with noise does so by chance


class Importance(NamedTuple):
    """The weight of an array's error, and the weights of its values' squared errors (an array that broadcasts)."""

    weight: float = 1.0
    of_values: npt.NDArray[np.float32] | None = None


def parsed_importance(sensitivity: Mapping[str, Any], arrays: Mapping[str, ArrayMeta]) -> dict[str, Importance]:
    """Return the importance of arrays that the caller passed; raise `InvalidArgument` if it does not fit them."""
    unknown = [repr(path) for path in sensitivity if path not in arrays]
    if unknown:
        raise InvalidArgument(
            f"sensitivity: this checkpoint has no array at these paths; correct them:{bullet_list(unknown)}"
        )
    importance = {path: _parsed(path, value, arrays[path].shape) for path, value in sensitivity.items()}
    for path, (weight, of_values) in importance.items():
        has_effect = weight != 1 or of_values is not None  # reports have 1 for such arrays
        if has_effect and (dtype := arrays[path].dtype).name not in FLOATS:
            raise InvalidArgument(
                f"sensitivity of {path}: arrays of {dtype} are not encoded in eXmY, so a weight has no effect; "
                "leave this array out"
            )
    return importance


def _parsed(path: str, value: Any, shape: tuple[int, ...]) -> Importance:
    try:
        array = np.asarray(value)
        if array.dtype.kind in "cSUTmM":  # NumPy would convert them, without their imaginary parts
            raise TypeError
        numbers = array.astype(np.float64)
    except (TypeError, ValueError, OverflowError):
        raise InvalidArgument(
            f"sensitivity of {path}: {quote(value)} is not a number or an array of numbers"
        ) from None
    if not np.all(np.isfinite(numbers)) or (numbers < 0).any() or not numbers.any():
        raise InvalidArgument(f"sensitivity of {path}: expected finite numbers, none negative and not all zero")
    if numbers.ndim == 0:
        return Importance(float(numbers))
    try:
        np.broadcast_to(numbers, shape)
    except ValueError:
        raise InvalidArgument(
            f"sensitivity of {path}: the shape {numbers.shape} does not broadcast to that of the array, {shape}; "
            f"pass one number{_suitable_shapes(shape)}"
        ) from None
    if numbers.min() == numbers.max():
        return Importance()  # equal weights do not change which error is the least
    return Importance(1.0, (numbers / numbers.max()).astype(np.float32))


def _suitable_shapes(shape: tuple[int, ...]) -> str:
    if len(shape) < 2:
        return f" for each value, of shape {shape}" if shape else ""
    row = (shape[0], *(1 for _ in shape[1:]))
    return f" for each column, of shape {shape[-1:]}, or for each row, of shape {row}"


async def measured_importance(loss: Loss, snapshot: Snapshot, paths: Iterable[str]) -> dict[str, Importance]:
    """Return the importance of these arrays, measured by a loss; the whole checkpoint is in memory meanwhile.

    The loss is called in a thread, one call at a time. Raise `InvalidArgument` if it returns no finite number, or
    if noise in an array never increases it.
    """
    nodes = snapshot.tree.nodes
    arrays = {path: np.empty(nodes[path].meta.shape, nodes[path].meta.dtype) for path in snapshot.paths()}
    await snapshot.read_jobs([ReadJob.of(nodes[path], array) for path, array in arrays.items()])
    start = _number(await run(loss, dict(arrays)), "the original arrays")
    growth = {}
    for path in [path for path in paths if np.isfinite(arrays[path]).all()]:  # the others are not encoded
        candidate = arrays | {path: await run(_with_noise, path, arrays[path])}
        growth[path] = (_number(await run(loss, candidate), f"noise in {path}") - start) / _NOISE**2
    grown = [each for each in growth.values() if each > 0]
    if growth and not grown:
        raise InvalidArgument(
            "sensitivity: the loss does not grow when any of the arrays gets 10 % of noise; expected a function "
            "that evaluates the model with the arrays passed to it"
        )
    least = _LEAST * statistics.median(grown) if grown else 0.0
    return {path: Importance(max(each, least)) for path, each in growth.items()}


def _with_noise(path: str, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the values with noise that depends on the path alone."""
    rng = np.random.default_rng(zlib.crc32(path.encode("utf-8", "surrogatepass")))
    wide = values.astype(np.float64)
    peak = float(np.abs(wide).max(initial=0)) or 1.0
    noise = rng.standard_normal(values.shape) * (_NOISE * math.sqrt(float(np.mean(np.square(wide / peak)))))
    with np.errstate(over="ignore"):
        noisy = (wide + peak * noise).astype(values.dtype)
    return np.where(np.isfinite(noisy), noisy, values)


def _number(value: Any, what: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise InvalidArgument(f"sensitivity: the loss with {what} is {quote(value)}; expected a finite number")
    return number
