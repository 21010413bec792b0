"""The usual compressors of a codec chain, `zstd`, `gzip` and `blosc`, of Zarr and of numcodecs; pure, no I/O.

A stored frame is untrusted input. Each compressor compares the size that a frame declares with the expected size
before it allocates or decodes anything. A frame without a reliable size (gzip, or zstd from a streaming writer) is
decoded up to the expected size. So the metadata of an array alone bounds the memory for its chunks.
"""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from tstore.errors import Corrupt, InvalidArgument, UnsupportedFormat

__all__ = [
    "COMPRESSORS",
    "Bytes",
    "Compressor",
    "is_feasible",
    "max_encoded_size",
    "wrong_declaration",
    "wrong_size",
]

Bytes = npt.NDArray[np.uint8]

_MAX_INT = (1 << 31) - 1  # the codecs take C ints
_HIGHEST_RATIO = 1 << 15  # zstd encodes 128 KiB in four bytes; deflate and LZ are far below


class Compressor:
    """A bytes→bytes codec. Decoding raises `Corrupt` for invalid data or a wrong size, or `UnsupportedFormat`."""

    document: Mapping[str, Any]
    """Its entry in a `zarr.json`, with all settings that depend on the array."""
    max_ratio = _HIGHEST_RATIO
    """The maximum compression ratio."""
    overhead: int | None = None
    """The fixed overhead of encoding in bytes, or None if the encoded length depends on the data."""

    def check_input(self, least: int, most: int) -> None:
        """Raise `InvalidArgument` unless the codec can encode data of every length from `least` to `most`."""

    def encode(self, data: Any) -> Any:
        """Return the encoded data; raise `InvalidArgument` if that fails."""
        raise NotImplementedError

    def decode(self, data: memoryview, max_size: int) -> Any:
        """Return the decoded data, of at most `max_size` bytes."""
        raise NotImplementedError

    def decode_into(self, data: memoryview, out: Bytes) -> None:
        """Decode into `out`, which has exactly the expected size."""
        decoded = np.frombuffer(self.decode(data, out.size), np.uint8)
        if len(decoded) != out.size:
            raise wrong_size(out.size, len(decoded))
        out[:] = decoded


def max_encoded_size(size: int) -> int:
    """Return an upper bound on the encoded length of `size` bytes, for any compressor.

    zstd adds at most 1/256, gzip 1/1000 (zlib with its worst settings 1/8), and blosc 16 bytes.
    """
    return size + size // 8 + 4096


def is_feasible(size: int, encoded_size: int, max_ratio: int = _HIGHEST_RATIO) -> bool:
    """Return whether `encoded_size` bytes can decode to `size` bytes."""
    return size <= (encoded_size + 4) * max_ratio


def _checked_int(setting: str, value: Any, low: int, high: int) -> int:
    if type(value) is not int or not low <= value <= high:
        raise TypeError(f"expected {setting!r} to be an integer from {low} to {high}")
    return value


def wrong_size(expected: int | str, actual: int | str) -> Corrupt:
    """Return the error for decoded data of a wrong size."""
    return Corrupt(f"expected {expected} decoded bytes, got {actual}")


def wrong_declaration(expected: int | str, declared: int) -> Corrupt:
    """Return the error for data that declare a wrong decoded size."""
    return Corrupt(f"expected {expected} decoded bytes, but the frame declares {declared}")


class _GZip(Compressor):
    """Zarr's `gzip`, without the modification time in its header: equal chunks must have equal bytes."""

    def __init__(self, level: int = 5) -> None:
        self._level = _checked_int("level", level, 0, 9)

    def encode(self, data: Any) -> bytes:
        buffer = io.BytesIO()
        with gzip.GzipFile("", "wb", self._level, buffer, mtime=0) as file:  # the same bytes as numcodecs
            file.write(data)
        return buffer.getvalue()

    def decode(self, data: memoryview, max_size: int) -> Any:
        """Decode the members one by one; zlib verifies the checksum and length at the end of each."""
        try:
            member = zlib.decompressobj(wbits=31)
            decoded = member.decompress(data, max_size + 1)
            if len(decoded) <= max_size and member.eof and not member.unused_data:
                return decoded
            return _decode_members(data, max_size)
        except zlib.error as error:
            raise Corrupt(f"gzip bytes do not decode: {error}") from error


