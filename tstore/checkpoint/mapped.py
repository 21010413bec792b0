"""The arrays of a checkpoint in mapped packs, verified when they are first handed out."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from tstore.core.array import Verify
from tstore.core.runtime.pool import each
from tstore.errors import Misuse

if TYPE_CHECKING:
    from tstore.core.data.mapping import MappedArray

__all__ = ["Mapped"]


class Mapped(Mapping[str, Any]):
    """The arrays of a checkpoint by path, in read-only memory that is the system's cache of its files.

    Nothing is read before it is used, and processes share what they have mapped. With `verify="first"`, each array
    is compared with its checksums when it is first taken out, which reads it; `Corrupt` names a damaged chunk.
    Arrays that can't be mapped were read, and `copied` has the reason by path. The memory stays valid if garbage
    collection deletes the files, but not if they are cut short by another program.

    Examples
    --------
    >>> import tempfile
    >>> import tstore.sync as tstore
    >>> folder = tempfile.mkdtemp()
    >>> _ = tstore.save(folder, {"net": {"w": np.ones((64, 64)), "b": np.zeros(8)}, "epoch": 3}, step=7)
    >>> mapped = tstore.restore(folder, map=True)
    >>> mapped["net/w"].flags.writeable, list(mapped)
    (False, ['net/w', 'net/b'])
    >>> mapped.tree()["epoch"]
    3
    """

    def __init__(
        self,
        name: str,
        arrays: dict[str, Any],
        mapped: Mapping[str, MappedArray],
        copied: Mapping[str, str],
        verify: Verify,
        built: Callable[[Mapping[str, Any]], Awaitable[Any]],
    ) -> None:
        """Hand out `arrays`, with those that are `mapped` in place of None; `built` returns the tree of them."""
        self._name = name
        self._arrays = arrays
        self._mapped = mapped
        self._verified = set[str]()
        self._verify = verify
        self._built = built
        self.copied = dict(copied)

    def __getitem__(self, path: str) -> Any:
        """Return the values at a path; with `verify="first"`, verify them first, in this thread."""
        if path not in self._arrays:
            raise KeyError(f"{path!r} is not the path of an array, such as 'net/w'; tree() has groups and scalars")
        values = self._arrays[path]
        if values is not None:
            return values
        array = self._mapped[path]
        if self._verify == "first" and path not in self._verified:
            array.verify()
            self._verified.add(path)
        values = self._arrays[path] = array.values
        return values

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    async def verified(self) -> None:
        """Verify in threads all arrays that are not verified yet; raise `Corrupt`, which names a damaged chunk."""
        arrays = {path: array for path, array in self._mapped.items() if path not in self._verified}

        def verify(item: tuple[MappedArray, range]) -> None:
            array, part = item
            array.verify_part(part)

        await each(verify, ((array, part) for array in arrays.values() for part in array.parts()))
        self._verified.update(arrays)

    async def tree(self) -> Any:
        """Return what `restore` returns, with mapped arrays; with `verify="first"`, after all are verified."""
        if self._verify == "first":
            await self.verified()
        return await self._built({path: self[path] for path in self})

    def __reduce__(self) -> NoReturn:
        raise Misuse("a Mapped can't be pickled: map the checkpoint in the other process, which shares its memory")

    def __repr__(self) -> str:
        return f"<tstore.Mapped {len(self)} arrays of {self._name}, {len(self.copied)} copied>"
