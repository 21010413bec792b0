"""The codecs of chunks."""

import gzip
import math
import zlib

import numcodecs
import numpy as np

from tests.support.independent_reader.data_types import Type
from tests.support.independent_reader.frames import Newer, Refused, array, mapping, nat, need
from tests.support.independent_reader.low_bit import exmy_decode

CODECS = {
    "bytes": {"endian"}, "transpose": {"order"}, "vlen-utf8": set(), "vlen-bytes": set(),
    "sharding_indexed": {"chunk_shape", "codecs", "index_codecs", "index_location"},
    "exmy": {"format", "scale", "axis", "block"}, "zstd": {"level", "checksum"}, "gzip": {"level"},
    "blosc": {"typesize", "cname", "clevel", "shuffle", "blocksize"}, "crc32c": set(),
}  # fmt: skip
TO_BYTES = ("bytes", "vlen-utf8", "vlen-bytes", "sharding_indexed", "exmy")
NUMCODECS = [
    "zlib",
    "bz2",
    "lzma",
    "lz4",
    "zstd",
    "gzip",
    "blosc",
    "shuffle",
    "crc32",
    "adler32",
    "fletcher32",
    "jenkins_lookup3",
]


def parse_codecs(codecs):
    out = []
    for c in array(codecs):
        c = {"name": c} if type(c) is str else mapping(c)
        name, conf = c.get("name"), mapping(c.get("configuration") or {})
        if name in CODECS:
            known = CODECS[name]
        elif type(name) is str and name.startswith("numcodecs.") and name[10:] in NUMCODECS:
            known = set(conf)
        else:
            raise Newer(f"codec {name!r}")
        if not set(conf) <= known or not set(c) <= {"name", "configuration"}:
            raise Newer(f"settings of codec {name!r}")
        out.append((name, conf))
    kinds = [0 if n == "transpose" else 1 if n in TO_BYTES else 2 for n, _ in out]
    need(kinds == sorted(kinds) and kinds.count(1) == 1, "not a chain of codecs")
    return out


def decode(data, codecs, t, shape, fill):
    for name, conf in reversed(codecs):
        if name not in TO_BYTES and name != "transpose":
            try:
                data = decompress(name, conf, data)
            except Refused:
                raise
            except Exception as e:
                raise Refused(f"{name}: {e}") from e
    orders = []
    for name, conf in codecs:
        if name == "transpose":
            order = conf["order"]
            axes = list(range(len(shape)))
            order = axes if order == "C" else axes[::-1] if order == "F" else order
            need(sorted(order) == axes, "transpose")
            shape = tuple(shape[o] for o in order)
            orders.append(order)
        elif name in TO_BYTES:
            out = to_array(name, conf, data, t, shape, fill)
    for order in reversed(orders):
        out = out.transpose(np.argsort(order) if order else order)
    return out


def to_array(name, conf, data, t, shape, fill):
    n = math.prod(shape)
    if name == "sharding_indexed":
        return shard(conf, data, t, shape, fill)
    if name in ("vlen-utf8", "vlen-bytes"):
        need(t.vlen == name[5:], f"{name} of {t.name}")
        need(len(data) >= 4 and int.from_bytes(data[:4], "little") == n, f"{name}: another number of elements")
        out, at = np.empty(n, object), 4
        for i in range(n):
            end = at + 4 + int.from_bytes(data[at : at + 4], "little")
            need(at + 4 <= len(data) and end <= len(data), f"{name}: too short")
            try:
                out[i] = bytes(data[at + 4 : end]).decode() if t.vlen == "utf8" else bytes(data[at + 4 : end])
            except UnicodeDecodeError as e:
                raise Refused(str(e)) from e
            at = end
        need(at == len(data), f"{name}: too long")
        return out.reshape(shape)
    need(not t.vlen, f"{name} of {t.name}")
    if name == "exmy":
        return exmy_decode(conf, data, t.name, shape)
    need(conf.get("endian", "little") in ("little", "big"), "endian")
    need(len(data) == n * t.dtype.itemsize, f"a chunk of {len(data)} bytes")
    order = ">" if conf.get("endian") == "big" and not t.struct else "<"
    out = np.ndarray(shape, t.dtype.newbyteorder(order), bytes(data)).astype(t.dtype)
    if t.bits:  # the other bits mean nothing
        out = out << (8 - t.bits) >> (8 - t.bits)
    return out


