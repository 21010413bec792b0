"""Bearer tokens, each bound to the one server that may receive it.

A token is looked for in this order:

1. `storage_options={"token": …}`: for the server of the URL that it is passed with.
2. `TSTORE_TOKEN_<HOST>_<PORT>`, then `TSTORE_TOKEN_<HOST>`, for every port of the host. `<HOST>` is the host in
   capitals, each dot as "_" and each hyphen as "__" (as for Terraform), so that no two hosts share a name:
   `https://ckpt-1.example.com` is `TSTORE_TOKEN_CKPT__1_EXAMPLE_COM`. A host with other characters (an IPv6
   address, an underscore) has no variable, and a host named "file" only the variable with a port (see 3).
3. The file that `TSTORE_TOKEN_FILE` names: a line `HOST TOKEN` or `HOST:PORT TOKEN` for each server; the latter
   takes precedence. Empty lines and those that start with "#" are ignored. Other users must have no access to the
   file (`read_token_file`).

A token from 2 or 3 is sent only after the server has asked for a token, or refused a request without it. A token
without a host (`TSTORE_TOKEN`, or a file of nothing but a token) is not used: it would go to any server that asks.
"""

from __future__ import annotations

import codecs
import functools
import ipaddress
import os
import re
import stat
from typing import NamedTuple

from exmy.user_warnings import warn
from yarl import URL

from tstore.errors import InvalidArgument

__all__ = ["Token", "find_token", "read_token_file", "token_advice", "warn_if_cleartext"]

_FILE = "TSTORE_TOKEN_FILE"
_PREFIX = "TSTORE_TOKEN_"
_LABEL = "[a-z0-9](?:[a-z0-9-]*[a-z0-9])?"
_NAME = re.compile(rf"{_LABEL}(?:\.{_LABEL})*")
_SERVER = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9._-]+))(?::([0-9]{1,5}))?")
_MAX_FILE_SIZE = 1 << 20

_warned: set[str] = set()


class _Server(NamedTuple):
    """The server of a token: a host and a port, None for every port of the host."""

    host: str
    port: int | None


class Token:
    """The bearer token for one server; its repr does not show it."""

    __slots__ = ("_text", "preemptive")

    def __init__(self, text: str, preemptive: bool) -> None:
        self._text = text.strip()
        self.preemptive = preemptive
        """Whether every request carries it, not only those after the server has asked for a token."""
        if not self._text or not all("!" <= c <= "~" for c in self._text):
            raise InvalidArgument("the token is empty, or has invalid characters (spaces, line breaks)")

    @property
    def header(self) -> str:
        """The value of the Authorization header."""
        return f"Bearer {self._text}"

    def hide(self, text: str) -> str:
        """Return the text without the token, in case a server has sent it back."""
        return text.replace(self._text, "…")

    def __repr__(self) -> str:
        return "<Token …>"


def find_token(url: URL, passed: str | None) -> Token | None:
    """Return the token for a server: the one that was passed, or the environment's for this server."""
    if passed is not None:
        return Token(passed, preemptive=True)
    for name in _variables(url):
        if name in os.environ:
            try:
                return Token(os.environ[name], preemptive=False)
            except InvalidArgument as error:
                raise InvalidArgument(f"{name}: {error}") from None
    if path := os.environ.get(_FILE):
        tokens = _read_file(path)
        return tokens.get(_Server(_host(url), url.port)) or tokens.get(_Server(_host(url), None))
    return None


def token_advice(url: URL) -> str:
    """Return how to pass a token for a server, for the message of an error."""
    host = _host(url)
    line = f"[{host}]:{url.port}" if ":" in host else f"{host}:{url.port}"
    names = _variables(url)
    variable = f", or set {names[0]}" if names else ""
    unused = "TSTORE_TOKEN is not used, as it would go to any server that asks"
    note = f"; {unused}" if "TSTORE_TOKEN" in os.environ else ""
    path = os.environ.get(_FILE)
    file = f"add to {path} ({_FILE})" if path else f"set {_FILE} to a file with"
    return f"pass storage_options={{'token': …}}{variable}, or {file} the line '{line} <token>'{note}"


