"""Archives of `torch.save`, read without torch: tensors become views of the file's memory map.

An archive is a zip file whose entries are not compressed. `data.pkl` is a pickle of the saved object, read as data
(see `pickled`). For each tensor it names a storage, whose bytes are the entry `data/<key>`, and the shape and
strides of the tensor in this storage. A folder of `torch.distributed.checkpoint` has an archive for every tensor,
one after the other in its files.
"""

from __future__ import annotations

import errno
import io
import math
import re
import struct
import zipfile
from typing import Any

import numpy as np
import numpy.typing as npt

from tstore.convert.pickled import Instance, Name, PersistentId, Unreadable, Visits, check_key, parse_pickle
from tstore.core.data.casting import TORCH_DTYPES
from tstore.errors import Corrupt, UnsupportedFormat

__all__ = ["read_archive"]

Bytes = npt.NDArray[np.uint8]

_TENSOR, _TENSOR_OF_DTYPE = ("torch._utils", "_rebuild_tensor_v2"), ("torch._utils", "_rebuild_tensor_v3")
_PARAMETER = ("torch._utils", "_rebuild_parameter")
_DICTS = {("collections", "OrderedDict"), ("collections", "defaultdict"), ("builtins", "dict")}
_ENCODE, _BYTES_IO = ("_codecs", "encode"), ("_io", "BytesIO")
_SCALARS = {("numpy._core.multiarray", "scalar"), ("numpy.core.multiarray", "scalar")}
_DTYPE, _SIZE = ("numpy", "dtype"), ("torch", "Size")

_STORAGES = {
    "BoolStorage": "bool",
    "ByteStorage": "uint8",
    "CharStorage": "int8",
    "ShortStorage": "int16",
    "IntStorage": "int32",
    "LongStorage": "int64",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "FloatStorage": "float32",
    "DoubleStorage": "float64",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
    "UntypedStorage": "uint8",
}
"""The dtype of each class of storage that a file may name."""

_NUMBER = re.compile(r"[<|=]?[biufc][0-9]{1,2}")  # the name of a NumPy dtype
_LOCAL_HEADER = struct.Struct("<4s22xHH")  # the signature, and the lengths of the name and of the extra field
_ENCRYPTED = 1
_MAX_NDIM = 64  # the limit of NumPy
_MAX_SHOWN = 100  # characters of a name in a message
_MAX_DIRECTORY = 1 << 26  # bytes of the list of entries; parsed, it takes ten times as much memory
_MAX_EXPANSION = 16


def read_archive(
    data: Bytes, subject: str, visits: Visits | None = None, max_expansion: int = _MAX_EXPANSION
) -> Any:
    """Return the object that an archive holds: plain containers and scalars, and tensors as views of `data`.

    `visits` counts the values of several archives together. All values together may have `max_expansion` times the
    bytes of the archive, because some tensors share their memory.

    An object that is neither a tensor nor a plain value becomes an `Unreadable`. Raise `Corrupt` for bytes that
    are not an archive, or tensors that reach beyond their bytes, and `UnsupportedFormat` for a compressed or
    big-endian archive, and for tensors and keys that tstore does not read.
    """
    return _Archive(data, subject, visits or Visits(subject), max_expansion).value()


class _ArchiveFile(io.RawIOBase):
    """The bytes of an archive as a file, from which `zipfile` reads the list of entries."""

    def __init__(self, data: Bytes) -> None:
        self._data, self._position, self._read_budget = data, 0, _MAX_DIRECTORY

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: len(self._data)}[whence]
        if base + offset < 0:
            raise OSError(22, "a position before the start")
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        part = self._data[self._position : self._position + len(buffer)]
        buffer[: len(part)] = part.tobytes()
        self._position += len(part)
        self._read_budget -= len(part)
        if self._read_budget < 0:
            raise OSError(errno.EFBIG, "its list of entries is too long")
        return len(part)


