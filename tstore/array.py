"""Arrays of a snapshot or a transaction, and lazy views of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tstore.data.reader import new_values
from tstore.errors import InvalidArgument, Misuse
from tstore.format.array_metadata import ArrayMeta
from tstore.format.grid import Index, Selection, may_overlap, whole

__all__ = ["Array", "ArraySource"]


class ArraySource(Protocol):
    """A snapshot or a transaction, which reads and writes the values of its arrays."""

    async def read_array(self, path: str, meta: ArrayMeta, selection: Selection, out: npt.NDArray[Any]) -> None:
        """Read a selection into `out`, which has one axis per axis of the array."""

    async def write_array(
        self, path: str, meta: ArrayMeta, selection: Selection, values: npt.NDArray[Any]
    ) -> None:
        """Stage values, which have one axis per axis of the array; raise `Misuse` if the source is read-only."""

    async def resize_array(self, path: str, meta: ArrayMeta, shape: Sequence[int]) -> ArrayMeta:
        """Stage a new shape and return the changed metadata."""


class Array:
    """A chunked array, or a view of one: indexing returns a view and does no I/O.

    `shape`, `ndim`, `size` and `nbytes` are those of the view, and all other properties those of the array.
    """

    def __init__(self, source: ArraySource, path: str, meta: ArrayMeta, selection: Selection | None = None):
        self._source = source
        self._meta = meta
        self._selection = whole(meta.shape) if selection is None else selection
        self.path = path

    @property
    def shape(self) -> tuple[int, ...]:
        """The length of the view along each axis."""
        return self._selection.shape

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
        """The shape of one chunk of the array."""
        return self._meta.chunks

    @property
    def attributes(self) -> dict[str, Any]:
        """A copy of the array's attributes."""
        return self._meta.attributes

    @property
    def dimension_names(self) -> tuple[str | None, ...] | None:
        """The name of each axis (None for one without a name), or None if no axis has a name."""
        return self._meta.dimension_names

    @property
    def fill_value(self) -> Any:
        """The value of elements that were never written, in a sparse array or in a partly written chunk."""
        return self._meta.fill_value

    @property
    def codecs(self) -> list[dict[str, Any]]:
        """The codec chain, as in `zarr.json`."""
        return [dict(c) for c in self._meta.codecs]

    def __getitem__(self, index: Index) -> Array:
        """Return the view that integers, slices and `...` select; raise `InvalidArgument` for other indices."""
        return Array(self._source, self.path, self._meta, self._selection.narrow(index))

    __iter__ = None  # iteration would take one read per row: read a region, then iterate over its values

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        """Raise `Misuse`: NumPy cannot await, and without this method would make an array of one object."""
        raise Misuse(f"{self.path}: NumPy can't convert a tstore.Array; pass it the values, `await array.read()`")

    def __repr__(self) -> str:
        return f"<tstore.Array {self.path!r} {self.dtype} {self.shape} chunks={self.chunks}>"

    async def read(self, out: npt.NDArray[Any] | None = None) -> npt.NDArray[Any]:
        """Return the verified values in a new array, or in `out`, which must have the same shape and dtype.

        Raise `InvalidArgument` for an unsuitable `out`, `NotFound` if a chunk was never written and the array is
        not sparse, and `Corrupt` if stored bytes have changed.
        """
        if out is None:
            out = new_values(self.path, self.shape, self.dtype)
        elif not isinstance(out, np.ndarray):
            raise InvalidArgument(f"{self.path}: out must be a NumPy array, not a {type(out).__name__}")
        elif out.shape != self.shape or out.dtype != self.dtype or not out.flags.writeable:
            raise InvalidArgument(
                f"{self.path}: out must be a writable array of shape {self.shape} and dtype {self.dtype}, "
                f"not a {'writable' if out.flags.writeable else 'read-only'} one of {out.shape} and {out.dtype}"
            )
        elif may_overlap(out.shape, out.strides, out.itemsize):
            raise InvalidArgument(
                f"{self.path}: out must be memory of distinct elements; its strides are {out.strides} bytes"
            )
        await self._source.read_array(self.path, self._meta, self._selection, self._full_rank(out))
        return out

    async def write(self, values: npt.ArrayLike) -> None:
        """Stage values, broadcast to the view's shape; the caller may change them once this returns.

        The other values of a partly written chunk stay the same, bit for bit. If a lossy codec can't preserve
        them, because the new values need another exponent offset, the commit (or a read before it) raises
        `InvalidArgument`.

        Raise `InvalidArgument` if the shape does not fit or NumPy's rule "same_kind" does not allow the cast, and
        `Misuse` for an array of a snapshot or of a transaction that has ended.
        """
        if isinstance(values, np.ndarray) and hasattr(values, "mask"):
            raise InvalidArgument(
                f"{self.path}: a masked array would lose its mask; write its data and its mask as two arrays"
            )
        try:
            array = _as_castable(values, self.dtype)
        except ValueError as error:  # for example, for sequences of different lengths
            raise InvalidArgument(f"{self.path}: the values can't be converted to an array ({error})") from error
        if array is None:
            raise InvalidArgument(
                f"{self.path}: NumPy's rule 'same_kind' does not allow casting {_describe(values)} to the array's "
                f"dtype {self.dtype}; cast the values first"
            )
        try:
            broadcast = array if array.shape == self.shape else np.broadcast_to(array, self.shape)
        except ValueError:
            raise InvalidArgument(
                f"{self.path}: values of shape {array.shape} do not fit the region of shape {self.shape}"
            ) from None
        await self._source.write_array(self.path, self._meta, self._selection, self._full_rank(broadcast))

    async def resize(self, shape: Sequence[int]) -> None:
        """Stage a new shape with the same number of axes; chunks outside of it are dropped.

        New elements count as never written: they read as the fill value only if the array is sparse, or if their
        chunk contains other values. Values that a smaller shape cuts off do not return when the array grows.
        """
        if self._selection != whole(self._meta.shape):
            raise InvalidArgument(f"{self.path}: only a whole array can be resized, not a view of one")
        self._meta = await self._source.resize_array(self.path, self._meta, shape)
        self._selection = whole(self._meta.shape)

    def _full_rank(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return a view of the values with an axis of length 1 for each axis that an integer index dropped."""
        axes, dropped = range(len(self._selection.axes)), self._selection.dropped
        return values[tuple([np.newaxis if i in dropped else slice(None) for i in axes])] if dropped else values


def _as_castable(values: npt.ArrayLike, dtype: np.dtype[Any]) -> npt.NDArray[Any] | None:
    """Return the values as an array that can be cast to `dtype`, or None if `Array.write` must refuse them."""
    array = np.asarray(values)
    if array.dtype == dtype or np.can_cast(array.dtype, dtype, "same_kind"):
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
