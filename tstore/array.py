"""Arrays of a snapshot or a transaction, and lazy views of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, Literal, Protocol, TypeVar, get_args

import numpy as np
import numpy.typing as npt

from tstore.data.planning import ReadPlan
from tstore.data.reader import new_values
from tstore.errors import InvalidArgument, InvalidIndex, Misuse
from tstore.format.arguments import quote
from tstore.format.array_metadata import ArrayMeta
from tstore.format.dtypes import as_records, is_float
from tstore.format.grid import Selection, may_overlap
from tstore.format.indices import Index, IndexItem
from tstore.format.points import PointSelection
from tstore.format.views import View, whole_view

__all__ = ["Array", "ArraySource", "Casting", "Indexer", "parts_of", "read_of", "viewed"]

Casting = Literal["no", "equiv", "safe", "same_kind", "unsafe"]
"""NumPy's rules for casting."""

_CASTINGS: tuple[Casting, ...] = get_args(Casting)

T = TypeVar("T")


class ArraySource(Protocol):
    """A snapshot or a transaction, which reads and writes the values of its arrays."""

    async def read_array(
        self, path: str, meta: ArrayMeta, selection: Selection | PointSelection, out: npt.NDArray[Any]
    ) -> None:
        """Read a selection into `out`, which has the axes of the selection's result."""

    async def explain_array(
        self, path: str, meta: ArrayMeta, selection: Selection | PointSelection, out: npt.NDArray[Any]
    ) -> ReadPlan:
        """Return what `read_array` with the same arguments would read."""

    async def write_array(
        self, path: str, meta: ArrayMeta, selection: Selection | PointSelection, values: npt.NDArray[Any]
    ) -> None:
        """Stage values, which have the axes of the selection's result; raise `Misuse` if it is read-only."""

    async def resize_array(self, path: str, meta: ArrayMeta, shape: Sequence[int]) -> ArrayMeta:
        """Stage a new shape and return the changed metadata."""


class Indexer(Generic[T]):
    """Index an array with another meaning than `array[index]` has: see `Array.oindex` and `Array.vindex`."""

    def __init__(self, select: Callable[[Index], T]) -> None:
        self._select = select

    def __getitem__(self, index: Index) -> T:
        return self._select(index)

    __iter__ = None


