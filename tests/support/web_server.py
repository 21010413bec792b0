"""A web server in the event loop of a test."""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable

from aiohttp import web


@contextlib.asynccontextmanager
async def serving(
    respond: Callable[[web.Request], Awaitable[web.StreamResponse]], tls: ssl.SSLContext | None = None
) -> AsyncIterator[str]:
    """Answer the requests for all paths with a handler, and yield the URL of the server."""
    app = web.Application(client_max_size=1 << 30)
    app.router.add_route("*", r"/{path:[\s\S]*}", respond)
    async with serving_app(app, tls) as url:
        yield url


@contextlib.asynccontextmanager
async def serving_app(app: web.Application, tls: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    """Serve an application on a free port of localhost, and yield its URL."""
    runner = web.AppRunner(app, shutdown_timeout=0.1)  # by default it waits a minute for responses under way
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls).start()
    try:
        yield f"{'http' if tls is None else 'https'}://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
