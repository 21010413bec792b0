"""Frames, the types of their fields, and what is refused."""

import json
import re
from types import SimpleNamespace

import msgspec
import xxhash

MIB = 1 << 20


class Refused(Exception):
    """Damage: what the document says must be refused."""


class Newer(Refused):
    """A newer format, not damage."""


class Expired(Refused):
    """A version that a collection removed."""


def need(condition, what):
    if not condition:
        raise Refused(what)


def checksum(data):
    return xxhash.xxh3_128_digest(data)


def text(x):
    need(type(x) is str, "not text")
    return x


def blob(x):
    need(type(x) is bytes, "not bytes")
    return x


def digest(x):
    need(type(x) is bytes and len(x) == 16, "not a checksum")
    return x


def nat(x):
    need(type(x) is int and 0 <= x < 1 << 62, "not a natural number")
    return x


def boolean(x):
    need(type(x) is bool, "not a bool")
    return x


def time(x):
    need(type(x) in (int, float) and 0 <= x <= 253402300800, "not a time")
    return float(x)


def array(x):
    need(type(x) is list, "not an array")
    return x


def optional(x):
    return None if x is None else array(x)


def mapping(x):
    need(type(x) is dict and all(type(k) is str for k in x), "not a map")
    return x


def versions_of(x):
    return {k: nat(v) for k, v in mapping(x).items()}


def names(x):
    need(len(array(x)) <= 1048576, "too many names")
    return [text(i) for i in x]


def path_(x):
    need(type(x) is str and len(x) <= 4096 and x.count("/") < 256, "invalid path")
    for name in x.split("/") if x else ():
        need(name not in ("", ".", "..", "zarr.json") and min(name) >= " ", f"invalid path {x!r}")
    return x


ID = r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,250}"


def tid(x):
    need(type(x) is str and re.fullmatch(ID, x), f"invalid id {x!r}")
    return x


def key_of(kind, x):
    m = re.fullmatch(f"txn/({ID})/{kind}[^/\0-\x1f]*", text(x))
    need(m, f"invalid key {x!r}")
    return m[1]


def fields(items, *table):
    """The fields of a msgpack array by name: (name, type) or (name, type, default)."""
    array(items)
    out = SimpleNamespace()
    for i, (name, kind, *default) in enumerate(table):
        need(i < len(items) or default, f"{name} is missing")
        setattr(out, name, kind(items[i]) if i < len(items) else default[0])
    return out


def unpack_msgpack(data):
    try:
        return msgspec.msgpack.decode(data)
    except Exception as e:
        raise Refused(f"not msgpack: {e}") from e


def constant(name):
    raise Refused(f"{name} in JSON")


def load_json(data):
    try:
        return json.loads(bytes(data).decode("utf-8"), parse_constant=constant)
    except (ValueError, RecursionError) as e:
        raise Refused(f"not JSON: {e}") from e


def frame(data, kind, what):
    need(len(data) >= 24 and data[:6] == b"tstore", f"{what} is not a frame")
    need(checksum(data[:-16]) == data[-16:], f"{what} has a wrong checksum")
    if not 1 <= data[7] <= 8:
        raise Newer(f"{what} has version {data[7]}")
    need(data[6:7] == kind, f"{what} is of kind {data[6:7]}")
    return data[8:-16]