class Array:
    """A chunked array, or a view of one: indexing returns a view and does no I/O.

    `shape`, `chunks`, `dimension_names`, `ndim`, `size` and `nbytes` are those of the view, and all other
    properties those of the array.
    """

    def __init__(self, source: ArraySource, path: str, meta: ArrayMeta, view: View | None = None):
        self._source = source
        self._meta = meta
        self._view = whole_view(meta.shape) if view is None else view
        self.path = path

    @property
    def shape(self) -> tuple[int, ...]:
        """The length of the view along each axis."""
        return self._view.shape

    @property
    def ndim(self) -> int:
        """The number of axes of the view."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of values in the view."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def nbytes(self) -> int:
        """The size of the view's decoded values in bytes."""
        return self.size * self.dtype.itemsize

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the values as they are read."""
        return self._meta.dtype

    @property
    def chunks(self) -> tuple[int, ...]:
        """The shape of one chunk, from which `dask.array.from_array` chooses its own.

        In a view, it is the part of a chunk that it selects: `array[::2]` has chunks of half the length. On an
        axis of points, and on a new one, it is the length of the axis.
        """
        chunks = []
        for axis, length in enumerate(self.shape):
            source = self._view.source(axis)
            if source is None:
                chunks.append(max(1, length))
            else:
                step = abs(source[1].step) if isinstance(source[1], range) else 1
                chunks.append(-(-self._meta.chunks[source[0]] // step))
        return tuple(chunks)

    @property
    def chunksize(self) -> tuple[int, ...]:
        """The shape of one chunk, by Dask's name for it."""
        return self.chunks

    @property
    def dimension_names(self) -> tuple[str | None, ...] | None:
        """The name of each axis of the view (None for one without a name), or None if the array has no names."""
        names = self._meta.dimension_names
        if names is None:
            return None
        sources = map(self._view.source, range(self.ndim))
        return tuple(None if source is None else names[source[0]] for source in sources)

    @property
    def attributes(self) -> dict[str, Any]:
        """A copy of the array's attributes."""
        return self._meta.attributes

    @property
    def fill_value(self) -> Any:
        """The value of elements that were never written, in a sparse array or in a partly written chunk."""
        return self._meta.fill_value

    @property
    def codecs(self) -> list[dict[str, Any]]:
        """The codec chain, as in `zarr.json`."""
        return [dict(c) for c in self._meta.codecs]

    @property
    def T(self) -> Array:
        """The view with its axes in reverse order."""
        return self.transpose()

    @property
    def oindex(self) -> Indexer[Array]:
        """Index each axis on its own: `array.oindex[[0, 5], [1, 2, 7]]` has the shape (2, 3), as in Zarr."""
        return Indexer(lambda index: self._select(self._view.orthogonal, index))

    @property
    def vindex(self) -> Indexer[Array]:
        """Index points: `array.vindex[[0, 5], [1, 2]]` has two values, as in Zarr.

        Arrays are broadcast together. Their axes come first, before those of slices, as in Dask.
        """
        return Indexer(lambda index: self._select(self._view.vectorized, index))

    def __getitem__(self, index: Index) -> Array:
        """Return the view that NumPy's indexing selects; raise `InvalidIndex`, an `IndexError`.

        Write to a view with `array[index].write(values)`.
        """
        return self._select(self._view.narrow, index)

    def _select(self, select: Callable[[Index], View], index: Index) -> Array:
        try:
            view = select(index)
        except InvalidIndex as error:
            raise InvalidIndex(f"{self.path}: {error}") from None
        return Array(self._source, self.path, self._meta, view)

    def isel(self, **indices: IndexItem) -> Array:
        """Return the view that selects on axes by their `dimension_names`, on each on its own: `isel(layer=3)`.

        Raise `InvalidArgument` for a name that no axis has, or several.
        """
        names = self.dimension_names or ()
        items: list[IndexItem] = [slice(None)] * self.ndim
        for name, item in indices.items():
            if names.count(name) != 1:
                known = ", ".join(repr(n) for n in names if n is not None) or "none"
                count = "several axes have" if name in names else "no axis has"
                raise InvalidArgument(f"{self.path}: {count} the name {name!r}; the names are: {known}")
            if item is None or item is Ellipsis:
                raise InvalidIndex(f"{self.path}: the index of axis {name!r} can't be {item}")
            items[names.index(name)] = item
        return self._select(self._view.orthogonal, tuple(items))

    def transpose(self, *axes: int | Sequence[int]) -> Array:
        """Return the view with its axes in the given order, by default reversed, like NumPy's `transpose`."""
        order: Any = axes[0] if len(axes) == 1 and not isinstance(axes[0], int) else axes
        try:
            if not axes or order is None:
                numbers = list(range(self.ndim))[::-1]
            else:
                numbers = [range(self.ndim)[axis] for axis in order]
        except (TypeError, IndexError):
            numbers = []
        if sorted(numbers) != list(range(self.ndim)):
            raise InvalidArgument(f"{self.path}: axes {order} are not a permutation of {self.ndim} axes")
        return Array(self._source, self.path, self._meta, self._view.transpose(numbers))

    def __len__(self) -> int:
        """Return the length of the first axis; raise `TypeError` if there is none, as NumPy does."""
        if not self.shape:
            raise TypeError(f"{self.path} has no axes, and so no length")
        return self.shape[0]

    def __bool__(self) -> bool:
        """Return True, as for other objects: whether an array is empty is in its `size`."""
        return True

    __iter__ = None  # iteration would take one read per row: read a region, then iterate over its values

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        """Raise `Misuse`: NumPy cannot await, and without this method would make an array of one object."""
        raise Misuse(f"{self.path}: NumPy can't convert a tstore.Array; pass it the values, `await array.read()`")

    def __repr__(self) -> str:
        return f"<tstore.Array {self.path!r} {self.dtype} {self.shape} chunks={self.chunks}>"

    async def read(self, out: npt.NDArray[Any] | None = None) -> npt.NDArray[Any]:
        """Return the verified values in a new array, or in `out`, which has the same shape and any strides.

        `out` may have another dtype, to which NumPy casts the array's safely. Raise `InvalidArgument` for an
        unsuitable `out`, `NotFound` if a chunk was never written and the array is not sparse, and `Corrupt` if
        stored bytes have changed.
        """
        view = self._view
        if out is None:
            out = new_values(self.path, view.shape, self.dtype)
        elif not isinstance(out, np.ndarray):
            raise InvalidArgument(f"{self.path}: out must be a NumPy array, not a {type(out).__name__}")
        elif out.shape != view.shape or not out.flags.writeable or not _casts(self.dtype, out.dtype, "safe"):
            writable = "writable" if out.flags.writeable else "read-only"
            raise InvalidArgument(
                f"{self.path}: out must be a writable array of shape {view.shape} and dtype {self.dtype} or one "
                f"to which that is cast safely, not a {writable} one of {out.shape} and {out.dtype}"
            )
        elif may_overlap(out.shape, out.strides, out.itemsize):
            raise InvalidArgument(
                f"{self.path}: out must be memory of distinct elements; its strides are {out.strides} bytes"
            )
        read = _Read(self, out)
        await self._source.read_array(read.path, read.meta, read.selection, read.target)
        return read.finished()

    async def explain(self) -> ReadPlan:
        """Return which chunks and which bytes of which objects `read` would read; reads no chunk.

        Raise `NotFound` if a chunk was never written and the array is not sparse.
        """
        read = read_of(self)
        return await self._source.explain_array(read.path, read.meta, read.selection, read.target)

    async def write(self, values: npt.ArrayLike, casting: Casting = "same_kind") -> None:
        """Stage values, broadcast to the view's shape; the caller may change them once this returns.

        An element that index arrays select several times gets the last of its values in the view's C order. The
        other values of a partly written chunk stay the same, bit for bit. If a lossy codec can't preserve them,
        because the new values need another exponent offset, the commit (or a read before it) raises
        `InvalidArgument`.

        Raise `InvalidArgument` if the shape does not fit or NumPy's rule `casting` does not allow the cast, and
        `Misuse` for an array of a snapshot or of a transaction that has ended.
        """
        view = self._view
        array = self._castable(values, casting)
        try:
            broadcast = array if array.shape == view.shape else np.broadcast_to(array, view.shape)
        except ValueError:
            raise InvalidArgument(
                f"{self.path}: values of shape {array.shape} do not fit the region of shape {view.shape}"
            ) from None
        await self._source.write_array(self.path, self._meta, view.selection(), view.arranged(broadcast))

    def _castable(self, values: npt.ArrayLike, casting: Casting) -> npt.NDArray[Any]:
        """Return the values as an array that can be cast to the array's dtype."""
        if casting not in _CASTINGS:
            raise InvalidArgument(f"casting must be one of {', '.join(_CASTINGS)}, not {quote(casting)}")
        if isinstance(values, np.ndarray) and hasattr(values, "mask"):
            raise InvalidArgument(
                f"{self.path}: a masked array would lose its mask; write its data and its mask as two arrays"
            )
        try:
            array = _as_castable(values, self.dtype, casting)
        except ValueError as error:  # for example, for sequences of different lengths
            raise InvalidArgument(f"{self.path}: the values can't be converted to an array ({error})") from error
        if array is None:
            raise InvalidArgument(
                f"{self.path}: NumPy's rule '{casting}' does not allow casting {_describe(values)} to the array's "
                f'dtype {self.dtype}; cast the values first, or write them with casting="unsafe"'
            )
        return array

    async def resize(self, shape: Sequence[int]) -> None:
        """Stage a new shape with the same number of axes; chunks outside of it are dropped.

        New elements count as never written: they read as the fill value only if the array is sparse, or if their
        chunk contains other values. Values that a smaller shape cuts off do not return when the array grows.
        """
        if not self._view.is_whole(self._meta.shape):
            raise InvalidArgument(f"{self.path}: only a whole array can be resized, not a view of one")
        self._meta = await self._source.resize_array(self.path, self._meta, shape)
        self._view = whole_view(self._meta.shape)


