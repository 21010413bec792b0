"""The storage at a path or URL."""

from __future__ import annotations

import importlib.util
import inspect
import os
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote, urlsplit

from tstore.core.format.arguments import quote
from tstore.core.storage.base import Storage
from tstore.core.storage.environment import VARIABLE, options_for
from tstore.core.storage.local.store import LocalStorage
from tstore.errors import InvalidArgument

if TYPE_CHECKING:  # each kind of storage is imported when it is used
    from tstore.core.storage.cache import Cache

__all__ = ["Address", "connect", "storage_at"]

_SCHEME = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]+)://")

_ONE_SLASH = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")

_CHAIN = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)::(.*)", re.DOTALL)  # fsspec's chains: filecache::https://…

_MAX_URL_LENGTH = 4096
_RETRY_TIMEOUT = "retry_timeout"  # an option of every remote storage


class Address(NamedTuple):
    """The arguments with which a store was opened, so that another process can open it."""

    url: str
    storage_options: Mapping[str, Any] | None
    cache: Cache | None

    @staticmethod
    def of(url: Any, storage_options: Mapping[str, Any] | None, cache: Cache | None) -> Address | None:
        """Return the address of a URL or path, None for a `Storage`; a relative path becomes absolute."""
        if not isinstance(url, (str, os.PathLike)):
            return None
        text = os.fspath(url)
        return Address(text if _SCHEME.match(text) else os.path.abspath(text), storage_options, cache)


def storage_at(url: Any, storage_options: Mapping[str, Any] | None = None) -> Storage:
    """Return the storage at a URL or path, or a `Storage` unchanged; raise `InvalidArgument` for anything else."""
    if isinstance(url, (str, os.PathLike)):
        return connect(url, storage_options)
    if hasattr(url, "capabilities"):  # a `Storage`, or any object with its interface
        storage: Storage = url
        return storage
    module, name = type(url).__module__, type(url).__qualname__
    if module == "tstore.sync":
        raise InvalidArgument(
            f"{url!r} is a blocking store; pass it to functions of tstore.sync, or open its url with tstore.open"
        )
    kind = name if module == "builtins" else f"{module}.{name}"
    raise InvalidArgument(
        f"an object of type {kind} is not a store; pass a URL, a path or a Store as the first argument, as in "
        "save(url, tree, step)"
    )


