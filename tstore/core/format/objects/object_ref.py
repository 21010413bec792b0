"""References to manifests that are separate objects; pure, no I/O."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Iterator
from typing import Annotated, NamedTuple

import msgspec

from tstore.core.format.bounds import MANIFEST_BYTES, MANIFEST_NODES
from tstore.core.format.frame import SHORTEST_FRAME, check_of
from tstore.core.format.layout import is_manifest
from tstore.core.format.objects.references import Body, Checksum, Natural
from tstore.core.format.objects.wellformed import check_keys, check_paths
from tstore.errors import Corrupt

__all__ = ["MAX_PAGES", "PAGE_HEADER", "ObjectRef", "Page", "PagePlace", "reference"]

MAX_PAGES = 4096
"""The maximum number of pages of a manifest."""

PAGE_HEADER = 8
"""The bytes before each page, which are its length (u64)."""

_Length = Annotated[int, msgspec.Meta(ge=SHORTEST_FRAME, le=MANIFEST_BYTES)]


class Page(Body, frozen=True):
    """A part of a long manifest: the nodes from the path `first` up to the first path of the next page."""

    first: str
    nodes: Annotated[int, msgspec.Meta(ge=1, le=MANIFEST_NODES)]
    length: _Length
    check: Checksum


class PagePlace(NamedTuple):
    """A page, its offset in the object, and the first path of the next page, None if it is the last one."""

    page: Page
    offset: int
    stop: str | None


class ObjectRef(Body, tag="object", dict=True, frozen=True):
    """The key of a manifest that is a separate object, or in front of a root, with its length and checksum.

    `segment_bytes` is the length of all segments of the manifest. A long manifest consists of `pages`, one after
    the other; then `check` is the checksum of the last one.
    """

    key: str
    length: _Length
    check: Checksum
    segment_bytes: Natural = 0
    pages: Annotated[tuple[Page, ...], msgspec.Meta(max_length=MAX_PAGES)] = ()

    def validate(self) -> None:
        """Raise `Corrupt` for invalid values."""
        check_keys((self.key,), is_manifest, "a manifest")
        self.check_pages()

    def check_pages(self) -> None:
        """Raise `Corrupt` if the places of the pages are invalid."""
        if not self.pages:
            return
        firsts = [page.first for page in self.pages]
        check_paths(list(filter(None, firsts)))
        if not all(map(operator.lt, firsts, firsts[1:])):
            raise Corrupt("the pages of a manifest are out of order")
        if self._ends[-1] != self.length or self.pages[-1].check != self.check:
            raise Corrupt("the pages of a manifest are not all of its bytes")

    @functools.cached_property
    def _ends(self) -> list[int]:
        """The end of each page."""
        return list(itertools.accumulate([PAGE_HEADER + page.length for page in self.pages]))

    def place(self, at: int) -> PagePlace:
        """Return the place of a page."""
        following = self.pages[at + 1 : at + 2]
        page = self.pages[at]
        return PagePlace(page, self._ends[at] - page.length, following[0].first if following else None)

    def places(self) -> Iterator[PagePlace]:
        """Yield the place of each page."""
        return map(self.place, range(len(self.pages)))

    def matches(self, data: bytes) -> bool:
        """Return whether these bytes have the lengths and checksums of the reference."""
        if len(data) != self.length or check_of(data) != self.check:
            return False
        return all(
            data[offset - PAGE_HEADER : offset] == page.length.to_bytes(PAGE_HEADER, "little")
            and check_of(data[offset : offset + page.length]) == page.check
            for page, offset, _ in self.places()
        )


def reference(key: str, data: bytes, segment_bytes: int = 0) -> ObjectRef:
    """Return the reference to a manifest that is one frame, and whose segments have `segment_bytes`."""
    return ObjectRef(key, len(data), check_of(data), segment_bytes)
