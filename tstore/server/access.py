"""Who may do what: tokens and their scopes.

A file or variable of tokens has one per line, `SCOPE TOKEN`; empty lines, and those that begin with #, do not
count. A scope includes those below it:

    read     GET, HEAD, lists
    write    PUT; removing heartbeats
    admin    DELETE, and PUT of the records of garbage collections and of copies of collected stores

What a token of each scope can bring about, whatever it sends:

read can read every object: all versions, also expired ones that are not deleted yet, and what transactions under
way have written so far. It changes nothing.

write can
 - commit anything that a transaction can, with any message, time, metadata and metrics, and set, move and drop any
   tag: so it decides what the newest version and the tags show. Chunks are not decoded here: those that it commits
   may turn out damaged when they are read
 - by tags, metrics and times decide which versions the rules of a later garbage collection keep, the newest always
 - act as any host of a cooperative transaction: deliver, merge or finish in its place, or make it fail
 - commit under the id of a transaction under way, if it knows that: its owner then takes that commit for its own
 - show heartbeats of any host, remove them, and by writing to its folder keep an abandoned transaction from being
   collected
 - point the hint anywhere, which costs readers some requests
 - make the store, where the server lets clients do so and there is none
 - use up space and numbers of versions: what is not committed goes with a later garbage collection, records stay;
   and let the references of the newest version grow to 256 MiB, which each reader loads
write can't
 - change, replace or remove an object that is there, the hint and heartbeats apart
 - change a version that is committed, make one unreadable that was not, or leave a gap between them
 - let a version expire, or have anything deleted
 - store a record that names what is not there or does not fit, or that stops readers of other versions, `verify`
   or `gc`
 - store a root other than the one that the server makes itself

admin can besides
 - let any version but the newest expire, and condemn any transaction that is not committed, also one under way
 - remove what was condemned; and by a false account of what older versions hold, have a later garbage collection
   remove what those need
 - store records that name objects which are not there, as in a copy of a store of which versions were collected
admin can't
 - remove or change a marker or a record, or remove what the newest version is made of; let the newest expire

A server with `--names any` takes other names too, which write can replace and admin can remove.

No token ever stands in an error, a log or a `repr`; only their digests are kept.
"""

from __future__ import annotations

import codecs
import enum
import hashlib
import hmac
import os
import re
import stat
from collections.abc import Mapping

from tstore.errors import Denied, InvalidArgument
from tstore.storage.local.atomic_file import explained
from tstore.storage.secret_file import exposed_mode

__all__ = ["Access", "Scope"]

_TOKEN = re.compile(r"[A-Za-z0-9._~+/-]+=*")
_SHORTEST = 16
_LONGEST = 1 << 20  # bytes of a file of tokens


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
        """Return the access that a file says; `Denied` where others may read it (see `exposed_mode`)."""
        where = os.fspath(path)
        with explained("read", where):
            if not stat.S_ISREG(os.stat(where).st_mode):  # to open a pipe or a device might wait, or do something
                raise InvalidArgument(f"{where} is no regular file; pass a file of lines SCOPE TOKEN")
            fd = os.open(where, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            with open(fd, "rb") as file:
                known = os.fstat(fd)
                _check_mode(known, where)
                text = file.read(_LONGEST + 1) if stat.S_ISREG(known.st_mode) else b""
        if len(text) > _LONGEST:
            raise InvalidArgument(f"{where} is longer than {_LONGEST} bytes; pass a file of lines SCOPE TOKEN")
        return Access.parse(text.removeprefix(codecs.BOM_UTF8).decode(errors="replace"), where, anonymous)

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
        found = _scope(scope, where)
        if found is Scope.NONE:
            raise InvalidArgument(f"{where}: expected the scope read, write or admin")
        if len(token) < _SHORTEST or not _TOKEN.fullmatch(token):
            raise InvalidArgument(
                f"{where}: expected at least {_SHORTEST} letters, digits or -._~+/ as the token, such as "
                "python -c 'import secrets; print(secrets.token_urlsafe(32))' makes"
            )
        if self._scopes.setdefault(_digest(token), found) is not found:
            raise InvalidArgument(
                f"{where}: the same token has another scope above; give each scope its own token"
            )

    def __repr__(self) -> str:
        return f"<tstore.server.Access of {self.tokens} tokens, anonymous: {self.anonymous.name.lower()}>"


def _check_mode(known: os.stat_result, where: str) -> None:
    """Raises `Denied` where others may read the tokens."""
    if (mode := exposed_mode(known)) is not None:
        raise Denied(
            f"{where} can be read by others (mode {mode}); make it yours alone: "
            f"chmod 600 {where}, or for a Kubernetes secret set defaultMode: 0400, and an fsGroup where the "
            "container does not run as root"
        )


def _scope(name: str, where: str) -> Scope:
    try:
        return Scope[name.upper()]
    except KeyError:
        raise InvalidArgument(f"{where}: expected the scope read, write or admin") from None


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode(errors="surrogateescape")).digest()
