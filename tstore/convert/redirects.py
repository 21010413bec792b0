"""Keep credentials of fsspec's HTTP requests from other servers.

aiohttp follows redirects, and drops `Authorization` and `Cookie` when one leads to another server. But credentials
have other names too, such as `X-Api-Key`, and a session sends its default authorization to every server. So a
request that has left the server of the URL keeps only the headers that aiohttp itself sends.
"""

from __future__ import annotations

from typing import Any

__all__ = ["without_leaks"]

_HARMLESS = {"host", "accept", "accept-encoding", "connection", "range", "user-agent"}


def without_leaks(file_system: Any, url: str) -> Any:
    """Return the file system of a URL with this rule if it is fsspec's for HTTP, or a cache of it."""
    from fsspec.implementations.cached import CachingFileSystem

    if isinstance(file_system, CachingFileSystem):
        file_system.fs = without_leaks(file_system.fs, url.rpartition("::")[2])
        return file_system
    if "http" not in file_system.protocol:
        return file_system
    from yarl import URL

    origin = URL(url).origin()

    async def drop_headers(request: Any, handler: Any) -> Any:
        if request.url.origin() != origin:
            for name in [name for name in request.headers if name.lower() not in _HARMLESS]:
                request.headers.popall(name, None)
        return await handler(request)

    options = {k: v for k, v in file_system.storage_options.items() if k != "skip_instance_cache"}
    client = dict(options.pop("client_kwargs", None) or {})
    client["middlewares"] = (*client.get("middlewares", ()), drop_headers)
    # not the shared instance, whose session may already exist, without the rule
    return type(file_system)(*file_system.storage_args, client_kwargs=client, skip_instance_cache=True, **options)
