"""Pages: a long manifest cut by path, so that readers fetch only the nodes that they need; pure, no I/O.

A manifest of more than `SHORT_MANIFEST` bytes is cut into pages of about `PAGE_BYTES`. Each is a manifest in a
frame of its own, with its own packs, documents and checksum. They follow each other in one object, in the order of
paths, each after its length (u64), so that the object can be checked without the reference to it. The reference to
the object (`object_ref`) has the first path of each page, so ranges of paths cannot overlap.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from tstore.core.format.bounds import MANIFEST_NODES
from tstore.core.format.frame import MAGIC, check_of
from tstore.core.format.objects.encoding import decode, encode
from tstore.core.format.objects.object_ref import PAGE_HEADER, ObjectRef, Page, PagePlace, reference
from tstore.core.format.objects.references import Manifest
from tstore.core.format.objects.wellformed import check_documents
from tstore.errors import Corrupt, UnsupportedFormat

__all__ = [
    "PAGE_BYTES",
    "SHORT_MANIFEST",
    "StoredManifest",
    "check_object",
    "decode_page",
    "in_pages",
    "manifests_in",
    "stored",
]

SHORT_MANIFEST = 256 << 10
"""The maximum bytes of an unpaged manifest: one request for all of it is faster than two for parts."""

PAGE_BYTES = 64 << 10
"""The length of a page in bytes; pages of a very long manifest are longer, so that their number stays bounded."""

_MAX_COUNT = 1024  # pages, as long as no node takes more than a page
_MAX_NAMES = 256 << 10  # characters in the first paths of all pages


class StoredManifest(NamedTuple):
    """A manifest as an object: the reference to it, and its bytes."""

    reference: ObjectRef
    data: bytes


def stored(key: str, manifest: Manifest) -> StoredManifest:
    """Return a manifest as the object with this key, in pages if it is long."""
    if (pages := in_pages(key, manifest)) is not None:
        return pages
    data = encode(manifest)
    return StoredManifest(reference(key, data, manifest.segment_bytes), data)


def in_pages(key: str, manifest: Manifest) -> StoredManifest | None:
    """Return a manifest as pages in the object with this key, None if it is too short for pages."""
    cuts = _cuts(manifest)
    if len(cuts) < 3:
        return None
    frames = [encode(manifest.part(start, stop)) for start, stop in itertools.pairwise(cuts)]
    pages = [
        Page(manifest.paths[start], stop - start, len(frame), check_of(frame))
        for (start, stop), frame in zip(itertools.pairwise(cuts), frames, strict=True)
    ]
    data = b"".join([part for frame in frames for part in (len(frame).to_bytes(PAGE_HEADER, "little"), frame)])
    return StoredManifest(ObjectRef(key, len(data), check_of(data), manifest.segment_bytes, tuple(pages)), data)


def _cuts(manifest: Manifest) -> list[int]:
    """Return the positions in `paths` at which the pages of a manifest begin, and the number of paths."""
    count = len(manifest.paths)
    if manifest.size <= SHORT_MANIFEST:
        return [0, count]
    ends = np.cumsum(manifest.sizes)
    length = max(PAGE_BYTES, int(ends[-1]) // _MAX_COUNT)
    while True:
        cuts = [0]
        while cuts[-1] < count:
            before = int(ends[cuts[-1] - 1]) if cuts[-1] else 0
            stop = max(cuts[-1] + 1, int(np.searchsorted(ends, before + length, "right")))
            cuts.append(min(stop, cuts[-1] + MANIFEST_NODES))
        if sum(len(manifest.paths[cut]) for cut in cuts[:-1]) <= _MAX_NAMES or length > ends[-1]:
            return cuts
        length *= 2


def decode_page(data: bytes, key: str, place: PagePlace) -> Manifest:
    """Return the manifest of a page; raise `Corrupt` unless the bytes are those to which its place refers."""
    page, offset, stop = place
    label = f"{key}, the {page.length} bytes at {offset}, which are nodes from {page.first[:60]!r} on"
    if len(data) != page.length or check_of(data) != page.check:
        raise Corrupt(
            f"{label}, are not the page of a manifest that was committed: their checksum is another; restore the "
            "file from a copy, or read another version"
        )
    try:
        manifest = decode(data, Manifest)
    except (Corrupt, UnsupportedFormat) as error:
        raise type(error)(f"{label}: {error}") from error
    paths = manifest.paths
    within = stop is None or (bool(paths) and paths[-1] < stop)
    if len(paths) != page.nodes or paths[0] != page.first or not within:
        raise Corrupt(f"{label}: there are other nodes than the reference to the page says")
    return manifest


def manifests_in(reference: ObjectRef, data: bytes) -> Iterator[Manifest]:
    """Yield the manifest of each page of an object, or the one manifest that it is.

    Raise `Corrupt` unless the bytes are those to which the reference refers.
    """
    segment_bytes = 0
    if not reference.matches(data):
        raise Corrupt(
            f"{reference.key} is not the object that was committed: expected {reference.length} bytes and the "
            f"checksums in its record, got {len(data)} bytes; restore it from a copy of the store"
        )
    for manifest in _decoded(reference, data):
        segment_bytes += manifest.segment_bytes
        yield manifest
    if segment_bytes != reference.segment_bytes:
        raise Corrupt(f"{reference.key} has segments of other lengths than recorded")


def check_object(data: bytes) -> None:
    """Raise `Corrupt` or `UnsupportedFormat` unless the bytes are a valid manifest or its pages.

    Long metadata documents are checked too, which readers check when they need them.
    """
    for frame in _frames(data):
        check_documents(decode(frame, Manifest).documents)


def _frames(data: bytes) -> Iterator[bytes]:
    """Yield the pages in an object, or the object itself."""
    if data.startswith(MAGIC) or not data:
        yield data
        return
    at = 0
    while at < len(data):
        start = at + PAGE_HEADER
        at = start + int.from_bytes(data[at:start], "little")
        if at > len(data):
            raise Corrupt(f"a page of a manifest of {len(data)} bytes ends at {at}")
        yield data[start:at]


def _decoded(reference: ObjectRef, data: bytes) -> Iterator[Manifest]:
    for place in reference.places():
        yield decode_page(data[place.offset : place.offset + place.page.length], reference.key, place)
    if not reference.pages:
        try:
            yield decode(data, Manifest)
        except (Corrupt, UnsupportedFormat) as error:
            raise type(error)(f"{reference.key}: {error}") from error