def shard(conf, data, t, shape, fill):
    inner = tuple(nat(c) for c in array(conf.get("chunk_shape")))
    need(
        len(inner) == len(shape) and all(c and s % c == 0 for s, c in zip(shape, inner, strict=True)),
        "chunk shape of a shard",
    )
    codecs, index = parse_codecs(conf.get("codecs")), parse_codecs(conf.get("index_codecs"))
    need({n for n, _ in index} <= {"bytes", "crc32c"}, "codecs of an index")
    grid = tuple(s // c for s, c in zip(shape, inner, strict=True))
    size = 16 * math.prod(grid) + 4 * sum(n == "crc32c" for n, _ in index)
    need(len(data) >= size, "a shard is too short")
    where = conf.get("index_location", "end")
    need(where in ("start", "end"), "location of an index")
    raw = data[:size] if where == "start" else data[len(data) - size :]
    index = decode(raw, index, Type("uint64"), (*grid, 2), 0)
    out = np.empty(shape, t.dtype)
    for at in np.ndindex(*grid):
        place = tuple(slice(i * c, i * c + c) for i, c in zip(at, inner, strict=True))
        offset, length = index[at].tolist()
        if offset == length == 2**64 - 1:
            out[place] = t.fill(fill)
        else:
            need(offset + length <= len(data), "an inner chunk lies outside of its shard")
            out[place] = decode(data[offset : offset + length], codecs, t, inner, fill)
    return out


def decompress(name, conf, data):
    data = bytes(data)
    if name == "zstd":
        return bytes(numcodecs.Zstd().decode(data))
    if name == "gzip":
        return gzip.decompress(data)
    if name == "blosc":
        return unblosc(data)
    if name == "crc32c":
        need(len(data) >= 4 and crc32c(data[:-4]) == int.from_bytes(data[-4:], "little"), "CRC-32C")
        return data[:-4]
    return bytes(numcodecs.get_codec({"id": name[10:], **conf}).decode(data))


def crc32c(data):
    table = []
    for i in range(256):
        for _ in range(8):
            i = i >> 1 ^ (0x82F63B78 if i & 1 else 0)
        table.append(i)
    crc = 0xFFFFFFFF
    for b in data:
        crc = crc >> 8 ^ table[(crc ^ b) & 255]
    return crc ^ 0xFFFFFFFF


def unblosc(data):
    need(len(data) >= 16 and data[0] == 2, "not a frame of blosc")
    flags, t = data[2], data[3]
    n, b, size = (int.from_bytes(data[i : i + 4], "little") for i in (4, 8, 12))
    need(size == len(data), "length of a frame of blosc")
    if flags & 2:
        need(len(data) == 16 + n, "length of a frame of blosc")
        return data[16:]
    kind, out = flags >> 5, []
    if kind in (0, 2):  # blosclz and snappy, which the document only names
        return bytes(numcodecs.Blosc().decode(data))
    need(n == 0 or b > 0, "blocks of blosc")
    for i in range(-(-n // b) if n else 0):
        at = int.from_bytes(data[16 + 4 * i : 20 + 4 * i], "little")
        s = min(b, n - i * b)
        parts = t if s == b and not flags & 16 and t <= 16 and b // t >= 128 else 1
        block = b""
        for _ in range(parts):
            length = int.from_bytes(data[at : at + 4], "little")
            stream, at = data[at + 4 : at + 4 + length], at + 4 + length
            need(len(stream) == length, "a stream of blosc is cut")
            block += stream if length == s // parts else unstream(kind, stream, s // parts)
        need(len(block) == s, "a block of blosc")
        m = s // t
        x = np.frombuffer(block, "u1")
        if flags & 1 and t > 1:
            block = x[: m * t].reshape(t, m).T.tobytes() + block[m * t :]
        elif flags & 4 and m % 8 == 0 and m:
            bits = np.unpackbits(x[: m * t].reshape(t, 8, m // 8), axis=2, bitorder="little")  # j, k, i
            block = np.packbits(bits.transpose(2, 0, 1), axis=2, bitorder="little").tobytes() + block[m * t :]
        out.append(block)
    return b"".join(out)


def unstream(kind, stream, size):
    if kind == 1:
        return bytes(numcodecs.LZ4().decode(size.to_bytes(4, "little") + stream))
    if kind == 3:
        return zlib.decompress(stream)
    need(kind == 4, f"compressor {kind} of blosc")
    return bytes(numcodecs.Zstd().decode(stream))
