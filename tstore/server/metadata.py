"""Validation of metadata objects before they are stored: they must parse, and agree with their key.

Only the form is checked here, most of it by decoding; `admission` validates the references of records and the
contents of roots against the log.
"""

from __future__ import annotations

import re

import msgspec

from tstore.errors import Corrupt
from tstore.format.encoding import decode
from tstore.format.layout import ROOT_EVERY
from tstore.format.records import Fragment, Record, Root
from tstore.format.references import Manifest
from tstore.log.marker import Marker
from tstore.server.names import Kind, number_of
from tstore.transactions.pending import Heartbeat

__all__ = ["parse_metadata"]

_HOSTS = re.compile(r"(part|merge-[0-9]+)-([0-9]{5,})-of-([0-9]{5,})")


def parse_metadata(key: str, kind: Kind, data: bytes) -> Record | Root | None:
    """Validate an object; return it if it is a record or root, else None.

    Raise `Corrupt` or `UnsupportedFormat` if the data is not a valid object for its key.
    """
    match kind:
        case Kind.MARKER:
            Marker.decode(data)
        case Kind.HEARTBEAT:
            _check_heartbeat(data)
        case Kind.MERGER:
            if not re.fullmatch(rb"[0-9]{1,10}", data):
                raise Corrupt("it is not the number of a host")
        case Kind.HINT:
            if not re.fullmatch(rb"[1-9][0-9]{0,19}", data):
                raise Corrupt("the hint is not a version")
        case Kind.RECORD:
            record = decode(data, Record)
            record.check_number(number_of(key))
            return record
        case Kind.ROOT:
            root = decode(data, Root)
            if root.version != number_of(key) or root.version % ROOT_EVERY:
                raise Corrupt(
                    f"the root is of version {root.version}; expected the version in its name, a multiple of "
                    f"{ROOT_EVERY}"
                )
            return root
        case Kind.MANIFEST:
            decode(data, Manifest)
        case Kind.FRAGMENT:
            _check_fragment(decode(data, Fragment), key)
        case _:
            pass
    return None


def _check_fragment(fragment: Fragment, key: str) -> None:
    _, transaction, name = key.split("/")
    hosts = _HOSTS.fullmatch(name)
    if fragment.transaction != transaction:
        raise Corrupt("the transaction of the fragment is not the one in its name")
    if hosts is None or fragment.hosts != int(hosts[3]):
        raise Corrupt("the number of hosts of the fragment is not the one in its name")
    if hosts[1] == "part" and fragment.host != int(hosts[2]):
        raise Corrupt("the host of the fragment is not the one in its name")


def _check_heartbeat(data: bytes) -> None:
    try:
        msgspec.json.decode(data, type=Heartbeat)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Corrupt(f"it does not parse: {error}") from error