# bytes passed to zlib at once: it copies all bytes after a member, so many members would take quadratic time
_GZIP_PIECE = 16 << 10


def _decode_members(data: memoryview, max_size: int) -> bytes:
    """Return the joined contents of all members, which may be separated by zeros."""
    parts: list[bytes] = []
    remaining, at, inside = max_size, 0, False
    member = zlib.decompressobj(wbits=31)
    while at < len(data):
        piece = bytes(data[at : at + _GZIP_PIECE])
        if not inside and parts:
            at += len(piece)
            piece = piece.lstrip(b"\0")
            at -= len(piece)
            if not piece:
                continue
        part = member.decompress(piece, remaining + 1)
        if len(part) > remaining:
            raise wrong_size(f"at most {max_size}", "more")
        parts.append(part)
        remaining -= len(part)
        at += len(piece) - len(member.unused_data)
        inside = not member.eof
        if member.eof:
            member = zlib.decompressobj(wbits=31)
    if inside or not parts:
        raise Corrupt("gzip bytes are cut short")
    return b"".join(parts)


class _NumcodecsGZip(_GZip):
    """The `gzip` of numcodecs: the same bytes with another default level."""

    def __init__(self, level: int = 1) -> None:
        super().__init__(level)


class _Zstd(Compressor):
    """The `zstd` of Zarr and of numcodecs."""

    def __init__(self, level: int = 0, checksum: bool = False) -> None:
        from numcodecs.zstd import Zstd  # takes a sixth of the import time of tstore, so import it late

        if type(checksum) is not bool:
            raise TypeError("expected 'checksum' to be true or false")
        self._codec = Zstd(_checked_int("level", level, -(1 << 17), 22), checksum)

    def encode(self, data: Any) -> bytes:
        encoded: bytes = self._codec.encode(data)
        return encoded

    def decode_into(self, data: memoryview, out: Bytes) -> None:
        """Decode frames that declare the size of `out` in total, or no size, like those of streaming writers."""
        _, size, _ = _zstd_header(data, 0)
        if size is not None and size != out.size:
            size = _zstd_size(data, out.size)
        if size is not None and size != out.size:
            raise wrong_declaration(out.size, size)
        try:
            self._codec.decode(data, out)
        except (RuntimeError, ValueError) as error:
            raise Corrupt(f"zstd bytes do not decode to {out.size} bytes: {error}") from error

    def decode(self, data: memoryview, max_size: int) -> Any:
        size = _zstd_size(data, max_size)
        if size is None:
            raise UnsupportedFormat(
                "a zstd frame after another compressor does not declare the size of its content; "
                "encode the chunk with that size"
            )
        if size > max_size or not is_feasible(size, len(data)):
            raise wrong_declaration(f"at most {max_size}", size)
        out = np.empty(size, np.uint8)
        self.decode_into(data, out)
        return out


_ZSTD_MAGIC = 0xFD2FB528
_ZSTD_SKIPPABLE = 0x184D2A50  # the first of sixteen magic numbers
_MAX_EMPTY = 1024  # frames without content: millions would take long to skip


def _zstd_header(data: memoryview, at: int) -> tuple[int, int | None, bool]:
    """Return the offset of a frame's first block, the size that it declares, and whether a checksum ends it.

    The size is 0 for a skippable frame, and None if the frame declares none.
    """
    if len(data) < at + 6 or int.from_bytes(data[at : at + 4], "little") != _ZSTD_MAGIC:
        if len(data) >= at + 8 and int.from_bytes(data[at : at + 4], "little") & ~15 == _ZSTD_SKIPPABLE:
            return at + 8, 0, False
        raise Corrupt(f"{len(data)} bytes are not zstd frames")
    descriptor = data[at + 4]
    single_segment = descriptor >> 5 & 1
    start = at + 5 + (1 - single_segment) + (0, 1, 2, 4)[descriptor & 3]
    width = (single_segment, 2, 4, 8)[descriptor >> 6]
    size = int.from_bytes(data[start : start + width], "little") + (256 if width == 2 else 0)
    return start + width, size if width else None, bool(descriptor & 4)


