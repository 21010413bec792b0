"""An array of a snapshot or a transaction, and lazy views of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tstore.data.reader import new_values
from tstore.errors import InvalidArgument, Misuse
from tstore.format.array_metadata import ArrayMeta
from tstore.format.grid import Index, Selection, whole

__all__ = ["Array", "ArraySource"]


class ArraySource(Protocol):
    """Where an array's values come from and go to: a snapshot or a transaction."""

    async def read_array(self, path: str, meta: ArrayMeta, selection: Selection, out: npt.NDArray[Any]) -> None:
        """Fills `out`, which has one axis per axis of the array."""

    async def write_array(
        self, path: str, meta: ArrayMeta, selection: Selection, values: npt.NDArray[Any]
    ) -> None:
        """Stages values, which have one axis per axis of the array; `Misuse` where nothing can be written."""

    async def resize_array(self, path: str, meta: ArrayMeta, shape: Sequence[int]) -> ArrayMeta:
        """Stages another shape and returns the metadata with it."""


class Array:
    """A chunked array, or a view of one: indexing gives a view and does no I/O.

    `shape` and `ndim` are those of the view; `dtype`, `chunks`, `attributes`, `dimension_names` and
    `fill_value` are those of the array it was taken from.
    """

    def __init__(self, source: ArraySource, path: str, meta: ArrayMeta, selection: Selection | None = None):
        self._source = source
        self._meta = meta
        self._selection = whole(meta.shape) if selection is None else selection
        self.path = path

    @property
    def shape(self) -> tuple[int, ...]:
        """Length along each axis of the view."""
        return self._selection.shape

    @property
    def ndim(self) -> int:
        """Number of axes of the view."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of values in the view."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def nbytes(self) -> int:
        """Bytes of the view's values in memory, decoded."""
        return self.size * self.dtype.itemsize

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the values as they are read."""
        return self._meta.dtype

    @property
    def chunks(self) -> tuple[int, ...]:
        """Shape of one chunk of the array."""
        return self._meta.chunks

    @property
    def attributes(self) -> dict[str, Any]:
        """The array's attributes; a copy."""
        return dict(self._meta.attributes)

    @property
    def dimension_names(self) -> tuple[str | None, ...] | None:
        """A name or None per axis of the array, or None."""
        return self._meta.dimension_names

    @property
    def fill_value(self) -> Any:
        """The value of what was not written in a sparse array, or in a chunk written in part."""
        return self._meta.fill_value

    @property
    def codecs(self) -> list[dict[str, Any]]:
        """The codec chain, as in `zarr.json`."""
        return [dict(c) for c in self._meta.codecs]

    def __getitem__(self, index: Index) -> Array:
        """Return a view by integers, slices (of any step) and `...`; raise `InvalidArgument` for other indices."""
        return Array(self._source, self.path, self._meta, self._selection.narrowed(index))

    __iter__ = None  # rows one by one would be one read each: read a region, then iterate over that

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        """Raise `Misuse`: NumPy does not await; without this, it would take the array for one object."""
        raise Misuse(f"{self.path}: NumPy can't read an array of tstore by itself; pass it `await array.read()`")

    def __repr__(self) -> str:
        return f"<tstore.Array {self.path!r} {self.dtype} {self.shape} chunks={self.chunks}>"

    async def read(self, out: npt.NDArray[Any] | None = None) -> npt.NDArray[Any]:
        """Return the values, verified, in a new array, or in `out` of the same shape and dtype.

        Raises `NotFound` where a chunk was never written and the array is not sparse, `Corrupt` where stored
        bytes have changed.
        """
        if out is None:
            out = new_values(self.path, self.shape, self.dtype)
        elif out.shape != self.shape or out.dtype != self.dtype or not out.flags.writeable:
            raise InvalidArgument(
                f"{self.path}: out must be a writable array of shape {self.shape} and dtype {self.dtype}, "
                f"not {out.shape} and {out.dtype}"
            )
        await self._source.read_array(self.path, self._meta, self._selection, self._full_rank(out))
        return out

    async def write(self, values: npt.ArrayLike) -> None:
        """Stage values, broadcast to the view's shape; the caller may change them once this returns.

        A chunk that is written in part keeps its other values bit for bit. Where a lossy codec can't do that,
        because the values written need another shared offset, the commit (or a read before it) raises
        `InvalidArgument`.

        Raises `InvalidArgument` where shape or dtype do not fit (a cast within one kind is made), `Misuse`
        on an array of a snapshot or of a transaction that has ended.
        """
        if isinstance(values, np.ndarray) and hasattr(values, "mask"):
            raise InvalidArgument(f"{self.path}: a masked array would lose its mask; write data and mask apart")
        given = _cast(values, self.dtype)
        if given is None:
            raise InvalidArgument(
                f"{self.path}: values of {_named(values)} can't be written to an array of {self.dtype} "
                "without loss of kind; cast them first"
            )
        try:
            spread = np.broadcast_to(given, self.shape)
        except ValueError:
            raise InvalidArgument(
                f"{self.path}: values of shape {given.shape} do not fit the region of shape {self.shape}"
            ) from None
        await self._source.write_array(self.path, self._meta, self._selection, self._full_rank(spread))

    async def resize(self, shape: Sequence[int]) -> None:
        """Stage another shape with as many axes; chunks outside of it are dropped.

        What is added was never written: it reads as the fill value only where the array is sparse, or where it
        lies in a chunk that holds other values. What a smaller shape cut off is gone, also when it grows again.
        """
        if self._selection != whole(self._meta.shape):
            raise InvalidArgument(f"{self.path}: only a whole array can be resized, not a view of one")
        self._meta = await self._source.resize_array(self.path, self._meta, shape)
        self._selection = whole(self._meta.shape)

    def _full_rank(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        kept = tuple(np.newaxis if i in self._selection.dropped else slice(None) for i in range(self._rank))
        return values[kept] if self._selection.dropped else values

    @property
    def _rank(self) -> int:
        return len(self._selection.axes)


def _cast(values: npt.ArrayLike, dtype: np.dtype[Any]) -> npt.NDArray[Any] | None:
    """The values as an array that can be cast to `dtype` within its kind, None where they can't."""
    given = np.asarray(values)
    if given.dtype == dtype or np.can_cast(given.dtype, dtype, "same_kind"):
        return given
    if not isinstance(values, (bool, int, float, complex)):
        return None
    # a Python scalar takes the array's type, if that holds it
    kinds = "iufcV" if isinstance(values, (bool, int)) else "fcV" if isinstance(values, float) else "c"
    try:
        return np.asarray(values, dtype) if dtype.kind in kinds else None
    except OverflowError:
        return None


def _named(values: npt.ArrayLike) -> str:
    return repr(values) if isinstance(values, (bool, int, float, complex)) else f"dtype {np.asarray(values).dtype}"
