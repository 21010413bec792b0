"""Which names exist in a store, and what stands under each; pure.

The server takes and gives only these, so that nothing else that lies in a folder by chance is ever served:

    tstore.json                        the marker
    commits/<20 digits>                a record
    roots/<20 digits>                  a whole tree
    latest                             the hint; may be replaced
    txn/<id>/pack-…                    encoded chunks
    txn/<id>/manifest…                 a manifest
    txn/<id>/part-…, merge-…           a fragment
    txn/<id>/merging-…                 the number of the host that merges
    txn/<id>/alive-…                   a heartbeat; may be replaced, and removed by who may write
    txn/<id>                           no object, but a folder, which a gc removes last
"""

from __future__ import annotations

import enum
import re
from typing import Literal
from urllib.parse import unquote_to_bytes

from tstore.errors import InvalidArgument
from tstore.storage.objects import checked_key

__all__ = ["Kind", "Names", "key_of", "kind_of", "number_of"]

Names = Literal["layout", "any"]
"""Which names a server knows: those of a store's layout, or any that a backend may have."""

_LONGEST = 1024
_TRANSACTION = r"txn/[A-Za-z0-9_-][A-Za-z0-9._-]{0,250}"


class Kind(enum.Enum):
    """What stands under a name."""

    MARKER = r"tstore\.json"
    RECORD = r"commits/[0-9]{20}"
    ROOT = r"roots/[0-9]{20}"
    HINT = "latest"
    PACK = _TRANSACTION + r"/pack-[A-Za-z0-9._-]{1,200}"
    MANIFEST = _TRANSACTION + r"/manifest(?:-[A-Za-z0-9._-]{1,200})?"
    FRAGMENT = _TRANSACTION + r"/(?:part|merge)-[A-Za-z0-9._-]{1,200}"
    MERGER = _TRANSACTION + r"/merging-[A-Za-z0-9._-]{1,200}"
    HEARTBEAT = _TRANSACTION + r"/alive-[A-Za-z0-9._-]{1,200}"
    FOLDER = _TRANSACTION
    OTHER = r"(?!)"

    @property
    def replaceable(self) -> bool:
        """Whether an object may take the place of another; all others are created once."""
        return self in (Kind.HINT, Kind.HEARTBEAT, Kind.OTHER)

    @property
    def streamed(self) -> bool:
        """Whether it is bytes without a form that could be checked, and may be long."""
        return self in (Kind.PACK, Kind.OTHER)


_FORMS = {kind: re.compile(kind.value) for kind in Kind}


def key_of(path: str) -> str:
    """The key that the path of a request names (what was sent, still encoded); `InvalidArgument`.

    It is decoded once and strictly: an encoded slash, a backslash, and what is not printable are refused, so that
    no two layers read one path in two ways.
    """
    if not path.startswith("/") or len(path) > _LONGEST:
        raise InvalidArgument(f"the path of a request begins with '/' and has at most {_LONGEST} characters")
    if re.search(r"%(?![0-9A-Fa-f]{2})|%(?:2[fF]|5[cC]|[01][0-9A-Fa-f]|7[fF])|[^!-~]|\\", path):
        raise InvalidArgument("the path holds a character, or an encoded one, that no name has")
    try:
        key = unquote_to_bytes(path[1:]).decode()
    except UnicodeDecodeError:
        raise InvalidArgument("the path is not UTF-8") from None
    if not key.isprintable():
        raise InvalidArgument("the path holds a character that no name has")
    return checked_key(key, "this store")


def kind_of(key: str, names: Names = "layout") -> Kind | None:
    """What stands under a key, None where no object of the server can have it."""
    kind = next((kind for kind, form in _FORMS.items() if form.fullmatch(key)), None)
    return Kind.OTHER if kind is None and names == "any" else kind


def number_of(key: str) -> int:
    """The version in the name of a record or root."""
    return int(key.rpartition("/")[2])
