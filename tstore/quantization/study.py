"""The study of an array: its exponents, and what it would cost, in bytes and in error, in every eXmY format.

1. All values are read once, for their exponents; that also tells whether all are finite.
2. Every format of every width is tried on a sample (`exmy.survey`).
3. Where all values share one offset, the best formats of each width are then tried on all values: a few outliers
   that no sample sees can decide the error. Of rows and blocks the error is estimated by the sample.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import exmy
import numpy as np

from tstore.format.array_metadata import ArrayMeta
from tstore.quantization.rechunk import encoded_meta, stored_bytes
from tstore.quantization.values import Values

__all__ = ["Configuration", "Study", "exponents_of", "fit_tensor", "nonfinite_reason", "study"]

Configuration = Mapping[str, Any]
"""A configuration of the codec exmy: "format", and what shares an offset ("axis", "block", "scale")."""


class Study(NamedTuple):
    """What is known of an array: how many values are not finite, the sum of squares, and what formats would cost.

    Each candidate is a configuration, the bytes of the array in it, and its expected squared error.
    """

    path: str
    nonfinite: int
    signal: float
    candidates: Sequence[tuple[Configuration, int, float]]


def study(values: Values, recipe: Configuration, widths: range) -> Study:
    """The study of an array for formats of some widths, all with the granularity and scale of `recipe`."""
    meta = values.meta
    exponents = exponents_of(values)
    if exponents.count < meta.size:
        return Study(values.path, meta.size - exponents.count, 0.0, [])
    shared = {key: value for key, value in recipe.items() if key != "format"}
    sample = values.sample(recipe.get("axis") if recipe.get("block") is None else None)
    surveyed = exmy.survey(sample, widths, **shared)
    if shared:
        signal = sum(exmy.compare(x, x).signal for x in values.slabs())
        errors = [(c.format.standard, signal * c.noise / c.signal if c.signal else 0.0) for c in surveyed]
    else:
        all_seen = sample.size == meta.size or exmy.exponents(sample).highest == exponents.highest
        fits = fit_tensor(values, _contenders(surveyed, all_seen=all_seen))
        errors = [(fit.format.standard, fit.noise or 0.0) for fit in fits]
        signal = fits[0].signal
    return Study(values.path, 0, signal, [_candidate(meta, recipe, f, error) for f, error in errors])


def _candidate(
    meta: ArrayMeta, recipe: Configuration, f: exmy.Format, error: float
) -> tuple[Configuration, int, float]:
    configuration = {**recipe, "format": f.name}
    return configuration, stored_bytes(encoded_meta(meta, configuration)), error


def _contenders(surveyed: Sequence[exmy.Candidate], *, all_seen: bool) -> list[exmy.Format]:
    """The best two formats of each width; where the sample missed the largest values, also wider ranges."""
    chosen: set[tuple[int, int]] = set()
    for bits in {found.format.bits for found in surveyed}:
        best = sorted((c for c in surveyed if c.format.bits == bits), key=lambda c: c.noise)[:2]
        more = (0,) if all_seen else (0, 1, 2)
        chosen |= {(bits, c.format.exponent_bits + k) for c in best for k in more}
    return [c.format.standard for c in surveyed if (c.format.bits, c.format.exponent_bits) in chosen]


def fit_tensor(
    values: Values, formats: Iterable[exmy.Format | str], scale: Literal["search", "max"] = "search"
) -> list[exmy.TensorFit]:
    """The offset that all values share in each of the formats, found slab by slab."""
    fits = [exmy.TensorFit(f, values.meta.size, scale) for f in formats]
    while open_ := [fit for fit in fits if not fit.done]:
        for slab in values.slabs():
            for fit in open_:
                fit.add(slab)
        for fit in open_:
            fit.end_pass()
    return fits


def exponents_of(values: Values) -> exmy.Exponents:
    """The exponents of all values that are finite."""
    nothing = exmy.exponents(np.zeros(0, values.meta.dtype))
    return sum((exmy.exponents(x, nonfinite="saturate") for x in values.slabs()), nothing)


def nonfinite_reason(count: int, size: int) -> str:
    """Why an array that holds NaN or infinity stays as it is."""
    return f"{count} of {size} values are NaN or infinite"
