"""The header of a safetensors file: the names, dtypes, shapes and positions of its tensors.

    {"__metadata__": {"format": "pt"}, "w": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, …}

Offsets count from the end of the header. The tensors cover the data exactly, without gaps or overlaps. Elements of
4 and 6 bits are dense, the first in the lowest bits, as in PyTorch's float4_e2m1fn_x2 and in compressed-tensors. A
tensor of these takes whole bytes.

Headers are untrusted input. The whole header is checked before any data are read. A header that does not fit the
file raises `Corrupt`. These checks are stricter than those of the safetensors package, which silently keeps the
last of duplicate keys and ignores unknown fields.
"""

from __future__ import annotations

import json
import math
import operator
import os
import reprlib
from collections.abc import Mapping
from typing import Any, BinaryIO, NamedTuple, NoReturn, TypeAlias

import ml_dtypes
import msgspec
import numpy as np

from tstore.convert.files import StrPath
from tstore.errors import Corrupt, InvalidArgument, UnsupportedFormat

__all__ = [
    "DTYPES",
    "Header",
    "Spec",
    "TensorInfo",
    "bits_of",
    "encode_header",
    "parse_header",
    "sort_tensors",
]

Spec: TypeAlias = tuple[np.dtype[Any], tuple[int, ...]]
"""The dtype and shape of a tensor."""

# In the order of the safetensors package, which writes the tensors of the last dtype first.
DTYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    "F4": np.dtype(ml_dtypes.float4_e2m1fn),
    "F6_E2M3": np.dtype(ml_dtypes.float6_e2m3fn),
    "F6_E3M2": np.dtype(ml_dtypes.float6_e3m2fn),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "F8_E4M3FNUZ": np.dtype(ml_dtypes.float8_e4m3fnuz),
    "F8_E5M2FNUZ": np.dtype(ml_dtypes.float8_e5m2fnuz),
    "I16": np.dtype(np.int16),
    "U16": np.dtype(np.uint16),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I32": np.dtype(np.int32),
    "U32": np.dtype(np.uint32),
    "F32": np.dtype(np.float32),
    "C64": np.dtype(np.complex64),
    "F64": np.dtype(np.float64),
    "I64": np.dtype(np.int64),
    "U64": np.dtype(np.uint64),
}
"""The dtypes by their names in the format."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_BITS = {DTYPES["F4"]: 4, DTYPES["F6_E2M3"]: 6, DTYPES["F6_E3M2"]: 6}
_METADATA = "__metadata__"
_MAX_HEADER = 100_000_000  # bytes; the limit of the safetensors package
_MAX_UNCHECKED = 1 << 20  # bytes; the structure of a longer header is checked before `json` parses it
_LENGTH = 8  # bytes of the number at the start of the file that gives the length of the header
_MAX_SIZE = 2**63 - 1  # bytes of one array in memory
_MAX_NDIM = 64  # dimensions of a NumPy array

_SHORT = reprlib.Repr()  # for messages: values in a header may be long and deep
_SHORT.maxstring = _SHORT.maxother = 120


class TensorInfo(NamedTuple):
    """The dtype, shape and position of a tensor: its bytes are [start, stop) of the file, in C order."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    start: int
    stop: int


class Header(NamedTuple):
    """The tensors of a file by name, in the order of their bytes, and its metadata."""

    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]


def bits_of(dtype: np.dtype[Any]) -> int:
    """Return the bits of an element in a file."""
    return _BITS.get(dtype) or 8 * dtype.itemsize


def sort_tensors(tensors: Mapping[str, Spec]) -> dict[str, Spec]:
    """Return the tensors in the order of the safetensors package: by dtype, then by name.

    Wide elements come first, so that all tensors are aligned. Raise `InvalidArgument` for a dtype that the format
    lacks.
    """
    rank = {dtype: -i for i, dtype in enumerate(DTYPES.values())}
    return dict(sorted(tensors.items(), key=lambda item: (rank[_checked_dtype(item[0], item[1][0])], item[0])))


