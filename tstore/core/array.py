"""Arrays of a snapshot or a transaction, and lazy views of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Never, NoReturn, Protocol, get_args

import numpy as np
import numpy.typing as npt

from tstore.core.data.casting import Casting, as_castable, can_cast
from tstore.core.data.planning import ReadPlan
from tstore.core.data.reader import new_values, values_to_plan
from tstore.core.format.arguments import checked_choice, quote
from tstore.core.format.arrays.array_metadata import ArrayMeta
from tstore.core.format.arrays.grid import Selection, may_overlap
from tstore.core.format.arrays.indices import Index, Indexer, IndexItem
from tstore.core.format.arrays.points import PointSelection
from tstore.core.format.arrays.views import View, whole_view
from tstore.core.runtime.pool import each
from tstore.errors import InvalidArgument, InvalidIndex, Misuse

if TYPE_CHECKING:  # imported when an array is mapped
    from tstore.core.data.mapping import MappedArray

__all__ = ["Appended", "Array", "ArrayParts", "ArraySource", "Verify", "read_of", "viewed"]

Verify = Literal["first", "never"]
"""When mapped values are compared with their checksums: before they are first handed out, or not at all."""


class ArraySource(Protocol):
    """A snapshot or a transaction, which reads and writes the values of its arrays."""

    async def read_array(
        self, path: str, meta: ArrayMeta, selection: Selection | PointSelection, out: npt.NDArray[Any]
    ) -> None:
        """Read a selection into `out`, which has the axes of the selection's result."""

    async def map_array(self, path: str) -> MappedArray | None:
        """Return the array in mapped memory, None if it can't be mapped."""

    async def explain_array(
        self, path: str, meta: ArrayMeta, selection: Selection | PointSelection, out: npt.NDArray[Any]
    ) -> ReadPlan:
        """Return what `read_array` with the same arguments would read."""

    async def stored_chunks(self, path: str, meta: ArrayMeta) -> npt.NDArray[np.int64] | None:
        """Return the numbers of the chunks that may exist, ascending; None if they can't be listed."""

    async def write_array(
        self, path: str, meta: ArrayMeta, selection: Selection | PointSelection, values: npt.NDArray[Any]
    ) -> None:
        """Stage values, which have the axes of the selection's result; raise `Misuse` if it is read-only."""

    async def resize_array(self, path: str, meta: ArrayMeta, shape: Sequence[int]) -> ArrayMeta:
        """Stage a new shape and return the changed metadata."""

    async def append_array(
        self, path: str, meta: ArrayMeta, axis: int, values: npt.NDArray[Any]
    ) -> tuple[ArrayMeta, Appended]:
        """Stage values past the end of an axis; return the changed metadata and the handle of the values."""


