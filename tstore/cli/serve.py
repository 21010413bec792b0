"""The commands `tstore serve` and `tstore view`."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import os
import resource
import secrets
import signal
import sys
import threading
import webbrowser
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Literal

import click

import tstore
from tstore.cli.console import Progress, json_option, number_option, path_or_url, print_now, run, store_argument
from tstore.core.runtime.budget import return_large_buffers
from tstore.core.storage.connect import connect
from tstore.errors import InvalidArgument, NotAStore, TStoreError

if TYPE_CHECKING:
    from tstore.service.page import Site
    from tstore.service.server import Access, Server

__all__ = ["serve", "view"]

_TOKENS_VARIABLE = "TSTORE_SERVER_TOKENS"
_STDERR_FD = 2
_ENTRANCE = 600.0  # seconds for which the printed address works
_BROWSER_ENTRANCE = 60.0  # the same for the started browser, since other users see its command line

_log = logging.getLogger("tstore.server")


@click.command("serve")
@store_argument
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    help="The address to listen on; any but a loopback address needs tokens.",
)
@number_option("--port", "P", click.IntRange(0, 65535), 7341, "The port; 0 picks a free one.")
@click.option(
    "--token-file",
    type=path_or_url,
    metavar="FILE",
    help="A file with one line SCOPE TOKEN per token; scopes are read, write and admin. SIGHUP reloads it. "
    f"By default the environment variable {_TOKENS_VARIABLE} is used.",
)
@click.option(
    "--anonymous",
    type=click.Choice(["none", "read", "write"]),
    help="The scope of requests without a token: none by default, or write if there are no tokens.",
)
@click.option("--create", is_flag=True, help="Let clients create the store if it does not exist.")
@click.option("--read-only", is_flag=True, help="Refuse every change, even with a write or admin token.")
@click.option("--tls-cert", type=path_or_url, metavar="FILE", help="The certificate (PEM), for https.")
@click.option("--tls-key", type=path_or_url, metavar="FILE", help="The key of the certificate (PEM).")
@number_option("--connections", "N", click.IntRange(1), 1024, "The maximum number of concurrent connections.")
@number_option("--requests", "N", click.IntRange(1), 256, "The maximum number of concurrent requests.")
@number_option("--max-pack", "MiB", click.IntRange(1), 65536, "The maximum size of a pack.")
@number_option("--drain", "S", click.FloatRange(0), 30, "The time to wait for writes at shutdown, in seconds.")
@number_option(
    "--min-rate",
    "KiB",
    click.IntRange(1, 1024),
    8,
    "The average rate, in KiB per second, below which an upload or download is aborted after three minutes. "
    "tstore's own clients abort below 8.",
)
@click.option(
    "--hostname",
    multiple=True,
    metavar="NAME",
    help="A name of this server or its proxy. HTTP requests without a token must address the server by a NAME, "
    "localhost or an IP.",
)
@click.option(
    "--names",
    type=click.Choice(["layout", "any"]),
    default="layout",
    show_default=True,
    help="Which object names are served: those of a store, or any.",
)
@json_option
def serve(
    store: str,
    host: str,
    port: int,
    token_file: str | None,
    anonymous: str | None,
    create: bool,
    read_only: bool,
    tls_cert: str | None,
    tls_key: str | None,
    connections: int,
    requests: int,
    max_pack: int,
    drain: float,
    min_rate: int,
    hostname: tuple[str, ...],
    names: Literal["layout", "any"],
    as_json: bool,
) -> int:
    """Serve a store over HTTP.

    The command prints a URL that any tstore client can open, and serves the store until SIGTERM or Ctrl-C.
    Browsers see the page of `tstore view` at the same URL. Each request is logged as a line of JSON on standard
    error. Deleting data, as gc does, needs a token with the scope admin.
    """
    if (tls_cert is None) != (tls_key is None):
        raise click.UsageError("--tls-cert and --tls-key belong together; pass both or none")

    from tstore.service.server import (  # imports aiohttp.web, so not at the top
        Certificate,
        Limits,
        Server,
        logging_to,
    )

    async def work(progress: Progress) -> None:
        _raise_file_limit(2 * connections + 64)  # a socket and a file for each connection
        server = Server(
            store,
            mode="r" if read_only else "a",
            host=host,
            port=port,
            access=_access(token_file, anonymous),
            certificate=None if tls_cert is None or tls_key is None else Certificate(tls_cert, tls_key),
            names=names,
            hostnames=hostname,
            limits=Limits(connections, requests, max_pack << 20, drain=drain, rate=min_rate << 10),
            page=None if names == "any" else _page_or_none(),
        )
        if not (create or read_only) and names == "layout":
            await _check_store(store)
        reload = None if token_file is None else functools.partial(_reload_tokens, server, token_file, anonymous)

        def announce() -> None:
            document = {"store": connect(store).url, "url": server.url}
            print_now(json.dumps(document) if as_json else f"serving {server.store} at {server.url}")

        await _serve_until_signal(server, reload, announce)

    with logging_to(_STDERR_FD):
        return run(work, lambda document: None, as_json)


@click.command("view")
@store_argument
@number_option("--port", "P", click.IntRange(0, 65535), 0, "The port; 0 picks a free one.")
@click.option("--no-browser", is_flag=True, help="Only print the address; start no browser.")
@json_option
def view(store: str, port: int, no_browser: bool, as_json: bool) -> int:
    """Show a store in a browser.

    The page shows steps with their metrics, hosts under way, arrays, and faults; it changes nothing. The command
    serves it to this machine alone, until SIGTERM or Ctrl-C. It prints an address that works once, for one
    browser, within ten minutes, and starts a browser if there is one.
    """
    from tstore.service.server import Access, Server

    async def work(progress: Progress) -> None:
        progress.doing(f"opening {store}")
        async with await tstore.open(store, "r") as opened:
            address = opened.url  # raises `NotAStore` before a server starts
        site, token = _page(address), secrets.token_urlsafe(32)
        server = Server(store, mode="r", port=port, access=Access({token: "read"}), page=site)
        progress.stop()

        def announce() -> None:
            entrance = site.entrance(server.url, token, _ENTRANCE)
            document = {"store": address, "url": server.url, "entrance": entrance}
            print_now(json.dumps(document) if as_json else f"showing {store} at {entrance}")
            if not no_browser and _has_display():
                shown = site.entrance(server.url, token, _BROWSER_ENTRANCE)
                threading.Thread(target=webbrowser.open, args=[shown], daemon=True).start()

        await _serve_until_signal(server, None, announce)

    return run(work, lambda document: None, as_json)


def _page(address: str | None = None) -> Site:
    """Return the page; raise `InvalidArgument` if a package that it needs is missing or broken."""
    try:
        from tstore.service.page import Site
    except Exception as error:  # the import of a broken package may raise anything
        reason = f"the page can't be shown ({error}); to install what it needs: pip install jinja2"
        raise InvalidArgument(reason) from error
    return Site(address)


def _page_or_none() -> Site | None:
    """Return the page; if it can't be shown, log why and return None, since a store is served without it too."""
    try:
        return _page()
    except InvalidArgument as error:
        _log.warning("%s", error)
        return None


