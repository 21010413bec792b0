"""From a URL to its backend."""

from __future__ import annotations

import os
import re
from urllib.parse import unquote, urlsplit

from tstore.errors import InvalidArgument
from tstore.kv.base import Backend
from tstore.kv.local import LocalBackend
from tstore.kv.memory import MemoryBackend

__all__ = ["connect"]

_SCHEME = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]+)://")


def connect(url: str | os.PathLike[str]) -> Backend:
    """The backend of a path, a `file://` or a `memory://name` URL; `InvalidArgument` for any other."""
    text = os.fspath(url)
    if not text:
        raise InvalidArgument("the URL of a store is empty; expected a path, file:// or memory://name")
    scheme = _SCHEME.match(text)
    if scheme is None:
        return LocalBackend(text)
    match scheme[1].lower():
        case "file":
            parts = urlsplit(text)
            if parts.netloc not in ("", "localhost"):
                raise InvalidArgument(f"{text}: a file URL names a path of this machine, as file:///path")
            return LocalBackend(unquote(parts.path))
        case "memory":
            return MemoryBackend(text.partition("://")[2].strip("/"))
        case other:
            raise InvalidArgument(f"{text}: scheme {other}:// is not known; expected a path, file:// or memory://")