class Appended:
    """Values that were appended to the array at `path`; the commit of their transaction allots their region."""

    def __init__(self, path: str, allotted: Callable[[], tuple[slice, ...]]) -> None:
        self.path = path
        self._allotted = allotted

    @property
    def region(self) -> tuple[slice, ...]:
        """The index of the values in the array; raises `Misuse` before the transaction is committed."""
        return self._allotted()

    def __repr__(self) -> str:
        return f"<tstore.Appended to {self.path!r}>"


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
    def parts(self) -> ArrayParts:
        """What the view is made of, for modules that read or copy its chunks; it may change with any release."""
        return ArrayParts(self._source, self.path, self._view, self._meta)

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

        In a view, it is the selected part of a chunk: `array[::2]` has chunks of half the length. On a new
        axis, and on an axis of points that index several axes, it is the length of the axis.
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
    def attrs(self) -> dict[str, Any]:
        """A copy of the array's attributes, by Zarr's name for it."""
        return self.attributes

    @property
    def fill_value(self) -> Any:
        """The value of elements that were never written, in a sparse array or in a partly written chunk."""
        return self._meta.fill_value

    @property
    def sparse(self) -> bool:
        """Whether chunks that were never written read as the fill value; otherwise that is an error."""
        return self._meta.sparse

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
        """Index each axis independently: `array.oindex[[0, 5], [1, 2, 7]]` has the shape (2, 3), as in Zarr."""
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

    def __setitem__(self, index: Index, values: Never) -> NoReturn:
        """Raise `Misuse`: an assignment cannot be awaited. Type checkers refuse it."""
        advice = "in a transaction, await array[index].write(values), or assign with tstore.sync"
        raise Misuse(f"{self.path}: an assignment can't be awaited; {advice}")

    def isel(self, /, **indices: IndexItem) -> Array:
        """Return the view that selects along axes by name, along each independently: `isel(layer=3)`.

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
        """Return the view with its axes in the given order, by default reversed, like NumPy's `transpose`.

        Raise `InvalidArgument` unless each axis is given once.
        """
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
            raise TypeError(f"{self.path} has no axes, and so no length; np.asarray(array) has the values")
        return self.shape[0]

    def __bool__(self) -> bool:
        """Return True, as for other objects: whether an array is empty is in its `size`."""
        return True

    __iter__ = None  # iteration would take one read per row: read a region, then iterate over its values

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        """Raise `Misuse`: NumPy cannot await, and without this method would make an array of one object."""
        raise Misuse(f"{self.path}: NumPy can't convert a tstore.Array; pass the values that array.read() returns")

    def __repr__(self) -> str:
        return f"<tstore.Array {self.path!r} {self.dtype} {self.shape} chunks={self.chunks}>"

    async def read(self, out: npt.NDArray[Any] | None = None) -> npt.NDArray[Any]:
        """Return the verified values in a new array, or in `out`, which has the same shape and any strides.

        `out` may have another dtype if NumPy can safely cast the array's to it. Raise `InvalidArgument` for an
        unsuitable `out`, `NotFound` if a chunk was never written and the array is not sparse, and `Corrupt` if
        stored bytes have changed.
        """
        read = read_of(self, out)
        await self._source.read_array(read.path, read.meta, read.selection, read.target)
        return read.finished()

    async def map(self, verify: Verify = "first") -> npt.NDArray[Any]:
        """Return the values in read-only memory, if they can be mapped without a copy, or else read them.

        The memory is the system's cache of the files of a store in a local folder, which processes share. An
        array can be mapped if `save` wrote it without codecs, and is not so small that it is in the metadata;
        views by index arrays can't be. With `verify="first"`, the blocks that have the values are read and
        compared with their checksums before they are returned, and otherwise ("never") not at all.

        Raise what `read` raises.
        """
        checked_choice("verify", verify, get_args(Verify))
        mapped = None if self._view.has_points else await self._source.map_array(self.path)
        if mapped is None:
            values = await self.read()
            values.flags.writeable = False
            return values
        values = self._view.of_values(mapped.values)
        if verify == "first":
            await each(mapped.verify_part, mapped.parts_of(values))
        return values

    async def explain(self) -> ReadPlan:
        """Return which chunks, and which bytes of each object, `read` would read; reads no chunk.

        Raise `NotFound` if a chunk was never written and the array is not sparse.
        """
        read = _Read(self, values_to_plan(self.path, self.shape, self.dtype))
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
        array = as_castable(self.path, values, self.dtype, casting)
        try:
            broadcast = array if array.shape == view.shape else np.broadcast_to(array, view.shape)
        except ValueError:
            raise InvalidArgument(
                f"{self.path}: values of shape {array.shape} do not fit the region of shape {view.shape}"
            ) from None
        await self._source.write_array(self.path, self._meta, view.selection(), view.arranged(broadcast))

    async def append(self, values: npt.ArrayLike, axis: int = 0, casting: Casting = "same_kind") -> Appended:
        """Stage values past the end of an axis; the caller may change them once this returns.

        Their region is allotted by the commit: if others have appended since, it begins where theirs ends, so
        any number of transactions append at once without a conflict. The appends of one transaction to an array
        are stored in the order of the calls. Until the commit, this transaction sees the values past the
        end of the array that its base has; after it, `Appended.region` of the result tells where they are.

        Appends conflict with a resize, and with those along another axis. In a transaction that also writes to the
        array, resizes or creates it, they conflict like a resize. If the codecs are lossy, a copy of the values
        stays in memory until the commit.

        Raise `InvalidArgument` unless the values have as many axes as the array and its length on each other axis,
        or if NumPy's rule `casting` does not allow the cast, and `Misuse` for an array of a snapshot, of a
        transaction that has ended, or of one of several hosts.

        Examples
        --------
        >>> import tstore.sync as tstore
        >>> with tstore.open("memory://of-append").transaction() as tx:
        ...     added = tx.create_array("log", data=np.zeros(3)).append(np.ones(2))
        >>> added.region
        (slice(3, 5, None),)
        """
        if not self._view.is_whole(self._meta.shape):
            raise InvalidArgument(
                f"{self.path}: values can be appended only to a whole array, not to a view of one"
            )
        array = as_castable(self.path, values, self.dtype, casting)
        if not isinstance(axis, int | np.integer) or isinstance(axis, bool) or not -self.ndim <= axis < self.ndim:
            raise InvalidArgument(
                f"{self.path}: axis={quote(axis)}: expected an axis of the array, which has {self.ndim}"
            )
        self._meta, appended = await self._source.append_array(self.path, self._meta, int(axis) % self.ndim, array)
        self._view = whole_view(self._meta.shape)
        return appended

    async def resize(self, shape: Sequence[int]) -> None:
        """Stage a new shape with the same number of axes; chunks outside of it are dropped.

        New elements count as never written: they read as the fill value only if the array is sparse, or if their
        chunk contains other values. Values that a smaller shape cuts off do not return when the array grows.

        Raise `InvalidArgument` for another number of axes, a negative length, and on a view, and `Misuse` for an
        array of a snapshot or of a transaction that has ended.
        """
        if not self._view.is_whole(self._meta.shape):
            raise InvalidArgument(f"{self.path}: only a whole array can be resized, not a view of one")
        self._meta = await self._source.resize_array(self.path, self._meta, shape)
        self._view = whole_view(self._meta.shape)


class _Read:
    """A read of a view into `out`; `target` is the part of it with the axes of the selection's result."""

    __slots__ = ("array", "memory", "meta", "out", "path", "selection", "source", "target")

    def __init__(self, array: Array, out: npt.NDArray[Any]) -> None:
        view = array._view
        self.array = array
        self.out = out
        self.memory = np.asarray(out)  # a subclass may index differently
        self.source = array._source
        self.path = array.path
        self.meta = array._meta
        self.selection = view.selection()
        self.target = view.arranged(self.memory)

    def finished(self) -> npt.NDArray[Any]:
        """Return the result, after `target` was read."""
        if (last := self.array._view.repeated) is not None:
            self.memory[...] = self.memory[last].copy()  # NumPy would empty a string that it assigns to itself
        return self.out


