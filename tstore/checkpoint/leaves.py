"""The leaves of a checkpoint: arrays of NumPy, PyTorch, JAX and others, and one host's part of a sharded array."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import exmy
import numpy as np
import numpy.typing as npt

from tstore.core.format.arguments import quote
from tstore.core.format.arrays.array_metadata import dtype_named
from tstore.errors import InvalidArgument

if TYPE_CHECKING:  # mesh arithmetic is imported on first use
    from tstore.sharding import Halo, Index

__all__ = [
    "NO_LEAF",
    "Destination",
    "HostValues",
    "PackedShards",
    "PerHost",
    "ShardLayout",
    "Shards",
    "as_values",
    "dtype_of",
    "state_advice",
]

NO_LEAF = "in the target stands for no array; put None there, and select the other leaves with only=…"
"""Why an object in a target is refused."""

Bounds = tuple[tuple[int, int], ...]
"""The start and stop of a region along each axis."""

_ADVICE = {
    "torch": "save the tree with tstore.torch.save, which takes tensors of all dtypes, and DTensors",
    "jax": "save the tree with tstore.jax.save, which takes PRNG keys and arrays of many processes",
    "jaxlib": "save the tree with tstore.jax.save, which takes PRNG keys and arrays of many processes",
    "tstore": "pass its values, which array.read() returns",
}

_MAX_REASON_LENGTH = 200


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class ShardLayout:
    """Where the parts of a `Shards` lie: an index and a shape for each.

    Arrays with the same sharding share one layout, so that derived values are computed once.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    shard_shape: tuple[int, ...]
    indices: tuple[Index, ...]
    part_shapes: tuple[tuple[int, ...], ...]


class Shards:
    """The regions of an array that one host saves or restores.

    `parts` maps an index (a tuple of slices, one per axis) to its values, or is an iterable of such pairs (before
    Python 3.12 a slice can't be a key). None in place of values asks `restore` for them. `shard_shape` is the
    shape of a full shard, the same on every host; chunks never cross the edge of a shard. By default it is the
    largest length of this host's parts along each axis.

    Examples
    --------
    >>> import tstore.sync as tstore
    >>> top = np.ones((2, 3))  # this host has the upper half of an array
    >>> shards = tstore.Shards((4, 3), "float64", [((slice(0, 2), slice(0, 3)), top)])
    >>> shards.shape, [index for index, _ in shards.parts]
    ((4, 3), [(slice(0, 2, None), slice(0, 3, None))])
    """

    def __init__(
        self,
        shape: Sequence[int],
        dtype: Any,
        parts: Mapping[Any, Any] | Iterable[tuple[Any, Any]] = (),
        *,
        shard_shape: Sequence[int] | None = None,
    ) -> None:
        shape, dtype = _lengths("shape", shape), dtype_named(dtype)
        regions: dict[Bounds, Any] = {}
        for index, values in _pairs(parts):
            bounds = _bounds(index, shape)
            if bounds in regions:
                raise InvalidArgument(f"the region {bounds} is passed twice; pass each region once")
            regions[bounds] = values
        sizes = tuple(tuple(b - a for a, b in bounds) for bounds in regions)
        if shard_shape is None:
            shard_shape = [max(s) for s in zip(*sizes, strict=True)] if sizes else shape
        shard_shape = _lengths("shard_shape", shard_shape)
        if len(shard_shape) != len(shape):
            raise InvalidArgument(f"shard_shape={shard_shape} and shape={shape} differ in their number of axes")
        indices = tuple(tuple(slice(a, b) for a, b in bounds) for bounds in regions)
        self._fill(ShardLayout(shape, dtype, shard_shape, indices, sizes), list(regions.values()))

    def _fill(self, layout: ShardLayout, parts: Sequence[Any]) -> None:
        self.replica_checksum: bytes | None = None  # compared by a save if every host has the whole array
        self.layout = layout
        self.shape, self.dtype, self.shard_shape = layout.shape, layout.dtype, layout.shard_shape
        self.values = [v if v is None else _checked_values(layout, i, v) for i, v in enumerate(parts)]

    @staticmethod
    def of(
        values: Any,
        mesh: Any,
        spec: Any,
        host: int,
        *,
        replicas: Literal["first", "split"] = "first",
        min_bytes: int = 1 << 20,
    ) -> Shards:
        """Return what `host` saves of a whole array: by default, views of the shards whose replica 0 it has.

        The mesh is a `Mesh`, a jax Mesh or a torch DeviceMesh, the spec a `P`, a jax PartitionSpec or
        `Placements`. With `replicas="split"` the replicas of a shard divide the shard into equal pieces of about
        `min_bytes` or more, at most one for each replica. On a host that holds no shard, `values` may be anything
        with a shape and a dtype. Raise `InvalidArgument` for a host or an axis that the mesh does not have.
        """
        from tstore.sharding import Mesh, ReplicaSplit

        mesh = Mesh.of(mesh)
        if not (hasattr(values, "shape") and hasattr(values, "dtype")):
            raise InvalidArgument(
                f"values is a {_type_name(values)}; expected an array, such as np.asarray(values)"
            )
        shape = tuple(values.shape)
        shard_shape = mesh.shard_shape(shape, spec)
        if replicas == "first":
            indices = mesh.host_shards(host, shape, spec)
        elif replicas == "split":
            count, itemsize = mesh.replicas(shape, spec), dtype_named(values.dtype).itemsize
            split = ReplicaSplit.choose(shape, shard_shape, count, itemsize, min_bytes)
            pieces = (split.piece(shard.index, shard.replica) for shard in mesh.shards(shape, spec, host))
            indices, shard_shape = [piece for piece in pieces if piece is not None], split.piece_shape
        else:
            raise InvalidArgument(f"replicas={quote(replicas)}: expected 'first' or 'split'")
        return Shards(shape, values.dtype, [(i, values[i]) for i in indices], shard_shape=shard_shape)

    @staticmethod
    def wanted(
        shape: Sequence[int], dtype: Any, mesh: Any, spec: Any, host: int, *, halo: Halo | None = None
    ) -> Shards:
        """Return a target for `restore`: every region that a device of `host` needs, replicas included.

        The mesh and the spec are as for `of`. A halo has a width for each dimension; each region is extended by
        that width, in elements, into the neighboring regions. Raise `InvalidArgument` as `of` does.
        """
        from tstore.sharding import Mesh, with_halo

        mesh = Mesh.of(mesh)
        indices = [shard.index for shard in mesh.shards(shape, spec, host)]
        if halo is not None:
            indices = [with_halo(index, shape, halo) for index in indices]
        distinct = {tuple((s.start, s.stop) for s in index): index for index in indices}
        return Shards(
            shape, dtype, [(i, None) for i in distinct.values()], shard_shape=mesh.shard_shape(shape, spec)
        )

    @property
    def parts(self) -> list[tuple[tuple[slice, ...], npt.NDArray[Any] | None]]:
        """The regions, as tuples of slices, with their values or None."""
        return list(zip(self.layout.indices, self.values, strict=True))

    def with_values(self, values: Sequence[npt.NDArray[Any] | None]) -> Shards:
        """Return the same regions with these values, in the order of `parts`.

        Raise `InvalidArgument` unless each part has one array, of its shape and dtype.
        """
        if len(values) != len(self.values):
            raise InvalidArgument(f"{len(values)} values are passed for {len(self.values)} parts")
        shards = Shards.__new__(Shards)
        shards._fill(self.layout, values)
        return shards

    def __repr__(self) -> str:
        return f"Shards({self.shape}, {self.dtype}, {len(self.values)} parts)"