def _has_display() -> bool:
    """Return whether a graphical browser can appear; one for terminals would take over this terminal."""
    return sys.platform != "linux" or any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))


async def _serve_until_signal(
    server: Server, reload: Callable[[], None] | None, announce: Callable[[], None]
) -> None:
    """Serve until SIGTERM or Ctrl-C; call `announce` once the server is ready, and `reload` on SIGHUP."""
    return_large_buffers()  # of metadata, which is received whole, and of what the page computes
    shutdown = asyncio.Event()
    with _shutdown_signals(shutdown):
        async with server:
            if reload is not None:
                asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reload)
            announce()
            await shutdown.wait()


async def _check_store(store: str) -> None:
    """Raise `NotAStore` if there is no store: jobs must not save to a new store at a mistyped path."""
    try:
        async with await tstore.open(store, "r"):
            return
    except NotAStore as error:
        raise NotAStore(f"{error}, or pass --create to let clients create one") from None


def _raise_file_limit(count: int) -> None:
    """Raise this process's limit of open files to `count`, if it is lower, as far as permitted."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and limit > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def _access(token_file: str | None, anonymous: str | None) -> Access | None:
    """Return the tokens and the scope of requests without a token; None if no option or variable sets them."""
    from tstore.service.server import Access

    if token_file is not None:
        return Access.read(token_file, anonymous or "none")
    if _TOKENS_VARIABLE in os.environ:  # even if empty: a missing secret must not let everybody write
        return Access.parse(os.environ[_TOKENS_VARIABLE], f"the variable {_TOKENS_VARIABLE}", anonymous or "none")
    return None if anonymous is None else Access(anonymous=anonymous)


def _reload_tokens(server: Server, token_file: str, anonymous: str | None) -> None:
    """Reload the token file; keep the current tokens if it cannot be read."""
    from tstore.service.server import Access

    try:
        access = Access.read(token_file, anonymous or "none")
    except TStoreError as error:
        _log.warning("the current tokens are kept: %s", error)
    else:
        server.set_access(access)
        _log.info("the tokens were reloaded; there are now %d", access.token_count)


@contextlib.contextmanager
def _shutdown_signals(shutdown: asyncio.Event) -> Iterator[None]:
    """Set `shutdown` at the first SIGTERM or Ctrl-C, for a graceful end; the second ends the process at once."""
    loop = asyncio.get_running_loop()
    signals = (signal.SIGTERM, signal.SIGINT)

    def end() -> None:
        shutdown.set()
        for number in signals:
            loop.remove_signal_handler(number)

    for number in signals:
        loop.add_signal_handler(number, end)
    try:
        yield
    finally:
        for number in signals:
            loop.remove_signal_handler(number)
