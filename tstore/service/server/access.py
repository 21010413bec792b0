"""Authorization: tokens and their scopes.

A token file, or the variable `TSTORE_SERVER_TOKENS`, has one `SCOPE TOKEN` per line; empty lines and lines that
start with # are ignored. Each scope includes the scopes listed before it:

    read     GET, HEAD, listings
    write    PUT; deletion of heartbeats, and of what hosts with tiers tell each other
    admin    DELETE, and PUT of archives and of the records of garbage collections and repairs, also in a copy;
             replacement of damaged packs and manifests by the bytes that were committed

The guide `http_server` says what a holder of each scope can do. In short, a token with write decides the contents
of the newest version and the tags. It can act as any host of a cooperative transaction, and can use up space and
version numbers. It can't change or expire a committed version, make one unreadable, leave a gap between versions,
or have anything but heartbeats deleted. Nor can it store a record that names missing objects, or one that makes
readers, `verify` or all later runs of `gc` fail. A token with admin can expire any version but the newest and then
delete its data. No scope can delete a marker, an archive, or a record that is in no archive.

No token appears in an error, a log or a `repr`; only digests are stored.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import os
import re
from collections.abc import Hashable, Mapping
from typing import NamedTuple

from tstore.core.storage.http.tokens import read_token_file
from tstore.errors import InvalidArgument
from tstore.service.server.responses import Refused

__all__ = ["Access", "Scope", "Sender", "admin_refusal"]

_TOKEN = re.compile(r"[A-Za-z0-9._~+/-]+=*")
_MIN_LENGTH = 16


class Scope(enum.IntEnum):
    """The permissions of a request; each scope includes those of lower values."""

    NONE = 0
    READ = 1
    WRITE = 2
    ADMIN = 3


class Sender(NamedTuple):
    """The sender of a request: the client, identified by its address and its token, and the scope of the token."""

    client: Hashable
    scope: Scope


def admin_refusal(subject: str, scope: Scope) -> Refused:
    """Return the refusal of a request that needs the scope ADMIN; the message starts with `subject`."""
    return Refused(
        403,
        f"{subject} needs a token with the scope admin, but this request has the scope {scope.name.lower()}; "
        "serve with a --token-file that has one, or copy to a folder and serve that",
    )


class Access:
    """The scope of each token, and of requests without a token."""

    def __init__(self, tokens: Mapping[str, str] | None = None, anonymous: str = "none") -> None:
        """`tokens` maps each token to "read", "write" or "admin"; `anonymous` is the scope without a token."""
        if anonymous not in ("none", "read", "write"):
            raise InvalidArgument(
                f"anonymous={anonymous!r:.100}: expected 'none', 'read' or 'write'; the scope admin needs a token"
            )
        self.anonymous = _scope(anonymous, "anonymous")
        self._scopes: dict[bytes, Scope] = {}
        for token, scope in (tokens or {}).items():
            self._add(token, scope, "a token")

    @staticmethod
    def parse(text: str, source: str, anonymous: str = "none") -> Access:
        """Parse lines of `SCOPE TOKEN`; errors name `source` and the line, never the token."""
        access = Access(anonymous=anonymous)
        for number, line in enumerate(text.splitlines(), 1):
            words = line.split()
            if not words or words[0].startswith("#"):
                continue
            if len(words) != 2:
                raise InvalidArgument(f"{source}, line {number}: expected SCOPE TOKEN, such as: write <token>")
            access._add(words[1], words[0], f"{source}, line {number}")
        if not access.token_count:
            raise InvalidArgument(f"{source} contains no token; expected lines of SCOPE TOKEN")
        return access

    @staticmethod
    def read(path: str | os.PathLike[str], anonymous: str = "none") -> Access:
        """Read a token file; raise `InvalidArgument` also if other users may access it (see `read_token_file`)."""
        name = os.fspath(path)
        return Access.parse(read_token_file(name, name, "SCOPE TOKEN"), name, anonymous)

    @property
    def token_count(self) -> int:
        """The number of tokens."""
        return len(self._scopes)

    def match(self, authorization: str | None) -> tuple[bytes, Scope] | None:
        """Return the digest and the scope of the token in an `Authorization` header, None if the token is unknown.

        The digest identifies the token, however the header is spelled; it is empty for a request without a header.
        Every token is compared, each in constant time, so that timing reveals nothing.
        """
        if authorization is None:
            return b"", self.anonymous
        scheme, _, token = authorization.partition(" ")
        digest, match = _digest(token.strip()), None
        for known, scope in self._scopes.items():
            if hmac.compare_digest(known, digest):
                match = known, scope
        return match if scheme.lower() == "bearer" else None

    def scope_of(self, digest: bytes) -> Scope | None:
        """Return the scope of the token with a digest that `match` returned, None if it is no longer accepted."""
        return self._scopes.get(digest) if digest else self.anonymous

    def _add(self, token: str, scope_name: str, source: str) -> None:
        scope = _scope(scope_name, source)
        if scope is Scope.NONE:
            raise InvalidArgument(f"{source}: expected the scope read, write or admin")
        if len(token) < _MIN_LENGTH or not _TOKEN.fullmatch(token):
            raise InvalidArgument(
                f"{source}: expected at least {_MIN_LENGTH} letters, digits or -._~+/ as the token; make one with "
                "python -c 'import secrets; print(secrets.token_urlsafe(32))'"
            )
        if self._scopes.setdefault(_digest(token), scope) is not scope:
            raise InvalidArgument(
                f"{source}: the same token has another scope above; give each scope its own token"
            )

    def __repr__(self) -> str:
        return f"<tstore.server.Access of {self.token_count} tokens, anonymous: {self.anonymous.name.lower()}>"


def _scope(name: str, source: str) -> Scope:
    try:
        return Scope[name.upper()]
    except KeyError:
        raise InvalidArgument(f"{source}: expected the scope read, write or admin") from None


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode(errors="surrogateescape")).digest()