def warn_if_cleartext(url: URL) -> None:
    """Warn, once per host, if a token goes over http to another machine."""
    if url.scheme != "http" or (host := _host(url)) in _warned or _is_loopback(host):
        return
    _warned.add(host)
    warn(
        f"the token for {url.origin()} goes over http, where anyone on the network path can read it; use https "
        "(tstore serve --tls-cert), or an encrypted tunnel to the server",
        RuntimeWarning,
    )


def _host(url: URL) -> str:
    """Return the host of a URL in its canonical form."""
    return _canonical(url.raw_host or "")


@functools.lru_cache(maxsize=256)
def _canonical(host: str) -> str:
    host = host.lower()
    try:
        return ipaddress.ip_address(host).compressed
    except ValueError:
        return host


@functools.lru_cache(maxsize=256)
def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def _variables(url: URL) -> list[str]:
    """Return the variables that may contain a token for a server, the variable with its port first."""
    host = _host(url)
    # the host 1.2.3 has no variable: with port 4 it would share that of the host 1.2.3.4
    if not _NAME.fullmatch(host) or (host.rpartition(".")[2].isdecimal() and host.count(".") != 3):
        return []
    name = _PREFIX + host.replace("-", "__").replace(".", "_").upper()
    return [variable for variable in (f"{name}_{url.port}", name) if variable != _FILE]


def _read_file(path: str) -> dict[_Server, Token]:
    """Return the tokens of a file; errors name the line, never its contents."""
    tokens: dict[_Server, Token] = {}
    text = read_token_file(path, f"{_FILE} names {path}, which", "HOST[:PORT] TOKEN")
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        server = _parse_server(words[0])
        if len(words) != 2 or server is None:
            raise InvalidArgument(
                f"{path}, line {number}: expected HOST TOKEN or HOST:PORT TOKEN, such as "
                "ckpt.example.com:7341 <token>"
            )
        if server in tokens:
            raise InvalidArgument(f"{path}, line {number}: an earlier line is for the same server; keep one")
        try:
            tokens[server] = Token(words[1], preemptive=False)
        except InvalidArgument as error:
            raise InvalidArgument(f"{path}, line {number}: {error}") from None
    return tokens


def _parse_server(text: str) -> _Server | None:
    match = _SERVER.fullmatch(text)
    if match is None:
        return None
    host = (match[1] or match[2]).lower()
    try:
        host = ipaddress.ip_address(host).compressed
    except ValueError:
        if match[1] is not None:  # brackets may only enclose an IPv6 address
            return None
    port = None if match[3] is None else int(match[3])
    return _Server(host, port) if port is None or port < 1 << 16 else None


def read_token_file(path: str, label: str, line: str) -> str:
    """Return the text of a file of tokens; errors name the file by `label`, and the format of a line by `line`.

    Raise `InvalidArgument` if it can't be read, or users besides its owner may access it. One exception: the group
    may read a file that belongs to root, if this process does not run as root. So a container can read a secret
    that its orchestrator mounts.
    """
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # opening a pipe or device may wait or have effects
            raise InvalidArgument(f"{label} is not a file; expected lines of {line}")
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
            status = os.fstat(file.fileno())
            group_may_read = status.st_uid == 0 != os.geteuid()
            if status.st_mode & (0o037 if group_may_read else 0o077):
                mode = f"{stat.S_IMODE(status.st_mode):04o}"
                raise InvalidArgument(
                    f"{label} can be accessed by other users (mode {mode}); restrict it with chmod 600 {path}, or "
                    "for a Kubernetes secret with defaultMode: 0400, and an fsGroup unless the container is root"
                )
            data = file.read(_MAX_FILE_SIZE + 1)
    except OSError as error:
        raise InvalidArgument(f"{label} can't be read: {error.strerror}") from error
    if len(data) > _MAX_FILE_SIZE:
        raise InvalidArgument(f"{label} is longer than {_MAX_FILE_SIZE} bytes; expected lines of {line}")
    return data.removeprefix(codecs.BOM_UTF8).decode("ascii", "replace")