def connect(url: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None) -> Storage:
    """Return the storage at a path or URL; no request is made yet.

    `storage_options` are options of that kind of storage, such as `token` or `endpoint_url`; those that it lacks
    are taken from the environment (`environment`). For every storage but a local one, `retry_timeout` is the
    seconds for which failed requests are repeated (`retry`). Raise `InvalidArgument` for an invalid URL, an
    unknown scheme or option, or a missing package.
    """
    if not isinstance(url, (str, os.PathLike)):
        raise InvalidArgument(f"{url!r:.60} is not the location of a store; pass a URL or a path")
    text = os.fspath(url)
    if not text:
        raise InvalidArgument(
            "the URL of a store is empty; expected a path, or a URL such as memory://name, http(s)://, gs:// or "
            "s3://"
        )
    prefix = _SCHEME.match(text)
    shown = quote(text) if prefix is None else f"{prefix[0]}…"  # a URL may have a password
    if len(text) > _MAX_URL_LENGTH:
        raise InvalidArgument(f"{shown} has {len(text):,} characters; expected at most {_MAX_URL_LENGTH:,}")
    if "\0" in (text if prefix is None else unquote(text)):
        raise InvalidArgument(f"{shown} has a null character; expected a path or URL without one")
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        raise InvalidArgument(f"{shown} is not valid Unicode: it has lone surrogates") from None
    if not isinstance(storage_options, Mapping | None) or not all(
        isinstance(k, str) for k in storage_options or ()
    ):
        raise InvalidArgument(
            f"storage_options of type {type(storage_options).__name__}: expected a dict with the names of options"
        )
    scheme = "file" if prefix is None else prefix[1].lower()
    if prefix is None and (match := _ONE_SLASH.match(text)):
        raise InvalidArgument(
            f"{shown}: a URL has two slashes after {match[1]}:, as {match[1]}:// (or pass ./{match[1]}:/… for a "
            "folder of that name)"
        )
    if (chain := _CHAIN.match(text)) and _is_known_to_fsspec(chain[1]):
        inner = _SCHEME.match(chain[2])
        raise InvalidArgument(
            f"{chain[1]}::{inner[0] if inner else ''}… is a chain of fsspec, which can't have a store: pass the "
            f"URL after {chain[1]}::, and cache=FOLDER to keep what is read (or ./{chain[1]}::… for a folder of "
            "that name)"
        )
    options = {**(options_for(text) if VARIABLE in os.environ else {}), **(storage_options or {})}
    seconds, policy = options.pop(_RETRY_TIMEOUT, None), None
    if seconds is not None:  # checked first, because a kind of storage may need a package that is not installed
        from tstore.core.storage.retry import RetryPolicy

        policy = RetryPolicy.lasting(seconds)
    remote = _remote(scheme, text, options)
    if remote is not None:
        from tstore.core.storage.remote import as_remote
        from tstore.core.storage.retry import RETRY_POLICY

        return as_remote(remote, policy or RETRY_POLICY)
    if seconds is not None:
        options[_RETRY_TIMEOUT] = seconds
    if options:
        raise InvalidArgument(f"{text} takes no storage_options; got {', '.join(sorted(options))}")
    if prefix is None:
        return LocalStorage(text)
    if scheme == "file":
        parts = urlsplit(text)
        if parts.netloc not in ("", "localhost"):
            raise InvalidArgument(f"{text}: a file URL names a path on this machine, such as file:///path")
        return LocalStorage(unquote(parts.path))
    from tstore.core.storage.memory import MemoryStorage

    return MemoryStorage(text.partition("://")[2].strip("/"))


def _remote(scheme: str, url: str, options: dict[str, Any]) -> Storage | None:
    """Return the storage of a remote scheme, None for a local one; import each kind only when it is used."""
    match scheme:
        case "file" | "memory":
            return None
        case "http" | "https":
            from tstore.core.storage.http.store import HttpStorage

            return _with_options(HttpStorage, url, options)
        case "gs" | "gcs":
            _require(url, "gcs", "gcsfs", "google_crc32c")
            from tstore.core.storage.gcs.store import GcsStorage

            return _with_options(GcsStorage, url, options)
        case "s3" | "s3a":
            _require(url, "s3", "s3fs")
            from tstore.core.storage.s3.store import S3Storage

            return _with_options(S3Storage, url, options)
        case other:
            if not _is_known_to_fsspec(other):
                raise InvalidArgument(
                    f"{url}: unknown scheme {other}://; expected a path, file://, memory://, http(s)://, gs://, "
                    "s3://, or another scheme of fsspec"
                )
            from tstore.core.storage.fsspec import FsspecStorage

            return FsspecStorage(url, **options)


def _is_known_to_fsspec(scheme: str) -> bool:
    from fsspec.registry import known_implementations, registry

    return scheme in known_implementations or scheme in registry


def _with_options(storage_class: Callable[..., Storage], url: str, options: dict[str, Any]) -> Storage:
    """Return a storage of this class; raise `InvalidArgument` for options that its constructor does not take."""
    known = [name for name in inspect.signature(storage_class).parameters if name != "url"]
    known.append(_RETRY_TIMEOUT)
    unknown = sorted(options.keys() - set(known))
    if unknown:
        raise InvalidArgument(
            f"{url}: unknown storage_options {', '.join(map(repr, unknown))} (passed, or in {VARIABLE}); expected "
            f"{', '.join(known)}"
        )
    return storage_class(url, **options)


def _require(url: str, extra: str, *packages: str) -> None:
    """Raise `InvalidArgument` if one of the packages, which the extra `tstore[extra]` installs, is missing."""
    for name in packages:
        if importlib.util.find_spec(name) is None:
            raise InvalidArgument(
                f"{url}: this kind of URL needs the package {name}, which is not installed; run "
                f"pip install 'tstore[{extra}]'"
            )
