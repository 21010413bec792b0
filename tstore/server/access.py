"""Who may do what: tokens and their scopes.

A file or variable of tokens has one per line, `SCOPE TOKEN`; empty lines, and those that begin with #, do not
count. A scope includes those below it:

    read     GET, HEAD, lists
    write    PUT; removing heartbeats
    admin    DELETE, which garbage collection needs

No token ever stands in an error, a log or a `repr`; only their digests are kept.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import os
import re
from collections.abc import Mapping

from tstore.errors import Denied, InvalidArgument
from tstore.kv.newfile import explained

__all__ = ["Access", "Scope"]

_TOKEN = re.compile(r"[A-Za-z0-9._~+/-]+=*")
_SHORTEST = 16


class Scope(enum.IntEnum):
    """What a request may do; each includes those below it."""

    NONE = 0
    READ = 1
    WRITE = 2
    ADMIN = 3


class Access:
    """The scope of each token, and of a request without one."""

    def __init__(self, tokens: Mapping[str, str] | None = None, anonymous: str = "none") -> None:
        """`tokens`: the scope ("read", "write", "admin") of each; `anonymous`: one of these, or "none"."""
        self.anonymous = _scope(anonymous, "anonymous")
        self._scopes: dict[bytes, Scope] = {}
        for token, scope in (tokens or {}).items():
            self._add(token, scope, "a token")

    @staticmethod
    def parse(text: str, where: str, anonymous: str = "none") -> Access:
        """The access that lines of `SCOPE TOKEN` say; errors name `where` and the line, never the token."""
        access = Access(anonymous=anonymous)
        for number, line in enumerate(text.splitlines(), 1):
            words = line.split()
            if not words or words[0].startswith("#"):
                continue
            if len(words) != 2:
                raise InvalidArgument(f"{where}, line {number}: expected SCOPE TOKEN, as: write <token>")
            access._add(words[1], words[0], f"{where}, line {number}")
        if not access.tokens:
            raise InvalidArgument(f"{where} holds no token; expected lines of SCOPE TOKEN")
        return access

    @staticmethod
    def read(path: str | os.PathLike[str], anonymous: str = "none") -> Access:
        """The access that a file says; `Denied` where others than its owner and group may read it."""
        where = os.fspath(path)
        with explained("read", where), open(where, encoding="utf-8", errors="replace") as file:
            if os.fstat(file.fileno()).st_mode & 0o007:
                raise Denied(f"{where} can be read by everybody; make it yours alone: chmod 600 {where}")
            return Access.parse(file.read(), where, anonymous)

    @property
    def tokens(self) -> int:
        """How many there are."""
        return len(self._scopes)

    def scope(self, authorization: str | None) -> Scope | None:
        """What the `Authorization` header of a request permits; None where its token is not known.

        Every token is compared, each in constant time, so that the time tells nothing.
        """
        if authorization is None:
            return self.anonymous
        kind, _, token = authorization.partition(" ")
        given, found = _digest(token.strip()), None
        for known, scope in self._scopes.items():
            if hmac.compare_digest(known, given):
                found = scope
        return found if kind.lower() == "bearer" else None

    def _add(self, token: str, scope: str, where: str) -> None:
        if len(token) < _SHORTEST or not _TOKEN.fullmatch(token):
            raise InvalidArgument(
                f"{where}: expected at least {_SHORTEST} letters, digits or -._~+/ as the token, such as "
                "python -c 'import secrets; print(secrets.token_urlsafe(32))' makes"
            )
        found = _scope(scope, where)
        if found is Scope.NONE or self._scopes.setdefault(_digest(token), found) is not found:
            raise InvalidArgument(f"{where}: the token has no scope, or had another one before")

    def __repr__(self) -> str:
        return f"<tstore.server.Access of {self.tokens} tokens, anonymous: {self.anonymous.name.lower()}>"


def _scope(name: str, where: str) -> Scope:
    try:
        return Scope[name.upper()]
    except KeyError:
        raise InvalidArgument(f"{where}: expected the scope read, write or admin") from None


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode(errors="surrogateescape")).digest()
