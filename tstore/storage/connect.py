"""From a URL to its backend."""

from __future__ import annotations

import importlib.util
import inspect
import os
import re
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import unquote, urlsplit

from tstore.errors import InvalidArgument
from tstore.storage.base import Backend
from tstore.storage.local.store import LocalBackend
from tstore.storage.memory import MemoryBackend
from tstore.storage.objects import Objects
from tstore.storage.remote import served

__all__ = ["connect"]

_SCHEME = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]+)://")

_KNOWN = "expected a path, file://, memory://, http(s)://, gs://, s3://, or another that fsspec knows"


def connect(url: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None) -> Backend:
    """The backend of a path or URL.

    `storage_options` are what the backend takes besides, as `token` or `endpoint_url`. Nothing is asked of a
    server yet. Raises `InvalidArgument` for a scheme or an option that is not known, or a package that is missing.
    """
    text, options = os.fspath(url), dict(storage_options or {})
    if not text:
        raise InvalidArgument(
            "the URL of a store is empty; expected a path, or a URL as memory://name, http(s)://, gs:// or s3://"
        )
    found = _SCHEME.match(text)
    scheme = "file" if found is None else found[1].lower()
    objects = _objects(scheme, text, options)
    if objects is not None:
        return served(objects)
    if options:
        raise InvalidArgument(f"{text} takes no storage_options; given: {', '.join(sorted(options))}")
    if found is None:
        return LocalBackend(text)
    if scheme == "file":
        parts = urlsplit(text)
        if parts.netloc not in ("", "localhost"):
            raise InvalidArgument(f"{text}: a file URL names a path of this machine, as file:///path")
        return LocalBackend(unquote(parts.path))
    return MemoryBackend(text.partition("://")[2].strip("/"))


def _objects(scheme: str, url: str, options: dict[str, Any]) -> Objects | None:
    """The objects of a server, None for a scheme without one; each kind is imported where it is used."""
    match scheme:
        case "file" | "memory":
            return None
        case "http" | "https":
            from tstore.storage.http.store import HttpObjects

            return _made(HttpObjects, url, options)
        case "gs" | "gcs":
            _need(url, "gcs", "gcsfs", "google_crc32c")
            from tstore.storage.gcs.store import GcsObjects

            return _made(GcsObjects, url, options)
        case "s3" | "s3a":
            _need(url, "s3", "s3fs")
            from tstore.storage.s3.store import S3Objects

            return _made(S3Objects, url, options)
        case other:
            from fsspec.registry import known_implementations, registry

            if other not in known_implementations and other not in registry:
                raise InvalidArgument(f"{url}: scheme {other}:// is not known; {_KNOWN}")
            from tstore.storage.fsspec import FsspecObjects

            return FsspecObjects(url, **options)


def _made(kind: Callable[..., Objects], url: str, options: dict[str, Any]) -> Objects:
    """Objects of that kind; `InvalidArgument` for an option that is none of its parameters."""
    known = [name for name in inspect.signature(kind).parameters if name != "url"]
    unknown = sorted(options.keys() - set(known))
    if unknown:
        raise InvalidArgument(
            f"{url}: storage_options {', '.join(map(repr, unknown))} not known; expected {', '.join(known)}"
        )
    return kind(url, **options)


def _need(url: str, extra: str, *packages: str) -> None:
    """Raises `InvalidArgument` where a package is missing that comes with that extra of tstore."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise InvalidArgument(
            f"{url}: the package {missing[0]} is not installed, which this kind of URL needs; install it by "
            f"pip install 'tstore[{extra}]'"
        )
