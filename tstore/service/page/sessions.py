"""Browsers that have signed in: a session stands for a token, so that no browser stores a token.

A session ends with the browser, when its owner signs out, after `_IDLE` seconds without a request, when the server
stops, or when the server no longer accepts the token.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections import OrderedDict

__all__ = ["Sessions"]

_IDLE = 12 * 3600.0  # seconds
_MAX_SESSIONS = 1000  # beyond these, the least recently used session ends
_MAX_OF_TOKEN = 100  # sessions of one token, so that its holder can't sign out the others


class Sessions:
    """The sessions of one server, by identifier, each with the digest of its token."""

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)
        self._open: OrderedDict[bytes, tuple[bytes, float]] = (
            OrderedDict()
        )  # by hash of the identifier: digest of the token, last use
        self._links: dict[bytes, tuple[bytes, float]] = {}  # by hash of a code: digest of the token, last moment

    def start(self, token_digest: bytes) -> str:
        """Return the identifier of a new session for a token."""
        identifier = secrets.token_urlsafe(32)
        own = [key for key, (digest, _) in self._open.items() if digest == token_digest]
        if len(own) >= _MAX_OF_TOKEN:
            del self._open[own[0]]
        self._open[_hash(identifier)] = token_digest, time.monotonic()
        if len(self._open) > _MAX_SESSIONS:
            self._open.popitem(last=False)
        return identifier

    def token_digest(self, identifier: str) -> bytes | None:
        """Return the digest of the token of a session, or None if the session has ended; record its use."""
        key, now = _hash(identifier), time.monotonic()
        digest, used = self._open.pop(key, (b"", 0.0))
        if not digest or now - used > _IDLE:
            return None
        self._open[key] = digest, now
        return digest

    def end(self, identifier: str) -> None:
        """End a session, if it is open."""
        self._open.pop(_hash(identifier), None)

    def add_link(self, token_digest: bytes, seconds: float) -> str:
        """Return a one-time code that starts a session, within some seconds, without the token."""
        code = secrets.token_urlsafe(32)
        self._links[_hash(code)] = token_digest, time.monotonic() + seconds
        return code

    def redeem(self, code: str) -> bytes | None:
        """Return the digest of the token of a code; None if the code was redeemed before, or has expired."""
        digest, end = self._links.pop(_hash(code), (b"", 0.0))
        return digest if digest and time.monotonic() < end else None

    def form_token(self, identifier: str) -> str:
        """Return the anti-CSRF token in the forms of a session (or of visitors without one, "")."""
        return hmac.new(self._secret, identifier.encode(errors="surrogateescape"), hashlib.sha256).hexdigest()


def _hash(secret: str) -> bytes:
    """Return the hash of a secret as a key, so that the time of a lookup does not reveal the secret."""
    return hashlib.sha256(secret.encode(errors="surrogateescape")).digest()