def _casts(source: np.dtype[Any], target: np.dtype[Any], casting: Casting) -> bool:
    """Return whether NumPy's rule allows the cast; the usual case of equal dtypes is the quickest."""
    return source == target or np.can_cast(source, target, casting)


def _as_castable(values: npt.ArrayLike, dtype: np.dtype[Any], casting: Casting) -> npt.NDArray[Any] | None:
    """Return the values as an array that can be cast to `dtype`, or None if `Array.write` must refuse them."""
    array = np.asarray(values)
    if casting == "unsafe" and array.dtype != dtype:
        if array.dtype.kind not in "biufcV" and array.dtype.kind != dtype.kind:
            return None
        return array.astype(dtype)  # not where chunks are encoded: errors and warnings are the caller's
    if dtype.kind in "USV" and array.dtype != dtype and not is_float(dtype):
        return as_records(values, dtype)
    if array.dtype == dtype or np.can_cast(array.dtype, dtype, casting):
        return array
    if not isinstance(values, (bool, int, float, complex)):
        return None
    # a Python scalar has no dtype: it is converted if it fits (kind V: the dtypes of ml_dtypes)
    kinds = "iufcV" if isinstance(values, (bool, int)) else "fcV" if isinstance(values, float) else "c"
    try:
        return np.asarray(values, dtype) if dtype.kind in kinds else None
    except OverflowError:
        return None


def _describe(values: npt.ArrayLike) -> str:
    return repr(values) if isinstance(values, (bool, int, float, complex)) else f"dtype {np.asarray(values).dtype}"


class _Read:
    """A read of a view into `out`; `target` is the part of it with the axes of the selection's result."""

    __slots__ = ("array", "meta", "out", "path", "selection", "source", "target")

    def __init__(self, array: Array, out: npt.NDArray[Any]) -> None:
        view = array._view
        self.array = array
        self.out = out
        self.source = array._source
        self.path = array.path
        self.meta = array._meta
        self.selection = view.selection()
        self.target = view.arranged(out)

    def finished(self) -> npt.NDArray[Any]:
        """Return the result, after `target` was read."""
        if (last := self.array._view.repeated) is not None:
            self.out[...] = self.out[last]
        return self.out


def read_of(array: Array) -> _Read:
    """Return a read of a view into a new array."""
    return _Read(array, new_values(array.path, array.shape, array.dtype))


def parts_of(array: Array) -> tuple[ArraySource, str, View]:
    """Return the source, the path and the view of an array, from which another process can make it again."""
    return array._source, array.path, array._view


def viewed(array: Array, view: View) -> Array:
    """Return a view of the same array."""
    return Array(array._source, array.path, array._meta, view)
