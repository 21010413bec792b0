"""The placements of a PyTorch DTensor: how each axis of a device mesh shards or replicates the tensor.

Placements apply from left to right, one per mesh axis, each to the part that the earlier ones left to a device.

* Shard splits a dimension as `torch.chunk` does: one piece per device, all equal except for the last ones.
* A strided shard (FSDP2 over tensor parallelism) splits a dimension into `split_factor` pieces, splits each of
  these into one part per device, and gives every device one part of each piece.

So a device may hold several runs of a dimension. Its regions of the tensor are the products of the runs of all
dimensions. If all lengths divide evenly, they are the shards of a `P`.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tstore.errors import InvalidArgument
from tstore.sharding.boxes import Index, checked_int, common_shard_shape
from tstore.sharding.spec import P

__all__ = ["Placements", "PlacementsLayout"]

Runs = tuple[tuple[int, int], ...]
"""The start and stop of each run of a dimension, in the order of the local tensor."""


class _Cut(NamedTuple):
    """The number and size of a mesh axis that cuts a dimension, and the split factor of its placement."""

    axis: int
    size: int
    split_factor: int


class Placements(tuple[Any, ...]):
    """The placements of a DTensor, one for each axis of its device mesh.

    `Placements(*tensor.placements)`, or without torch `Placements("replicate", ("shard", 0))` and
    `Placements(("strided_shard", 0, 2), ("shard", 0))`. Raise `InvalidArgument` for any other placement, such as
    Partial: its values are still to be summed.
    """

    __slots__ = ()

    def __new__(cls, *placements: Any) -> Placements:
        """Create the placements; those of torch become "replicate" or tuples such as ("shard", 0)."""
        return super().__new__(cls, (_normalized(placement) for placement in placements))

    @staticmethod
    def from_spec(spec: P, sizes: Mapping[str, int], shape: Sequence[int]) -> Placements:
        """Return the placements over a mesh with axes of these sizes that give every device the shard of a spec.

        Raise `InvalidArgument` if there are none: where several axes shard a dimension and do not divide its
        length evenly, torch splits it in other places.
        """
        by_axis: list[Any] = ["replicate"] * len(sizes)
        layout = spec.layout(sizes, shape)
        for dimension, axes in enumerate(layout.axes):
            for number, (axis, _) in enumerate(axes):
                outer = [size for other, size in axes[:number] if other > axis]  # axes that apply later
                strided = ("strided_shard", dimension, math.prod(outer))
                by_axis[axis] = strided if outer else ("shard", dimension)
        placements = Placements(*by_axis)
        uneven = [d for d, (n, axes) in enumerate(zip(layout.shape, layout.axes, strict=True)) if _uneven(n, axes)]
        torch_layout = placements.layout(tuple(sizes.values()), shape)
        for coordinates in itertools.product(*map(range, sizes.values())) if uneven else ():
            regions = [i for i in layout.regions(coordinates) if all(part.start < part.stop for part in i)]
            if torch_layout.regions(coordinates) != regions:
                raise InvalidArgument(
                    f"{spec!r} has no placements for shape {layout.shape}: several axes of mesh {dict(sizes)} "
                    f"shard dimension {uneven[0]} and do not divide its length, so that torch cuts it elsewhere; "
                    "shard it over one axis, or pad it"
                )
        return placements

    def layout(self, sizes: Sequence[int], shape: Sequence[int]) -> PlacementsLayout:
        """Return the layout of a tensor over a device mesh of these sizes.

        Raise `InvalidArgument` unless there is a placement for each axis of the mesh, and all sharded dimensions
        exist.
        """
        lengths = tuple(checked_int(n, f"a dimension of shape {tuple(shape)}", 0) for n in shape)
        if len(self) != len(sizes):
            raise InvalidArgument(f"{self!r} has {len(self)} placements, but the mesh has {len(sizes)} axes")
        cuts: list[list[_Cut]] = [[] for _ in lengths]
        for axis, (placement, size) in enumerate(zip(self, sizes, strict=True)):
            if dimension_and_factor := _dimension_and_factor(placement):
                dimension, split_factor = dimension_and_factor
                if not -len(lengths) <= dimension < len(lengths):
                    raise InvalidArgument(
                        f"{self!r} shards dimension {dimension}, but shape {lengths} has {len(lengths)} dimensions"
                    )
                cuts[dimension].append(_Cut(axis, size, split_factor))
        replica_axes = tuple(axis for axis, placement in enumerate(self) if placement == "replicate")
        by_dimension = tuple(map(tuple, cuts))
        shard_shape = tuple(_shard_length(n, its_cuts) for n, its_cuts in zip(lengths, by_dimension, strict=True))
        return PlacementsLayout(lengths, shard_shape, by_dimension, replica_axes)

    def __getnewargs__(self) -> tuple[Any, ...]:
        return tuple(self)

    def __repr__(self) -> str:
        return f"Placements({', '.join(map(repr, self))})"


class PlacementsLayout(NamedTuple):
    """The layout of a tensor over a device mesh.

    `cuts` has the cuts of each dimension in the order in which they apply. Devices that differ only along
    `replica_axes` hold the same elements. `shard_shape` is the `common_shard_shape` of all regions.
    """

    shape: tuple[int, ...]
    shard_shape: tuple[int, ...]
    cuts: tuple[tuple[_Cut, ...], ...]
    replica_axes: tuple[int, ...]

    def regions(self, coordinates: Sequence[int]) -> list[Index]:
        """Return the regions, possibly none, of the device with these coordinates on the mesh."""
        return [index for index, _ in self.parts(coordinates)]

    def parts(self, coordinates: Sequence[int]) -> list[tuple[Index, Index]]:
        """Return each region of a device as its index in the whole tensor and in the device's local tensor."""
        by_dimension = []
        for dimension in range(len(self.shape)):
            placed, local_start = [], 0
            for start, stop in self.runs(dimension, coordinates):
                local_stop = local_start + stop - start
                placed.append((slice(start, stop), slice(local_start, local_stop)))
                local_start = local_stop
            by_dimension.append(placed)
        return [
            (tuple(whole for whole, _ in product), tuple(local for _, local in product))
            for product in itertools.product(*by_dimension)
        ]

    def runs(self, dimension: int, coordinates: Sequence[int]) -> Runs:
        """Return the runs of a dimension that the device with these coordinates holds."""
        cuts = self.cuts[dimension]
        return _runs(self.shape[dimension], cuts, [coordinates[cut.axis] for cut in cuts])


