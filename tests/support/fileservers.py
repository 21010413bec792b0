"""Common static file servers: nginx, aiohttp's, and Python's."""

from __future__ import annotations

import contextlib
import functools
import grp
import http.server
import os
import pwd
import shutil
import socket
import subprocess
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
from aiohttp import web

from tests.support.processes import DEADLINE
from tests.support.web_server import serving_app

_NGINX = """
daemon off; user {user} {group}; worker_processes 1; pid {own}/pid; error_log {own}/error;
events {{}}
http {{
    access_log off; default_type application/octet-stream; sendfile on;
    client_body_temp_path {own}/t; proxy_temp_path {own}/t; fastcgi_temp_path {own}/t;
    uwsgi_temp_path {own}/t; scgi_temp_path {own}/t;
    server {{ listen 127.0.0.1:{port}; root {folder}; {more} }}
}}
"""


def _nginx(**values: object) -> str:
    user, group = pwd.getpwuid(os.getuid()).pw_name, grp.getgrgid(os.getgid()).gr_name
    return _NGINX.format(user=user, group=group, **values)


@contextlib.contextmanager
def nginx(folder: Path, own: Path, more: str = "") -> Iterator[str]:
    """Run nginx on a folder, with its own files in `own`, and yield its URL."""
    program = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if program is None:
        pytest.skip("nginx is not installed (Debian: nginx-light)")
    own.mkdir()
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        port = listening.getsockname()[1]
        (own / "conf").write_text(_nginx(own=own, port=port, folder=folder, more=more))
        started = subprocess.Popen(
            [program, "-c", own / "conf", "-p", own, "-e", own / "error"],
            env={"NGINX": f"{listening.fileno()};"},  # it inherits the socket, so no other process gets the port
            pass_fds=[listening.fileno()],
            stderr=subprocess.DEVNULL,
        )
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        started.terminate()
        started.wait(DEADLINE)


@contextlib.asynccontextmanager
async def aiohttp_files(folder: Path) -> AsyncIterator[str]:
    """Run aiohttp's file server and yield its URL."""
    app = web.Application()
    app.router.add_static("/", folder)
    async with serving_app(app) as url:
        yield url


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Log nothing."""

    def copyfile(self, *files: object) -> None:
        """Send a file; clients close the connection when they have read enough."""
        with contextlib.suppress(ConnectionError):
            super().copyfile(*files)  # type: ignore[arg-type]


@contextlib.contextmanager
def python_files(folder: Path) -> Iterator[str]:
    """Run Python's file server, which ignores `Range`, and yield its URL."""
    handler: Callable[..., _Quiet] = functools.partial(_Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=[0.01])
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()