def _zstd_size(data: memoryview, max_size: int) -> int | None:
    """Return the total size that the frames declare, or None if one declares none.

    Stop at the first frame with which the total exceeds `max_size`.
    """
    total, at, empty = 0, 0, 0
    while at < len(data) and total <= max_size:
        start, size, has_checksum = _zstd_header(data, at)
        if size is None:
            return None
        total += size
        empty += not size
        if empty > _MAX_EMPTY:
            raise Corrupt(f"more than {_MAX_EMPTY} zstd frames are empty")
        if int.from_bytes(data[at : at + 4], "little") != _ZSTD_MAGIC:
            at = start + int.from_bytes(data[at + 4 : at + 8], "little")
            continue
        last = False
        while not last:
            if start + 3 > len(data):
                raise Corrupt("zstd bytes end within a frame")
            block = int.from_bytes(data[start : start + 3], "little")
            last = bool(block & 1)
            start += 3 + (1 if block >> 1 & 3 == 1 else block >> 3)
        at = start + (4 if has_checksum else 0)
    return total


_SHUFFLES = ("noshuffle", "shuffle", "bitshuffle")
_BLOSC_HEADER = 16  # bytes: version, version of the compressor, flags, typesize, and three sizes of four bytes
_BLOSC_VERSION = 2
_BLOSC_COPIED, _BLOSC_RESERVED, _BLOSC_UNSPLIT = 2, 8, 16
# for elements of up to 16 bytes, and 128 or more of them in a block, blosc writes a stream per byte of an element
_MAX_SPLIT_SIZE, _MIN_SPLIT = 16, 128
_BLOSC_MAX_INPUT = (1 << 31) - 17  # bytes; blosc's sizes are int32
_BLOSC_LARGE = 1 << 20  # bytes of a block; for longer blocks the allocation of c-blosc's buffers is tried first


class _Blosc(Compressor):
    """Zarr's `blosc`.

    c-blosc trusts a frame's header and does not check whether the allocation of its own buffers succeeded. So the
    header and the block offsets of each frame are validated before the library sees it. For long blocks, as much
    memory as the library needs is first allocated and freed as a test. Three risks remain: invalid data within a
    block, of which only the offset is checked; a system that overcommits memory; and memory that another thread
    takes after the test.
    """

    def __init__(self, typesize: int, cname: str, clevel: int, shuffle: str, blocksize: int = 0) -> None:
        from numcodecs import blosc

        # blosc's own threads write blocks in the order of completion, but equal chunks must have equal bytes.
        # zarr-python disables them as well.
        blosc.use_threads = False
        if cname not in blosc.list_compressors():
            raise TypeError(f"expected 'cname' to be one of {', '.join(blosc.list_compressors())}")
        if shuffle not in _SHUFFLES:
            raise TypeError(f"expected 'shuffle' to be one of {', '.join(_SHUFFLES)}")
        self._codec = blosc.Blosc(
            cname,
            _checked_int("clevel", clevel, 0, 9),
            _SHUFFLES.index(shuffle),
            _checked_int("blocksize", blocksize, 0, _MAX_INT),
            _checked_int("typesize", typesize, 1, _MAX_INT),
        )

    def check_input(self, least: int, most: int) -> None:
        if most > _BLOSC_MAX_INPUT:
            raise InvalidArgument(
                f"a chunk of {most} bytes is too long for blosc; choose smaller chunks, of at most "
                f"{_BLOSC_MAX_INPUT} bytes"
            )

    def encode(self, data: Any) -> bytes:
        encoded: bytes = self._codec.encode(data)
        return encoded

    def decode_into(self, data: memoryview, out: Bytes) -> None:
        if (size := _blosc_size(data)) != out.size:
            raise wrong_declaration(out.size, size)
        typesize, blocksize = data[3], int.from_bytes(data[8:12], "little")
        _check_blosc(data, size, typesize, blocksize)
        if blocksize > _BLOSC_LARGE:
            np.empty(2 * blocksize + 4 * typesize + 64, np.uint8)  # raises MemoryError; c-blosc would crash
        try:
            self._codec.decode(data, out)
        except (RuntimeError, ValueError) as error:
            raise Corrupt(f"blosc bytes do not decode: {error}") from error

    def decode(self, data: memoryview, max_size: int) -> Any:
        size = _blosc_size(data)
        if size > max_size or not is_feasible(size, len(data)):
            raise wrong_declaration(f"at most {max_size}", size)
        out = np.empty(size, np.uint8)
        self.decode_into(data, out)
        return out


