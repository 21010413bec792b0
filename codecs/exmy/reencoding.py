"""Encode an array again after some of its values have changed; the other values stay exactly the same.

Decoded values are exact under the scale that they were decoded with, but seldom under another one. Scales of
the encodings "e4m3" and "6bit" are multiples of a unit, which depends on the largest of several groups. So a unit
is replaced only where that changes no other value.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from exmy import reference
from exmy.elements import Array, Kind, as_flat
from exmy.groups import Groups
from exmy.packing import packed_size
from exmy.quantized import Quantized
from exmy.quantizer import encode_elements, unclipped_scales
from exmy.scales import GroupScales, ScaleMultiples

__all__ = ["requantize"]


def requantize(x: Any, former: Quantized) -> Quantized:
    """Quantize x, some of whose values differ from those of `former`, with float scales of the same encoding.

    Each group keeps its scale, or gets another one with the same unit, or all groups that share the unit get a new
    one: whichever has the least error without clipping a value or changing one that is unchanged since `former`.
    A power of two times the old scale usually changes none. If every scale clips or changes values, take one that
    does not clip. Raise as `quantize` does.
    """
    elements, kind, _ = as_flat(x)
    groups, scales = former.groups, former.group_scales
    assert scales is not None
    min_scale = unclipped_scales(elements, kind, former.format, groups)
    if not elements.size:
        return former
    before, _, _ = as_flat(former.dequantize(former.dtype))
    is_kept = _bits(elements) == _bits(before)
    group = groups.index(0, elements.size)

    def errors(candidate: NDArray[np.float32]) -> NDArray[np.float64]:
        """Return the squared error of each group, infinite if a value clips or an unchanged value would change."""
        after, _, _ = as_flat(_encoded(elements, kind, former, _exact(candidate, groups)).dequantize(former.dtype))
        error = reference.widen(after, kind) - reference.widen(elements, kind)
        error[is_kept & (_bits(after) != _bits(elements))] = np.inf
        return np.where(candidate < min_scale, np.inf, np.bincount(group, error * error, min_scale.size))

    old_values = scales.values.reshape(-1)
    octaves = np.maximum(np.ceil(np.log2(min_scale / old_values.astype(np.float64))), 0)
    fitting = min_scale * np.float32(reference.clipping_limit(former.format.layout) / former.format.max)
    raised_values = np.ldexp(old_values, octaves.astype(np.int32))
    if scales.encoding == "float":
        candidates = np.stack([old_values, raised_values, fitting])
        by_error = np.stack([errors(values) for values in candidates])
        best = np.where(np.isinf(by_error).all(axis=0), 2, by_error.argmin(axis=0))
        chosen_scales = _exact(np.take_along_axis(candidates, best[None], axis=0)[0], groups)
    else:
        old = ScaleMultiples.parse(scales.encoding, scales.stored, groups)
        chosen, unclipped = old, old.nearest(fitting)[1]
        for other in (*old.nearest(raised_values), unclipped):
            chosen = chosen.where(errors(chosen.values) <= errors(other.values), other)
        chosen = chosen.where(np.isfinite(errors(chosen.values)), unclipped)
        new = ScaleMultiples.largest(scales.encoding, fitting, groups).nearest(fitting)[1]
        for other in (old.raised(octaves), new):
            chosen = other.where(other.whole_runs(errors(other.values) <= errors(chosen.values)), chosen)
        chosen = chosen.where(chosen.whole_runs(chosen.values >= min_scale), new)
        chosen_scales = chosen.group_scales
    return _encoded(elements, kind, former, chosen_scales)


def _exact(values: NDArray[np.float32], groups: Groups) -> GroupScales:
    return GroupScales.from_values(values.reshape(groups.counts))


def _encoded(elements: Array, kind: Kind, former: Quantized, scales: GroupScales) -> Quantized:
    """Return elements in the format and groups of `former` with other scales."""
    f, groups = former.format, former.groups
    packed = np.empty(packed_size(elements.size, f.bits), np.uint8)
    encode_elements(
        elements, kind, f, groups, former.offsets, scales.values, packed, False, 1, None, positive_zero=False
    )
    return Quantized(f, groups, former.offsets, scales, packed, former.dtype)


def _bits(elements: Array) -> Array:
    """Return the bits of elements, as unsigned integers."""
    return elements.view(np.dtype(f"u{elements.itemsize}"))