class _Archive:
    """One archive: its entries by name without the folder that contains them all."""

    def __init__(self, data: Bytes, subject: str, visits: Visits, max_expansion: int) -> None:
        self._data, self._subject, self._visits = data, subject, visits
        self._storages: dict[str, Bytes] = {}
        self._max_expansion, self._bytes_left = max_expansion, max_expansion * len(data)
        self._copied_bytes = 0
        try:
            with zipfile.ZipFile(_ArchiveFile(data)) as archive:
                entries = archive.infolist()
        except (zipfile.BadZipFile, OSError, ValueError, struct.error, NotImplementedError) as error:
            raise self._corrupt(f"it is not a zip archive of torch.save ({error})") from error
        self._entries = {entry.filename.partition("/")[2]: entry for entry in entries}
        if len(self._entries) != len(entries):
            raise self._corrupt("two entries have the same name")

    def value(self) -> Any:
        if "data.pkl" not in self._entries:
            raise self._corrupt("it has no entry data.pkl")
        if "byteorder" in self._entries and (order := self._entry_bytes("byteorder").tobytes()) != b"little":
            raise UnsupportedFormat(
                f"{self._subject} has byte order {order[:20]!r}; save it again on a little-endian machine"
            )
        pickled = parse_pickle(self._entry_bytes("data.pkl").tobytes(), None, self._subject, self._visits)
        try:
            return self._plain(pickled)
        except (TypeError, ValueError, LookupError, AttributeError, RecursionError) as error:
            raise self._corrupt(
                f"its pickle does not have the format that torch.save writes ({error!r:.200})"
            ) from error

    def _entry_bytes(self, name: str) -> Bytes:
        """Return the bytes of an entry as a view."""
        entry = self._entries.get(name)
        if entry is None:
            raise self._corrupt(f"it has no entry {name[:100]!r}")
        if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & _ENCRYPTED:
            raise UnsupportedFormat(f"{self._subject}: entry {name!r} is compressed or encrypted")
        start = entry.header_offset + _LOCAL_HEADER.size
        if entry.header_offset < 0 or start > len(self._data):
            raise self._corrupt(f"entry {name!r} begins beyond the end of the archive")
        signature, *lengths = _LOCAL_HEADER.unpack(self._data[entry.header_offset : start].tobytes())
        start += sum(lengths)
        if signature != b"PK\x03\x04" or start + entry.file_size > len(self._data):
            raise self._corrupt(f"entry {name!r} has {entry.file_size} bytes, but not all are there")
        return self._data[start : start + entry.file_size]

    def _plain(self, value: Any) -> Any:
        """Interpret a value of the pickle."""
        self._visits.add()
        match value:
            case Name():
                return _unreadable(value)
            case str() | bytes():
                self._count_bytes(len(value))
                return value
            case int():
                self._count_bytes(value.bit_length() >> 3)
                return value
            case None | float():
                return value
            case Instance():
                return self._instance(value)
            case dict():
                return self._dict([*value.items()])
            case list():
                return [self._plain(item) for item in value]
            case tuple() if not isinstance(value, PersistentId):
                return tuple(self._plain(item) for item in value)
        raise self._corrupt(f"its pickle has a {type(value).__name__} in place of a value")

    def _dict(self, pairs: list[Any]) -> dict[Any, Any]:
        """Interpret the keys and values of a dict."""
        plain: dict[Any, Any] = {}
        for key, item in pairs:
            self._visits.keys.insert(plain, self._key(key), self._plain(item))
        return plain

    def _key(self, key: Any) -> Any:
        """Interpret a key."""
        check_key(key)
        if isinstance(key, (str, bytes)):
            self._count_bytes(len(key))
        plain = self._instance(key) if isinstance(key, Instance) else key
        if isinstance(plain, Unreadable):
            raise UnsupportedFormat(f"{self._subject} has a dict with a {plain.what} as a key; use text as keys")
        if isinstance(plain, tuple):
            raise UnsupportedFormat(f"{self._subject} has a dict with a tuple as a key; use text as keys")
        return plain

    def _instance(self, value: Instance) -> Any:
        name, arguments = tuple(value.function), value.arguments
        if value.values is not None:  # a list of some class
            return _unreadable(value.function)
        if name == _TENSOR:
            storage, offset, size, stride = arguments[:4]
            return self._computed(self._tensor(storage, offset, size, stride, None), arguments[6:])
        if name == _TENSOR_OF_DTYPE:
            storage, offset, size, stride, _, _, dtype = arguments[:7]
            return self._computed(self._tensor(storage, offset, size, stride, dtype), arguments[7:])
        if name == _PARAMETER:
            return self._plain(arguments[0])
        if name in _DICTS:
            pairs = [pair for pairs in arguments if isinstance(pairs, (list, tuple)) for pair in pairs]
            return self._dict([*pairs, *(value.items or {}).items()])
        if name == _ENCODE:
            text = _text(arguments[0])
            self._count_bytes(len(text))
            return text.encode("latin-1")
        if name == _BYTES_IO:
            return self._plain(value.state[0] if value.state else arguments[0] if arguments else b"")
        if name == _SIZE:
            return tuple(self._plain(item) for item in arguments[0])
        if name in _SCALARS and tuple(arguments[0].function) == _DTYPE:
            dtype_name = _text(arguments[0].arguments[0])
            if not _NUMBER.fullmatch(dtype_name):  # np.dtype would parse texts of any length, even as Python
                raise UnsupportedFormat(f"{self._subject} has a NumPy scalar of dtype {dtype_name:.100}")
            return np.frombuffer(self._plain(arguments[1]), np.dtype(dtype_name), 1)[0]
        return _unreadable(value.function)

    def _tensor(self, storage: Any, offset: Any, size: Any, stride: Any, dtype: Any) -> Any:
        """Return a view of a storage with this offset, shape and strides, in elements."""
        kind, storage_class, key, _, _ = storage.value
        if kind != "storage" or not isinstance(storage_class, Name) or not isinstance(key, str):
            raise self._corrupt("its pickle has an invalid storage")
        np_dtype = TORCH_DTYPES.get(_STORAGES.get(storage_class.name, "") if dtype is None else dtype.name)
        if np_dtype is None:
            return Unreadable(f"a tensor of the dtype {storage_class.name if dtype is None else dtype.name:.100}")
        if isinstance(size, Instance):  # torch.Size
            size = size.arguments[0]
        numbers = (offset, *size, *stride)
        if len(numbers) > 2 * _MAX_NDIM + 1 or not all(type(n) is int for n in numbers):
            raise TypeError("the size or strides of a tensor")  # not shown, because printing them may never end
        if len(size) != len(stride) or not all(0 <= n < 1 << 62 for n in numbers):
            raise self._corrupt(f"a tensor has size {size!r:.100}, strides {stride!r:.100}, offset {offset!r:.30}")
        if key not in self._storages:
            self._storages[key] = self._entry_bytes(f"data/{key}")
        data = self._storages[key]
        nbytes = math.prod(size) * np_dtype.itemsize
        if not nbytes:
            return np.empty(size, np_dtype)
        last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        if (last + 1) * np_dtype.itemsize > len(data):  # an expanded tensor may have more bytes than its storage
            raise self._corrupt(
                f"a {np_dtype} tensor of size {size} from element {offset} does not fit in the {len(data)} bytes "
                "of its storage"
            )
        self._count_bytes(nbytes)
        strides = [step * np_dtype.itemsize for step in stride]
        return np.ndarray(size, np_dtype, data.data, offset * np_dtype.itemsize, strides)

    def _computed(self, stored: Any, properties: tuple[Any, ...]) -> Any:
        """Return the values of a tensor, which torch may compute lazily from the stored ones.

        `properties` is empty or has a dict, which may say that the tensor is the conjugate or the negative of what
        is stored.
        """
        [lazy] = properties or [None]
        if not lazy or isinstance(stored, Unreadable):
            return stored
        if not isinstance(lazy, dict) or not lazy.keys() <= {"conj", "neg"}:
            raise UnsupportedFormat(f"{self._subject} has a tensor with properties that tstore does not read")
        self._copied_bytes += stored.nbytes
        if self._copied_bytes > len(self._data):  # many tensors may share their memory, but not the copies
            raise UnsupportedFormat(
                f"{self._subject} has conjugated or negated tensors of more bytes than the archive; save them "
                "with resolve_conj() and resolve_neg()"
            )
        values = np.conjugate(stored) if lazy.get("conj") else stored
        return np.asarray(np.negative(values) if lazy.get("neg") else values)

    def _count_bytes(self, count: int) -> None:
        """Raise `Corrupt` if the values are far longer than the archive, because many share the same bytes."""
        self._bytes_left -= count
        if self._bytes_left < 0:
            raise self._corrupt(f"its values have more than {self._max_expansion} times the bytes of the archive")

    def _corrupt(self, reason: str) -> Corrupt:
        return Corrupt(
            f"{self._subject} can't be read as an archive of torch.save: {reason}; check where it is from"
        )


def _unreadable(name: Name) -> Unreadable:
    """Return the placeholder for an object of a class that is not read, or for the class itself."""
    return Unreadable(f"{name.module}.{name.name}"[:_MAX_SHOWN])


def _text(value: Any) -> str:
    """Return a value of a pickle that must be text."""
    if not isinstance(value, str):
        raise TypeError(f"a {type(value).__name__} in place of a text")
    return value