def read_of(array: Array, out: npt.NDArray[Any] | None = None) -> _Read:
    """Return a read of a view into a new array, or into `out`; raise `InvalidArgument` if `out` is unsuitable."""
    shape, dtype = array.shape, array.dtype
    if out is None:
        return _Read(array, new_values(array.path, shape, dtype))
    if not isinstance(out, np.ndarray) or hasattr(type(out), "mask"):
        raise InvalidArgument(
            f"{array.path}: out must be a NumPy array without a mask, not a {type(out).__name__}; pass one that "
            "shares its memory"
        )
    if out.shape != shape or not out.flags.writeable or not can_cast(dtype, out.dtype, "safe"):
        writable = "writable" if out.flags.writeable else "read-only"
        raise InvalidArgument(
            f"{array.path}: out must be a writable array of shape {shape} and dtype {dtype} or one "
            f"to which that is cast safely, not a {writable} one of {out.shape} and {out.dtype}"
        )
    if may_overlap(out.shape, out.strides, out.itemsize):
        raise InvalidArgument(f"{array.path}: out must be of distinct elements; its strides are {out.strides}")
    return _Read(array, out)


class ArrayParts(NamedTuple):
    """The internals of an array or view; `meta` is the metadata of the whole array."""

    source: ArraySource
    path: str
    view: View
    meta: ArrayMeta


def viewed(array: Array, view: View) -> Array:
    """Return a view of the same array."""
    return Array(array._source, array.path, array._meta, view)
