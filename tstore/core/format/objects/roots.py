"""Roots as objects: a short one is a frame; a long one begins with the pages of its nodes; pure, no I/O.

The pages have the format of a separate manifest's (`pages`), so that readers fetch only those that they need.
After them come the root's frame, which refers to them, and the length of the frame (u64). So a reader begins at
the end.
"""

from __future__ import annotations

from typing import NamedTuple

from msgspec.structs import replace

from tstore.core.format.frame import MAGIC
from tstore.core.format.layout import root_key
from tstore.core.format.objects.encoding import decode, encode
from tstore.core.format.objects.object_ref import ObjectRef
from tstore.core.format.objects.pages import in_pages, manifests_in
from tstore.core.format.objects.records import Root
from tstore.core.format.objects.references import Manifest
from tstore.errors import Corrupt

__all__ = [
    "ROOT_TRAILER",
    "StoredRoot",
    "decode_root",
    "decode_root_at_end",
    "frame_length",
    "is_in_pages",
    "stored_root",
]

ROOT_TRAILER = 8
"""The bytes after the frame of a root in pages, which are the frame's length (u64)."""


class StoredRoot(NamedTuple):
    """A root and the bytes of its object."""

    root: Root
    data: bytes


def stored_root(root: Root) -> StoredRoot:
    """Return a root as an object, its nodes in pages if they are many."""
    assert isinstance(root.manifest, Manifest)
    pages = in_pages(root_key(root.version), root.manifest)
    if pages is None:
        return StoredRoot(root, encode(root))
    root = replace(root, manifest=pages.reference)
    frame = encode(root)
    return StoredRoot(root, b"".join([pages.data, frame, len(frame).to_bytes(ROOT_TRAILER, "little")]))


def is_in_pages(data: bytes) -> bool:
    """Return whether an object that begins with these bytes is a root in pages."""
    return not data.startswith(MAGIC)


def decode_root(data: bytes) -> Root:
    """Return the root in an object; raise `Corrupt` or `UnsupportedFormat` unless all bytes are valid."""
    if not is_in_pages(data):
        root = decode(data, Root)
        if isinstance(root.manifest, ObjectRef):
            raise Corrupt("the pages of a root are missing")
        return root
    root = decode_root_at_end(data, len(data))
    assert isinstance(root.manifest, ObjectRef)
    for _ in manifests_in(root.manifest, data[: root.manifest.length]):
        pass  # each is checked
    return root


def frame_length(tail: bytes) -> int:
    """Return the length of the frame in an object that ends in these bytes."""
    return int.from_bytes(tail[-ROOT_TRAILER:], "little")


def decode_root_at_end(tail: bytes, length: int) -> Root:
    """Return the root in an object in pages from its last bytes, which have the whole frame.

    `length` is that of the object. Raise `Corrupt` or `UnsupportedFormat` unless it ends in a root with pages.
    """
    start = len(tail) - ROOT_TRAILER - frame_length(tail)
    if start < 0:
        raise Corrupt(f"a root of {length} bytes does not end in a frame")
    root = decode(tail[start:-ROOT_TRAILER], Root)
    if not isinstance(root.manifest, ObjectRef) or root.manifest.length != length - len(tail) + start:
        raise Corrupt(f"a root of {length} bytes has other pages than it says")
    return root