def _normalized(placement: Any) -> Any:
    """Return a placement of torch, or of this module, as "replicate", ("shard", …) or ("strided_shard", …)."""
    if type(placement).__module__.partition(".")[0] == "torch" and hasattr(placement, "is_partial"):
        if placement.is_replicate():
            return "replicate"
        if placement.is_partial() or not hasattr(placement, "dim"):
            raise InvalidArgument(
                f"placement {placement!r} has no final values yet; call "
                "tensor.redistribute(placements=…) with Shard or Replicate first"
            )
        if hasattr(placement, "split_factor"):
            return ("strided_shard", int(placement.dim), int(placement.split_factor))
        return ("shard", int(placement.dim))
    match placement:
        case "replicate" | ("replicate",):
            return "replicate"
        case ("shard", int(dimension)):
            return ("shard", dimension)
        case ("strided_shard", int(dimension), int(split_factor)) if split_factor > 0:
            return ("strided_shard", dimension, split_factor)
    raise InvalidArgument(
        f"placement {placement!r:.100}: expected one of torch, 'replicate', ('shard', dimension) or "
        "('strided_shard', dimension, split_factor)"
    )


def _uneven(n: int, axes: Sequence[tuple[int, int]]) -> bool:
    """Return whether several axes, given as (number, size), shard a length that they do not divide evenly."""
    return len(axes) > 1 and n % math.prod(size for _, size in axes) > 0


def _dimension_and_factor(placement: Any) -> tuple[int, int] | None:
    """Return the dimension that a placement shards, and its split factor; None for "replicate"."""
    match placement:
        case ("shard", dimension):
            return dimension, 1
        case ("strided_shard", dimension, split_factor):
            return dimension, split_factor
    return None


@functools.lru_cache(1024)  # most arrays of a checkpoint share their lengths and cuts
def _shard_length(n: int, cuts: tuple[_Cut, ...]) -> int:
    """Return the `common_shard_shape` of all devices' runs, for one dimension."""
    positions = itertools.product(*(range(cut.size) for cut in cuts))
    runs = {run for position in positions for run in _runs(n, cuts, position)}
    [length] = common_shard_shape((n,), [(slice(start, stop),) for start, stop in runs])
    return length


def _runs(n: int, cuts: Sequence[_Cut], position: Sequence[int]) -> Runs:
    """Return the runs of a dimension of length n held by the device at this position along the cutting axes."""
    runs: Runs = ((0, n),) if n else ()
    for cut, number in zip(cuts, position, strict=True):
        pieces = [_chunk(runs, cut.split_factor, i) for i in range(cut.split_factor)]
        runs = _joined([run for piece in pieces for run in _chunk(piece, cut.size, number)])
    return runs


def _chunk(runs: Runs, count: int, number: int) -> Runs:
    """Divide runs into `count` pieces, equal in length except for the last ones; return piece `number`."""
    length = -(-sum(stop - start for start, stop in runs) // count)
    first, end, offset = number * length, (number + 1) * length, 0
    piece = []
    for start, stop in runs:
        low, high = max(start, start + first - offset), min(stop, start + end - offset)
        if low < high:
            piece.append((low, high))
        offset += stop - start
    return tuple(piece)


def _joined(runs: Sequence[tuple[int, int]]) -> Runs:
    """Join adjacent runs."""
    joined: list[tuple[int, int]] = []
    for start, stop in runs:
        if joined and joined[-1][1] == start:
            start = joined.pop()[0]
        joined.append((start, stop))
    return tuple(joined)