class PackedShards(NamedTuple):
    """The regions of an array in an eXmY format that a target's `Shards` asked for, as packed codes.

    `shape` and `dtype` are those of the whole decoded array. `parts` has each region, as a tuple of slices, with
    its codes.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    parts: list[tuple[Index, exmy.Quantized]]

    def __repr__(self) -> str:
        return f"PackedShards({self.shape}, {self.dtype}, {len(self.parts)} parts)"


@dataclass(eq=False, repr=False)
class PerHost:
    """A `value` that is separate for each host of a job, such as the state of a random number generator.

    In a tree that is saved, it has each host save its own value: a tree of arrays and scalars, which may have
    another structure on each host. A restore returns to each host a `PerHost` with the value that the host of the
    same number saved. In a target, it stands for a value of any structure. To JAX it is a leaf.

    Examples
    --------
    >>> import tstore.sync as tstore
    >>> tree = {"w": np.zeros(4), "loader": tstore.PerHost({"position": 96})}
    >>> _ = tstore.save("memory://of-per-host", tree, step=7)
    >>> tstore.restore("memory://of-per-host")["loader"].value
    {'position': 96}
    """

    value: Any

    def __repr__(self) -> str:
        return f"PerHost(a {type(self.value).__name__})"


def state_advice(value: Any) -> str:
    """Return what to pass in place of an object that has a state, such as a random number generator, or ""."""
    states = {"bit_generator": "bit_generator.state", "get_state": "get_state()", "getstate": "getstate()"}
    state = next((states[name] for name in states if hasattr(type(value), name)), "")
    return state and f"pass its {state}, in a tstore.PerHost if each process has its own"


def checked_fields(value: Any, path: str) -> list[tuple[str, Any]]:
    """Return the fields of a dataclass; raise `InvalidArgument` if other attributes would be lost."""
    fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    added = [name for name in getattr(value, "__dict__", ()) if name not in fields]
    if lost := [n for n in added if not isinstance(getattr(type(value), n, None), functools.cached_property)]:
        advice = "its to_dict()" if hasattr(value, "to_dict") else "a dict, or make them fields"
        raise InvalidArgument(
            f"{path}: a {type(value).__name__} has attributes that are not fields of this dataclass and would be "
            f"lost: {', '.join(lost)}; pass {advice}"
        )
    return list(fields.items())


class HostValues(list[Any]):
    """The value of each host, as `per_host="all"` restores them in place of a `PerHost`.

    It is a separate type because a save would treat an ordinary list as one value of all hosts. To JAX it is a
    leaf.
    """

    def refusal(self, path: str) -> InvalidArgument:
        """Return the error for such values in a tree to save, or in a target."""
        return InvalidArgument(
            f"{path}: a list of the values of {len(self)} hosts, as per_host='all' restores them; put "
            "tstore.PerHost(value) in its place, with the value of this host"
        )


class Destination(NamedTuple):
    """Memory into which regions of an array are restored, in place of new arrays.

    A leaf of a target may be a `Destination`, so that packages for frameworks restore straight into their tensors.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    parts: list[tuple[Index, npt.NDArray[Any]]]


