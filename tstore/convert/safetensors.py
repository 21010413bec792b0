"""Read safetensors files as views of a memory map, and write new ones part by part.

A file is 8 bytes of header length (little endian), a JSON header (`safetensors_header`), and the tensors' bytes.
A new file appears whole or not at all, and no file is ever overwritten (see `exported_file`).
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

import numpy as np

from tstore.convert.dense_bits import pack_bits, unpack_bits
from tstore.convert.files import StrPath, exported_file, map_open_file, open_file, refuse_existing
from tstore.convert.safetensors_header import Header, Spec, bits_of, encode_header, parse_header
from tstore.core.storage.local.atomic_file import write_all
from tstore.core.storage.objects import mapped_errors
from tstore.errors import InvalidArgument, Misuse, bullet_list

__all__ = ["Writer", "open_tensors", "read_header"]


def read_header(path: StrPath) -> Header:
    """Return the header of a safetensors file, checked against the file.

    Raise `Corrupt` for a header that does not fit the file, `UnsupportedFormat` for unknown fields,
    `InvalidArgument` for a JSON file, such as an index of several files, and `NotFound` or `Denied` for a file
    that can't be opened.
    """
    with open_file(path) as file:
        return parse_header(file, path)


def open_tensors(path: StrPath) -> tuple[dict[str, np.ndarray[Any, Any]], dict[str, str]]:
    """Return the tensors of a safetensors file as read-only arrays, in the order of their bytes, and its metadata.

    The arrays are views of one memory map: nothing is read until it is used, and the file must not be truncated
    meanwhile. Tensors of 4 and 6 bits are read at once, into a byte an element. Tensors that are not aligned for
    their dtype are copied; early versions of the safetensors package wrote such files. Raise the errors of
    `read_header`.
    """
    with open_file(path) as file:
        header = parse_header(file, path)
        data = map_open_file(file)
    tensors = {}
    for name, info in header.tensors.items():
        encoded, bits = data[info.start : info.stop], bits_of(info.dtype)
        if bits < 8:
            encoded = unpack_bits(encoded, bits, math.prod(info.shape))
            encoded.flags.writeable = False
        array = encoded.view(info.dtype).reshape(info.shape)
        if not array.flags.aligned:
            array = array.copy()
            array.flags.writeable = False
        tensors[name] = array
    return tensors, header.metadata


class Writer:
    """A new safetensors file, which appears whole and durable when the `with` block ends without an exception.

        with Writer("out.safetensors", {"w": (np.dtype("f4"), (2, 3))}, {"format": "np"}) as file:
            file.write("w", w)

    Header and data follow the order of `tensors`. Raise `InvalidArgument` for a name, dtype, shape or metadata
    that the format can't hold, `Misuse` for incomplete tensors, `AlreadyExists` if the file exists, and
    `StorageFull`, `Denied` or `NotFound` from the file system. After an error no new file is left.
    """

    def __init__(
        self, path: StrPath, tensors: Mapping[str, Spec], metadata: Mapping[str, str] | None = None
    ) -> None:
        self.path = os.fspath(path)
        self._resources = contextlib.ExitStack()
        self._fd = -1
        self._header, self._tensors = encode_header(self.path, tensors, metadata or {})
        self._positions = {name: info.start for name, info in self._tensors.items()}
        self._rests: dict[str, np.ndarray[Any, Any]] = {}  # the elements of an incomplete byte

    def __enter__(self) -> Self:
        refuse_existing(self.path)
        with contextlib.ExitStack() as stack:
            stack.enter_context(mapped_errors("write", self.path))
            self._fd = stack.enter_context(exported_file(self.path))
            write_all(self._fd, [self._header], 0)
            self._resources = stack.pop_all()
        return self

    def write(self, name: str, part: np.ndarray[Any, Any]) -> None:
        """Write a whole tensor, or its next rows (parts along the first dimension, in order).

        Tensors may come in any order. `part` has the declared dtype and, except for the number of rows, the
        declared shape. Raise `InvalidArgument` for a part that does not fit, `Misuse` outside the `with` block.
        """
        path = self.path
        if self._fd < 0:
            raise Misuse(f"{path} is not open for writing; write inside its `with` block")
        if name not in self._tensors:
            raise InvalidArgument(
                f"tensor {name!r} is not declared for {path}; declare it in the tensors of Writer"
            )
        info, position = self._tensors[name], self._positions[name]
        if part.dtype.newbyteorder("=") != info.dtype:
            raise InvalidArgument(
                f"tensor {name!r} of {path} is declared as {info.dtype}, but a part is {part.dtype}; convert the "
                "part, or declare its dtype"
            )
        fits = part.ndim == len(info.shape) and part.shape[1:] == info.shape[1:]
        data, rest = self._encoded(name, part, info.dtype)
        if not fits or position + data.nbytes > info.stop or (rest.size and position + data.nbytes == info.stop):
            raise InvalidArgument(
                f"tensor {name!r} of {path} is declared with shape {info.shape} and has "
                f"{position - info.start} of {info.stop - info.start} bytes, so a part of shape {part.shape} does "
                "not fit; write each row once, in order"
            )
        with mapped_errors("write", path):
            write_all(self._fd, [data.data], position)
        self._positions[name], self._rests[name] = position + data.nbytes, rest

    def _encoded(
        self, name: str, part: np.ndarray[Any, Any], dtype: np.dtype[Any]
    ) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Return the next whole bytes of a tensor, and the elements of the incomplete last byte."""
        flat, bits = np.ascontiguousarray(part, dtype).reshape(-1).view(np.uint8), bits_of(dtype)
        if bits == 8 * dtype.itemsize:
            return flat, flat[:0]
        if name in self._rests and self._rests[name].size:
            flat = np.concatenate([self._rests[name], flat])
        whole = flat.size - flat.size % (2 if bits == 4 else 4)
        return pack_bits(flat[:whole], bits), flat[whole:].copy()

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error_type is not None:
                self._resources.__exit__(error_type, error, trace)
                return
            with self._resources:
                self._check_complete()
        finally:
            self._fd = -1

    def _check_complete(self) -> None:
        incomplete = [
            f"{name}: {self._positions[name] - info.start} of {info.stop - info.start} bytes"
            for name, info in self._tensors.items()
            if self._positions[name] != info.stop
        ]
        if incomplete:
            raise Misuse(
                f"{self.path} was not written, because {len(incomplete)} of {len(self._tensors)} tensors are "
                f"incomplete; write them all before the `with` block ends:{bullet_list(incomplete)}"
            )
