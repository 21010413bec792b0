"""The command `tstore serve`."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import os
import resource
import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

import click

import tstore
from tstore.cli.console import json_option, run, store_argument
from tstore.cli.tables import Progress
from tstore.errors import NotAStore, TStoreError

if TYPE_CHECKING:
    from tstore.server import Access, Server

__all__ = ["serve"]

TOKENS = "TSTORE_SERVER_TOKENS"

_STDERR = 2

_log = logging.getLogger("tstore.server")


@click.command("serve")
@store_argument
@click.option(
    "--host", default="127.0.0.1", show_default=True, help="Where to listen; elsewhere tokens are needed."
)
@click.option(
    "--port", type=click.IntRange(0, 65535), default=7341, show_default=True, help="0 picks one that is free."
)
@click.option(
    "--token-file",
    metavar="FILE",
    help="A line for each token: SCOPE TOKEN; scopes are read, write, admin. Read again on SIGHUP. "
    f"Else {TOKENS} is looked at.",
)
@click.option(
    "--anonymous",
    type=click.Choice(["none", "read", "write"]),
    help="What a request without a token may do: by default none, or write where there are no tokens at all.",
)
@click.option(
    "--create", is_flag=True, help="STORE may be empty yet: a client makes the store, or copies one there."
)
@click.option("--read-only", is_flag=True, help="Nothing is changed, whatever the token.")
@click.option("--tls-cert", metavar="FILE", help="The certificate (PEM), for https.")
@click.option("--tls-key", metavar="FILE", help="Its key (PEM).")
@click.option("--connections", type=click.IntRange(1), default=1024, show_default=True, help="Open at once.")
@click.option("--requests", type=click.IntRange(1), default=256, show_default=True, help="Answered at once.")
@click.option(
    "--max-pack", type=click.IntRange(1), default=65536, show_default=True, metavar="MB", help="The longest pack."
)
@click.option(
    "--drain", type=click.FloatRange(0), default=30, show_default=True, help="Seconds that writes get at the end."
)
@click.option(
    "--names",
    type=click.Choice(["layout", "any"]),
    default="layout",
    show_default=True,
    help="Which names there are: those of a store, or any.",
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
    names: Literal["layout", "any"],
    as_json: bool,
) -> int:
    """Serve STORE over HTTP until SIGTERM or Ctrl-C; requests are logged to standard error, a line of JSON each.

    Any tstore can open the URL that is printed. Removing objects, as gc does, needs a token of scope admin.
    """
    if (tls_cert is None) != (tls_key is None):
        raise click.UsageError("--tls-cert and --tls-key belong together; pass both or none")

    async def work(progress: Progress) -> None:
        from tstore.server import Certificate, Limits, Server  # imports aiohttp.web; no other command needs it

        _allow_files(2 * connections + 64)
        certificate = None if tls_cert is None or tls_key is None else Certificate(tls_cert, tls_key)
        server = Server(
            store,
            mode="r" if read_only else "a",
            host=host,
            port=port,
            access=_access(token_file, anonymous),
            certificate=certificate,
            names=names,
            limits=Limits(connections, requests, max_pack << 20, drain=drain),
        )
        if not (create or read_only) and names == "layout":
            await _check_store(store)
        ended = asyncio.Event()
        with _signals(ended):
            async with server:
                if token_file is not None:
                    again = functools.partial(_read_again, server, token_file, anonymous)
                    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, again)
                if as_json:
                    print(json.dumps({"store": server.store, "url": server.url}), flush=True)
                else:
                    print(f"serving {server.store} at {server.url}", flush=True)
                await ended.wait()

    from tstore.server import written

    with written(_STDERR):
        return run(work, lambda document: None, as_json)


async def _check_store(store: str) -> None:
    """Raises `NotAStore` where none is: a mistyped path must not become an empty store that all jobs save to."""
    try:
        async with await tstore.open(store, "r"):
            return
    except NotAStore as error:
        raise NotAStore(f"{error}, or pass --create to have clients make one there") from None


def _allow_files(count: int) -> None:
    """Raises the number of files that this process may have open, as far as that is permitted."""
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count if most == resource.RLIM_INFINITY else min(count, most)
    if now != resource.RLIM_INFINITY and wanted > now:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


def _access(token_file: str | None, anonymous: str | None) -> Access | None:
    from tstore.server import Access

    if token_file is not None:
        return Access.read(token_file, anonymous or "none")
    if os.environ.get(TOKENS):
        return Access.parse(os.environ[TOKENS], f"the variable {TOKENS}", anonymous or "none")
    return None if anonymous is None else Access(anonymous=anonymous)


def _read_again(server: Server, token_file: str, anonymous: str | None) -> None:
    """Has the tokens count that the file names now; those that counted stay where it can't be read."""
    from tstore.server import Access

    try:
        access = Access.read(token_file, anonymous or "none")
    except TStoreError as error:
        _log.warning("the tokens stay as they were: %s", error)
    else:
        server.admit(access)
        _log.info("the tokens were read again; there are %d", access.tokens)


@contextlib.contextmanager
def _signals(ended: asyncio.Event) -> Iterator[None]:
    """Has the first SIGTERM or Ctrl-C end the server gracefully; a second one ends it at once."""
    loop = asyncio.get_running_loop()
    handled = (signal.SIGTERM, signal.SIGINT)

    def end() -> None:
        ended.set()
        for number in handled:
            loop.remove_signal_handler(number)

    for number in handled:
        loop.add_signal_handler(number, end)
    try:
        yield
    finally:
        for number in handled:
            loop.remove_signal_handler(number)