def _bounds(index: Any, shape: tuple[int, ...]) -> Bounds:
    """Return the region of an index; raise `InvalidArgument` unless it is a box in an array of this shape."""
    items = index if isinstance(index, tuple) else (index,)
    if len(items) != len(shape):
        raise InvalidArgument(f"index {index!r} has {len(items)} axes, but the array has {len(shape)}")
    bounds = []
    for item, n in zip(items, shape, strict=True):
        try:
            item = item if isinstance(item, slice) else slice(*item)
            start, stop, step = item.indices(n)
        except TypeError:
            raise InvalidArgument(f"index {index!r}: expected a slice, or (start, stop), for each axis") from None
        if step != 1 or (item.stop is not None and item.stop > n):
            raise InvalidArgument(f"index {index!r} is not a box within shape {shape}")
        bounds.append((start, max(start, stop)))
    return tuple(bounds)


def _checked_values(layout: ShardLayout, number: int, values: Any) -> npt.NDArray[Any]:
    """Return the values of a part as an array; raise `InvalidArgument` unless they have its shape and dtype."""
    shape = layout.part_shapes[number]
    if type(values) is np.ndarray and values.shape == shape and values.dtype == layout.dtype:
        return values
    bounds = tuple((side.start, side.stop) for side in layout.indices[number])
    array = as_values(f"the part at {bounds}", values)
    if array.shape != shape or array.dtype != layout.dtype:
        raise InvalidArgument(
            f"the part at {bounds} has shape {array.shape} and dtype {array.dtype}; expected {shape} and "
            f"{layout.dtype}"
        )
    return array


def _pairs(parts: Any) -> list[tuple[Any, Any]]:
    try:
        return [(index, values) for index, values in (parts.items() if isinstance(parts, Mapping) else parts)]
    except (TypeError, ValueError):
        raise InvalidArgument(
            f"parts is a {_type_name(parts)}; expected a mapping of indices to values, or pairs, such as "
            "[((slice(0, 2), slice(0, 4)), values)]"
        ) from None


def _lengths(what: str, values: Sequence[int]) -> tuple[int, ...]:
    try:
        return tuple(int(n.__index__()) for n in values)
    except (AttributeError, TypeError):
        raise InvalidArgument(f"{what}={quote(values)}: expected a sequence of integers") from None


def as_values(path: str, leaf: Any) -> npt.NDArray[Any]:
    """Return a leaf as an array, without a copy if NumPy needs none; `path` names it in errors.

    A PyTorch tensor is detached from its graph. Raise `InvalidArgument` if NumPy can't convert the leaf.
    """
    if type(leaf) is np.ndarray:
        return leaf
    try:
        values = np.asarray(leaf.detach() if getattr(leaf, "requires_grad", False) is True else leaf)
    except MemoryError:
        raise
    except Exception as error:  # each library raises its own exceptions
        reason = (str(error) or repr(error)).splitlines()[0][:_MAX_REASON_LENGTH].rstrip(" .")
        raise InvalidArgument(
            f"{path}: NumPy can't convert a {_type_name(leaf)} to an array ({reason}); {_advice(leaf)}"
        ) from error
    if values.dtype == object and not isinstance(leaf, np.ndarray):
        raise InvalidArgument(f"{path}: NumPy has no dtype for a {_type_name(leaf)}; {_advice(leaf)}")
    return values


def dtype_of(path: str, leaf: Any) -> np.dtype[Any]:
    """Return the NumPy dtype of a leaf of a target; raise `InvalidArgument` if it has none."""
    try:
        dtype: np.dtype[Any] = np.dtype(leaf.dtype).newbyteorder("=")
    except TypeError:
        raise InvalidArgument(
            f"{path}: the target is a {_type_name(leaf)} of dtype {leaf.dtype}, which is not a NumPy dtype; pass "
            "NumPy arrays in the target, or restore with tstore.torch.restore or tstore.jax.restore"
        ) from None
    return dtype


def _type_name(leaf: Any) -> str:
    leaf_type = type(leaf)
    return f"{leaf_type.__module__}.{leaf_type.__qualname__}"


def _advice(leaf: Any) -> str:
    libraries = (base.__module__.partition(".")[0] for base in type(leaf).__mro__)
    return next((_ADVICE[name] for name in libraries if name in _ADVICE), "convert it to a NumPy array first")