def encode_header(
    path: str, tensors: Mapping[str, Spec], metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, TensorInfo]]:
    """Return the encoded header of a file with these tensors, and the position of each.

    Raise `InvalidArgument` for a name, dtype, shape or metadata that the format can't represent.
    """
    fields: dict[str, Any] = {}
    if metadata:
        fields[_METADATA] = dict(metadata)
    for key, value in metadata.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise InvalidArgument(
                f"metadata of {path} has {key!r}: {value!r}; expected only strings as keys and values"
            )
    infos, offset = {}, 0
    for name, (dtype, shape) in tensors.items():
        if name == _METADATA:
            raise InvalidArgument(f"{path} can't hold a tensor named {_METADATA!r}; rename it")
        info = _new_info(name, np.dtype(dtype), shape, offset)
        fields[name] = {"dtype": _NAMES[info.dtype], "shape": info.shape, "data_offsets": (info.start, info.stop)}
        infos[name], offset = info, info.stop
    try:
        encoded = json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"{path} can't hold a name or metadata that is not UTF-8: {error}") from error
    encoded += b" " * (-len(encoded) % 8)
    if len(encoded) > _MAX_HEADER:
        raise InvalidArgument(
            f"the header of {path} would take {len(encoded)} bytes, more than the {_MAX_HEADER} that readers "
            "accept; spread the tensors over several files"
        )
    data_start = _LENGTH + len(encoded)
    positions = {n: i._replace(start=data_start + i.start, stop=data_start + i.stop) for n, i in infos.items()}
    return len(encoded).to_bytes(_LENGTH, "little") + encoded, positions


