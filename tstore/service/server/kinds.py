"""The kinds of objects that a server accepts: their keys, and the validation of their contents.

By default, the server accepts and serves only these keys, so that no other file in the folder is ever exposed:

    tstore.json                        the marker
    commits/<20 digits>                a record
    archives/<20 digits>               many old records
    roots/<20 digits>                  a tree
    latest                             the hint; may be replaced
    txn/<id>/pack-…                    encoded chunks
    txn/<id>/manifest…                 a manifest
    txn/<id>/part-…, merge-…           a fragment
    txn/<id>/merging-…                 the number of the host that merges, or that has withdrawn the transaction
    txn/<id>/alive-…                   a heartbeat; may be replaced, and deleted with scope write
    tiers/…                            what the hosts of a job with several tiers tell each other
    txn/<id>                           not an object but a folder, which a gc deletes last

Metadata must parse and agree with its key before it is stored. Only its form is checked here, most of it by
decoding; `admission` validates the references of records, and the contents of roots and archives, against the log.
"""

from __future__ import annotations

import enum
import re
from typing import Literal
from urllib.parse import unquote_to_bytes

import msgspec

from tstore.core.format.layout import ROOT_EVERY, version_of
from tstore.core.format.objects.encoding import Archive, decode
from tstore.core.format.objects.pages import check_object
from tstore.core.format.objects.records import Fragment, Record, Root
from tstore.core.format.objects.references import Manifest
from tstore.core.format.objects.roots import decode_root
from tstore.core.format.objects.wellformed import check_documents
from tstore.core.log.marker import Marker
from tstore.core.storage.objects import checked_key
from tstore.core.transactions.decision import withdrawal_in
from tstore.core.transactions.pending import Heartbeat
from tstore.errors import Corrupt, InvalidArgument

__all__ = ["Kind", "ServedKeys", "key_of", "kind_of", "parse_metadata"]

ServedKeys = Literal["layout", "any"]
"""The keys that a server serves: those of a store's layout, or any valid key."""

_MAX_PATH = 1024
_FRAGMENT_NAME = re.compile(r"(part|merge-[0-9]+)-([0-9]{5,})-of-([0-9]{5,})")
_TRANSACTION = r"txn/[A-Za-z0-9_-][A-Za-z0-9._-]{0,250}"


class Kind(enum.Enum):
    """The kind of object under a key, with the pattern of its keys."""

    MARKER = r"tstore\.json"
    RECORD = r"commits/[0-9]{20}"
    ARCHIVE = r"archives/[0-9]{20}"
    ROOT = r"roots/[0-9]{20}"
    HINT = "latest"
    PACK = _TRANSACTION + r"/pack-[A-Za-z0-9._-]{1,200}"
    MANIFEST = _TRANSACTION + r"/manifest(?:-[A-Za-z0-9._-]{1,200})?"
    FRAGMENT = _TRANSACTION + r"/(?:part|merge)-[A-Za-z0-9._-]{1,200}"
    MERGER = _TRANSACTION + r"/merging-[A-Za-z0-9._-]{1,200}"
    HEARTBEAT = _TRANSACTION + r"/alive-[A-Za-z0-9._-]{1,200}"
    TIERS = r"tiers/(?:offers/[0-9a-f]{32}/[0-9]{5,6}|decisions/[0-9]{20}|pushes/[0-9]{1,20}-[0-9]{1,20})"
    FOLDER = _TRANSACTION
    OTHER = r"(?!)"  # matches nothing; a key of no other kind, which only `names="any"` serves

    @property
    def replaceable(self) -> bool:
        """Whether objects of this kind may be replaced; all others are created once."""
        return self in (Kind.HINT, Kind.HEARTBEAT, Kind.OTHER)

    @property
    def restorable(self) -> bool:
        """Whether damaged objects of this kind may be replaced by the bytes that living versions need."""
        return self in (Kind.PACK, Kind.MANIFEST)

    @property
    def streamed(self) -> bool:
        """Whether the object is streamed to the storage: it may be large, and its bytes are not validated."""
        return self in (Kind.PACK, Kind.OTHER)


