"""Whether metadata may be stored under its name: it parses, and agrees with the name; pure.

The form is checked and not what it refers to: what a record names, and a root holds, is compared with the log by
`admission`.
"""

from __future__ import annotations

import math
import re

import msgspec

from tstore.commits.manifest import Fragment, Manifest, ObjectRef, Record, Root, decode
from tstore.commits.records import ROOT_EVERY
from tstore.errors import Corrupt
from tstore.marker import Marker
from tstore.server.names import Kind, kind_of, number_of
from tstore.transactions.roster import Heartbeat

__all__ = ["parsed"]

_LATEST_TIME = 253_402_300_800  # the year 10,000: what a datetime can't hold
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
            _check_record(record, number_of(key))
            return record
        case Kind.ROOT:
            root = decode(data, Root)
            if root.version != number_of(key) or root.version % ROOT_EVERY:
                raise Corrupt(f"the root is of version {root.version}; expected that of its name, one of 64")
            _check_manifest(root.manifest)
            return root
        case Kind.MANIFEST:
            _check_manifest(decode(data, Manifest))
        case Kind.FRAGMENT:
            _check_fragment(decode(data, Fragment), key)
        case _:
            pass
    return None


def _check_record(record: Record, version: int) -> None:
    if not 0 <= record.base < version or not 0 <= record.collected < version:
        raise Corrupt(f"a record of base {record.base} and gc {record.collected} can't become version {version}")
    if not math.isfinite(record.time) or not 0 <= record.time < _LATEST_TIME:
        raise Corrupt(f"a record has the impossible time {record.time}")
    for manifest in record.manifests:
        _check_reference(manifest)


def _check_fragment(fragment: Fragment, key: str) -> None:
    _, transaction, name = key.split("/")
    place = _HOSTS.fullmatch(name)
    if fragment.transaction != transaction:
        raise Corrupt("a fragment is of another transaction than its name")
    if place is None or fragment.hosts != int(place[3]) or not 0 <= fragment.host < fragment.hosts:
        raise Corrupt("a fragment is of another number of hosts than its name")
    if place[1] == "part" and fragment.host != int(place[2]):
        raise Corrupt("a fragment is of another host than its name")
    _check_reference(fragment.manifest)


def _check_reference(manifest: ObjectRef | Manifest) -> None:
    if isinstance(manifest, Manifest):
        _check_manifest(manifest)
    elif kind_of(manifest.key) is not Kind.MANIFEST:
        raise Corrupt(f"a manifest can't be named {manifest.key!r}")


def _check_manifest(manifest: Manifest) -> None:
    manifest.nodes()  # which looks at every column
    for pack in manifest.packs:
        if pack and kind_of(pack) is not Kind.PACK:
            raise Corrupt(f"a pack can't be named {pack!r}")


def _check_heartbeat(data: bytes) -> None:
    try:
        msgspec.json.decode(data, type=Heartbeat)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Corrupt(f"it does not parse: {error}") from error
