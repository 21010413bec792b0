"""Whether metadata may be stored under its name: it parses, and agrees with the name; pure.

The form is checked, most of it by decoding, and not what it refers to: what a record names, and a root holds, is
compared with the log by `admission`.
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

__all__ = ["parsed"]

_HOSTS = re.compile(r"(part|merge-[0-9]+)-([0-9]{5,})-of-([0-9]{5,})")


def parsed(key: str, kind: Kind, data: bytes) -> Record | Root | None:
    """Return the record or root in the data, None of anything else.

    Raise `Corrupt` or `UnsupportedFormat`, with the reason, where the data can't be what the key says.
    """
    match kind:
        case Kind.MARKER:
            Marker.decode(data)
        case Kind.HEARTBEAT:
            _check_heartbeat(data)
        case Kind.MERGER:
            if not re.fullmatch(rb"[0-9]{1,10}", data):
                raise Corrupt("it is no number of a host")
        case Kind.HINT:
            if not re.fullmatch(rb"[1-9][0-9]{0,19}", data):
                raise Corrupt("the hint is no version")
        case Kind.RECORD:
            record = decode(data, Record)
            record.check_number(number_of(key))
            return record
        case Kind.ROOT:
            root = decode(data, Root)
            if root.version != number_of(key) or root.version % ROOT_EVERY:
                raise Corrupt(f"the root is of version {root.version}; expected that of its name, one of 64")
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
    place = _HOSTS.fullmatch(name)
    if fragment.transaction != transaction:
        raise Corrupt("a fragment is of another transaction than its name")
    if place is None or fragment.hosts != int(place[3]):
        raise Corrupt("a fragment is of another number of hosts than its name")
    if place[1] == "part" and fragment.host != int(place[2]):
        raise Corrupt("a fragment is of another host than its name")


def _check_heartbeat(data: bytes) -> None:
    try:
        msgspec.json.decode(data, type=Heartbeat)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Corrupt(f"it does not parse: {error}") from error