_NOT_PERMITTED = re.compile(r"%(?![0-9A-Fa-f]{2})|%(?:2[fF]|5[cC]|[01][0-9A-Fa-f]|7[fF])|[^!-~]|\\")
_PATTERNS = {kind: re.compile(kind.value) for kind in Kind}


def key_of(path: str) -> str:
    """Return the key for the raw (percent-encoded) path of a request; raise `InvalidArgument` for an invalid one.

    The path is decoded once and strictly: encoded slashes, backslashes and unprintable characters are refused, so
    that no two layers interpret a path differently.
    """
    if not path.startswith("/") or len(path) > _MAX_PATH:
        raise InvalidArgument(f"the path of a request must start with '/' and have at most {_MAX_PATH} characters")
    if _NOT_PERMITTED.search(path):
        raise InvalidArgument("the path contains a character, plain or encoded, that is not permitted in a key")
    try:
        key = unquote_to_bytes(path[1:]).decode()
    except UnicodeDecodeError:
        raise InvalidArgument("the path is not UTF-8") from None
    if not key.isprintable():
        raise InvalidArgument("the path contains a character that is not permitted in a key")
    return checked_key(key, "this store")


def kind_of(key: str, names: ServedKeys = "layout") -> Kind | None:
    """Return the kind of object under a key, None if the server serves no such key."""
    kind = next((kind for kind, pattern in _PATTERNS.items() if pattern.fullmatch(key)), None)
    return Kind.OTHER if kind is None and names == "any" else kind


def parse_metadata(key: str, kind: Kind, data: bytes) -> Marker | Record | Archive | Root | None:
    """Validate an object; return it if it is a marker, a record, an archive or a root, else None.

    Raise `Corrupt` or `UnsupportedFormat` if the data is not a valid object for its key.
    """
    match kind:
        case Kind.MARKER:
            return Marker.decode(data)
        case Kind.HEARTBEAT:
            try:
                msgspec.json.decode(data, type=Heartbeat)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise Corrupt(f"it does not parse: {error}") from error
        case Kind.MERGER:
            withdrawal_in(data)
        case Kind.HINT:
            if not re.fullmatch(rb"[1-9][0-9]{0,19}", data):
                raise Corrupt("expected a version in decimal digits")
        case Kind.RECORD:
            record = decode(data, Record)
            record.check_number(version_of(key))
            return record
        case Kind.ARCHIVE:
            archive = decode(data, Archive)
            if archive.end != version_of(key):
                raise Corrupt(f"the archive ends at version {archive.end}; expected the version in its key")
            return archive
        case Kind.ROOT:
            root = decode_root(data)
            if root.version != version_of(key) or root.version % ROOT_EVERY:
                expected = f"expected the version in its key, a multiple of {ROOT_EVERY}"
                raise Corrupt(f"the root is of version {root.version}; {expected}")
            return root
        case Kind.MANIFEST:
            check_object(data)
        case Kind.FRAGMENT:
            _check_fragment(decode(data, Fragment), key)
    return None


def _check_fragment(fragment: Fragment, key: str) -> None:
    _, transaction, name = key.split("/")
    match = _FRAGMENT_NAME.fullmatch(name)
    if fragment.transaction != transaction:
        raise Corrupt("the fragment's transaction is not the one in its key")
    if match is None or fragment.hosts != int(match[3]):
        raise Corrupt(f"the fragment is one of {fragment.hosts} hosts, but its key says otherwise")
    if match[1] == "part" and fragment.host != int(match[2]):
        raise Corrupt("the fragment's host is not the one in its key")
    if isinstance(fragment.manifest, Manifest):
        check_documents(fragment.manifest.documents)
