"""The names that Zarr v3 gives to chunks, from the `chunk_key_encoding` of an array's metadata; pure, no I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tstore.errors import UnsupportedFormat

__all__ = ["ChunkNames"]

_SEPARATORS = {"default": "/", "v2": "."}  # where the metadata has none

_MAX_DIGITS = 19  # of a coordinate; Python refuses to parse thousands


class ChunkNames(NamedTuple):
    """The names of an array's chunks, below the array's path.

    With the encoding "default" they begin with "c", with "v2" they do not.
    """

    first: str
    separator: str

    @staticmethod
    def parse(encoding: Any) -> ChunkNames:
        """Parse a `chunk_key_encoding`; raise `UnsupportedFormat` for one that is not in the core of Zarr v3."""
        document = encoding if isinstance(encoding, Mapping) else {"name": encoding}
        name, settings = document.get("name"), document.get("configuration") or {}
        if not isinstance(name, str) or name not in _SEPARATORS or not isinstance(settings, Mapping):
            raise UnsupportedFormat(
                f"chunk keys of the kind {encoding!r:.100} are not supported: expected 'default' or 'v2'"
            )
        separator = settings.get("separator", _SEPARATORS[name])
        if separator not in ("/", "."):
            raise UnsupportedFormat(
                f"the separator {separator!r:.40} of chunk keys is not supported: use '/' or '.'"
            )
        return ChunkNames("c" if name == "default" else "", separator)

    def name(self, coordinates: Sequence[int]) -> str:
        """Return the name of the chunk at these coordinates of the grid."""
        parts = [*([self.first] if self.first else ()), *map(str, coordinates)]
        return self.separator.join(parts) or "0"

    def coordinates(self, name: str, dimensions: int) -> tuple[int, ...] | None:
        """Return the coordinates of the chunk with this name in a grid, or None if no chunk has this name."""
        parts = name.split(self.separator)
        if self.first:
            if parts.pop(0) != self.first:
                return None
        elif not dimensions:
            return () if name == "0" else None
        digits = (part.isascii() and part.isdigit() and len(part) <= _MAX_DIGITS for part in parts)
        if len(parts) != dimensions or not all(digits):
            return None
        coordinates = tuple(map(int, parts))
        return coordinates if parts == list(map(str, coordinates)) else None  # not 01