def _new_info(name: str, dtype: np.dtype[Any], shape: tuple[int, ...], start: int) -> TensorInfo:
    try:
        lengths = tuple(operator.index(n) for n in shape)
    except TypeError:
        lengths = (-1,)
    if any(n < 0 for n in lengths):
        raise InvalidArgument(f"tensor {name!r} has shape {shape!r}; expected integers of at least 0")
    bits = math.prod(lengths) * bits_of(_checked_dtype(name, dtype))
    if bits % 8:
        raise InvalidArgument(
            f"tensor {name!r} is {dtype} of shape {list(lengths)}, which takes {bits} bits, but a tensor of "
            "safetensors takes whole bytes; pad it, or convert it to a dtype of 8 bits"
        )
    return TensorInfo(dtype, lengths, start, start + bits // 8)


def _checked_dtype(name: str, dtype: np.dtype[Any]) -> np.dtype[Any]:
    if dtype not in _NAMES:
        raise InvalidArgument(
            f"tensor {name!r} is {dtype}, which safetensors can't hold; convert it to one of "
            f"{', '.join(map(str, _NAMES))}"
        )
    return dtype


def parse_header(file: BinaryIO, path: StrPath) -> Header:
    """Return the header of an open file, checked against the file's size.

    Raise `Corrupt` for a header that does not fit the file, `UnsupportedFormat` for fields or dtypes that tstore
    can't read, or `InvalidArgument` for a JSON file, such as the index of a model in several files.
    """
    size = os.fstat(file.fileno()).st_size
    if size < _LENGTH:
        raise _corrupt(path, "the file", f"at least {_LENGTH} bytes", f"{size}")
    start = file.read(_LENGTH)
    length = int.from_bytes(start, "little")
    if length > _MAX_HEADER and start.startswith(b"{"):
        raise InvalidArgument(
            f"{os.fspath(path)} is JSON, not a safetensors file; pass the name of a file of tensors, or, to "
            "import a model in several files, the index whose name ends in .index.json"
        )
    if length > _MAX_HEADER:
        raise _corrupt(path, "the header length", f"at most {_MAX_HEADER} bytes", f"{length}")
    if length > size - _LENGTH:
        raise _corrupt(path, "the header length", f"at most the {size - _LENGTH} bytes that follow", f"{length}")
    fields = _parse_json(file.read(length), path)
    metadata = fields.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _corrupt(path, _METADATA, "an object of strings", _SHORT.repr(metadata))
    data_start = _LENGTH + length
    infos = {
        name: _parse_info(field, data_start, size, f"tensor {_SHORT.repr(name)}", path)
        for name, field in fields.items()
    }
    tensors = dict(sorted(infos.items(), key=lambda item: (item[1].start, item[1].stop)))
    end = data_start
    for name, info in tensors.items():
        if info.start != end:
            relation = "overlaps the tensor before it" if info.start < end else "leaves a gap before it"
            subject = f"tensor {_SHORT.repr(name)} {relation}; the start of its data"
            raise _corrupt(path, subject, f"byte {end}", f"{info.start}")
        end = info.stop
    if end != size:
        raise _corrupt(path, "the file", f"{end} bytes according to its header", f"{size}")
    return Header(tensors, metadata)


def _parse_json(text: bytes, path: StrPath) -> dict[str, Any]:
    # `json` rather than msgspec, which silently keeps the last of duplicate keys
    def build(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        seen: dict[str, Any] = {}
        for key, value in pairs:
            if key in seen:
                raise _corrupt(path, f"key {_SHORT.repr(key)} of the header", "once", "twice")
            key.encode()  # raises for lone surrogates, which \u escapes can produce
            if isinstance(value, str):
                value.encode()
            seen[key] = value
        return seen

    def refuse(name: str) -> NoReturn:
        raise ValueError(f"{name} is not JSON")

    if not text.startswith(b"{"):
        raise _corrupt(path, "the header", "a JSON object", repr(text[:20]))
    if len(text) > _MAX_UNCHECKED:
        _check_structure(text, path)
    try:
        fields: dict[str, Any] = json.loads(text.decode(), object_pairs_hook=build, parse_constant=refuse)
    except UnicodeError as error:
        raise _corrupt(path, "the header", "UTF-8", str(error)) from error
    except (ValueError, RecursionError) as error:
        raise _corrupt(path, "the header", "a JSON object", str(error)) from error
    return fields


class _Name(str):
    """A name in a header. Python code makes each, so that a cancellation can end the parsing of many."""

    __slots__ = ()


def _check_structure(text: bytes, path: StrPath) -> None:
    """Raise `Corrupt` if a long text can't be a header, before `json` takes ten times its size to parse it."""
    try:
        structure = dict[_Name, dict[str, str | list[int]]]
        msgspec.json.decode(text, type=structure, dec_hook=lambda kind, name: kind(name))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _corrupt(path, "the header", "a JSON object of tensors", f"{error!s:.200}") from error


def _parse_info(field: Any, data_start: int, size: int, subject: str, path: StrPath) -> TensorInfo:
    if not isinstance(field, dict):
        raise _corrupt(path, subject, "an object", _SHORT.repr(field))
    keys = {"dtype", "shape", "data_offsets"}
    if missing := keys - field.keys():
        raise _corrupt(path, subject, f"fields {', '.join(sorted(keys))}", f"no {', '.join(sorted(missing))}")
    if unknown := field.keys() - keys:
        raise UnsupportedFormat(
            f"{path}: {subject} has fields unknown to this tstore: {_SHORT.repr(sorted(unknown))}; install a "
            "newer tstore, or write the file again with the safetensors package"
        )
    name = field["dtype"]
    if not isinstance(name, str) or name not in DTYPES:
        raise _corrupt(path, f"dtype of {subject}", f"one of {', '.join(DTYPES)}", _SHORT.repr(name))
    dtype = DTYPES[name]
    shape = _parse_integers(field["shape"], f"shape of {subject}", path)
    if len(shape) > _MAX_NDIM:
        raise UnsupportedFormat(
            f"{path}: {subject} has {len(shape)} dimensions, but NumPy has at most {_MAX_NDIM}; reshape it first"
        )
    if dtype.itemsize * math.prod(n for n in shape if n) > _MAX_SIZE:
        raise _corrupt(path, f"shape of {subject}", f"at most {_MAX_SIZE} bytes", _SHORT.repr(list(shape)))
    offsets = _parse_integers(field["data_offsets"], f"data_offsets of {subject}", path)
    if len(offsets) != 2 or not offsets[0] <= offsets[1] <= size - data_start:
        expected = f"two ascending numbers up to the {size - data_start} bytes of data"
        raise _corrupt(path, f"data_offsets of {subject}", expected, _SHORT.repr(list(offsets)))
    start, stop = offsets
    nbytes = bits_of(dtype) * math.prod(shape) / 8
    if stop - start != nbytes:
        raise _corrupt(path, subject, f"{nbytes:g} bytes for {name} of shape {list(shape)}", f"{stop - start}")
    return TensorInfo(dtype, shape, data_start + start, data_start + stop)


def _parse_integers(value: Any, subject: str, path: StrPath) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(n) is int and n >= 0 for n in value):
        raise _corrupt(path, subject, "a list of integers of at least 0", _SHORT.repr(value))
    return tuple(value)


def _corrupt(path: StrPath, subject: str, expected: str, actual: str) -> Corrupt:
    return Corrupt(
        f"{os.fspath(path)} is not a valid safetensors file: {subject}: expected {expected}, found {actual}; "
        "check the path, or download it again"
    )