class _NumcodecsBlosc(_Blosc):
    """The `blosc` of numcodecs, whose shuffle is a number, or -1 for the one that suits the size of an element."""

    def __init__(
        self,
        cname: str = "lz4",
        clevel: int = 5,
        shuffle: int = 1,
        blocksize: int = 0,
        typesize: int | None = None,
    ) -> None:
        typesize = 1 if typesize is None else typesize  # numcodecs gets plain bytes
        shuffle = _checked_int("shuffle", shuffle, -1, 2)
        if shuffle < 0:
            shuffle = 2 if typesize == 1 else 1
        super().__init__(typesize, cname, clevel, _SHUFFLES[shuffle], blocksize)


def _blosc_size(data: memoryview) -> int:
    """Return the size that a frame declares for its content."""
    if len(data) < _BLOSC_HEADER or int.from_bytes(data[12:16], "little") != len(data):
        raise Corrupt(f"{len(data)} bytes are not a blosc frame")
    return int.from_bytes(data[4:8], "little")


def _check_blosc(data: memoryview, size: int, typesize: int, blocksize: int) -> None:
    """Raise `Corrupt` for an impossible header or block offset, `UnsupportedFormat` for another blosc version."""
    version, flags = data[0], data[2]
    if version != _BLOSC_VERSION or flags & _BLOSC_RESERVED:
        raise UnsupportedFormat(
            f"a blosc frame of version {version} with flags {flags:#04x} is not supported; "
            f"expected version {_BLOSC_VERSION}"
        )
    valid = typesize > 0 and 0 < blocksize <= size
    if valid and flags & _BLOSC_COPIED:
        valid = len(data) == size + _BLOSC_HEADER
    elif valid:
        split = not flags & _BLOSC_UNSPLIT and typesize <= _MAX_SPLIT_SIZE and blocksize // typesize >= _MIN_SPLIT
        blocks = -(-size // blocksize)
        table_end = _BLOSC_HEADER + 4 * blocks
        valid = table_end <= len(data) and not (split and size >= blocksize and blocksize % typesize)
        if valid:
            offsets = np.frombuffer(data, "<i4", blocks, _BLOSC_HEADER)
            valid = table_end <= int(offsets.min()) and int(offsets.max()) <= len(data) - 4
    if not valid:
        raise Corrupt(
            f"the header of a blosc frame of {len(data)} bytes is impossible: {size} bytes of content, blocks of "
            f"{blocksize}, elements of {typesize}, flags {flags:#04x}"
        )


COMPRESSORS: dict[str, Callable[..., Compressor]] = {
    "zstd": _Zstd,
    "gzip": _GZip,
    "blosc": _Blosc,
    "numcodecs.zstd": _Zstd,
    "numcodecs.gzip": _NumcodecsGZip,
    "numcodecs.blosc": _NumcodecsBlosc,
}
"""By the name in a `zarr.json`. The arguments are the configuration; a `TypeError` says what is wrong with one."""
