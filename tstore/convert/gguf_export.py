"""Export to a GGUF file with the package gguf; quantized arrays keep their low bits if possible.

These quantized arrays have the same values in GGUF, except for the sign of zero. All values share one offset or
scale, or rows do, or blocks of a multiple of 32 along the last axis, whose length is a multiple of 32.

| in GGUF | eXmY |
|---|---|
| Q4_0: blocks of 32 integers of -8 to 7, a float16 scale | e0m1 to e0m3, e1m0 to e1m2, e2m0 |
| MXFP4: blocks of 32 numbers of e2m1, a power of two | e2m1 with offsets |
| Q8_0: blocks of 32 integers of -127 to 127, a float16 scale | e0m4 to e0m7, e1m3 to e1m6, e2m1 to e2m4, e3m0 |

Q8_0 represents other formats too if their largest value is at most 127 times the least step. A scale must be a
float16 number: those of offsets are, from 2^-24 to 2^15; float scales rarely are. Other quantized arrays are
decoded, or quantized again by the package on request. Names and values are those of the checkpoint: nothing is
renamed or permuted, as llama.cpp's converters do, and the only metadata are the architecture's name and the
version of quantization. An array without axes becomes one of a single element.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import exmy
import ml_dtypes
import numpy as np
import numpy.typing as npt

from tstore.convert.dense_bits import pack_bits
from tstore.convert.exporting import ExportReport, ProgressCallback, in_thread, snapshot_to_export
from tstore.convert.files import StrPath, exported_file, refuse_existing
from tstore.convert.low_bits import ExportedArray, quantized_arrays, read_quantized
from tstore.convert.names import paths_by_name
from tstore.convert.narrow import NoCounterpart, Scaled, as_floats, as_integers
from tstore.core.array import Array
from tstore.core.format.arguments import quote
from tstore.core.runtime.pool import run
from tstore.core.snapshot import Snapshot
from tstore.core.store import Store, opened
from tstore.errors import InvalidArgument, bullet_list

__all__ = ["GgufType", "export_gguf"]

GgufType: TypeAlias = Literal["q8_0", "q4_0"]
"""A type to which quantized arrays without a counterpart are quantized again."""

_BLOCK = 32
_E8M0_BIAS = 127
_MAX_NAME, _MAX_AXES = 63, 4  # limits of ggml: bytes of a name, and dimensions
_PLAIN = {
    **{np.dtype(f"float{bits}"): f"F{bits}" for bits in (16, 32, 64)},
    **{np.dtype(f"int{bits}"): f"I{bits}" for bits in (8, 16, 32, 64)},
    np.dtype(ml_dtypes.bfloat16): "BF16",
}
"""The names of dtypes in GGUF."""


class _Tensor(NamedTuple):
    """How an array is written: the name of its type, its shape, and the function that makes its bytes."""

    kind: str
    shape: tuple[int, ...]
    nbytes: int
    again: bool = False  # whether its decoded values are quantized by the package


async def export_gguf(
    store: StrPath | Store,
    out: StrPath,
    *,
    at: int | str | None = None,
    step: int | None = None,
    subtree: str = "",
    skip: Sequence[str] = (),
    strip: str = "",
    requantize: GgufType | None = None,
    architecture: str = "unknown",
    progress: ProgressCallback | None = None,
) -> ExportReport:
    """Write the version or tag `at`, or a step (by default the newest), to the new GGUF file `out`; return a
    summary.

    Quantized arrays that Q4_0, MXFP4 or Q8_0 represents exactly are written in that type. The others are decoded,
    or quantized again with `requantize`, which rounds their values. Everything else keeps its dtype. `subtree`,
    `strip` and `skip` are as in `export_safetensors`. `architecture` is the metadata that llama.cpp takes for the
    kind of model. One array at a time is in memory. Raise `InvalidArgument` (the package gguf is not installed;
    two arrays with the same name, a dtype, a name or a number of axes that GGUF lacks) and the errors of
    `export_safetensors`.
    """
    path = os.fspath(out)
    if requantize not in (None, "q8_0", "q4_0"):
        raise InvalidArgument(f"requantize={quote(requantize)}: expected 'q8_0', 'q4_0' or None for a GGUF file")
    try:
        import gguf
    except ImportError as error:
        raise InvalidArgument(f"{path}: a GGUF file needs the package gguf; run pip install gguf") from error
    async with opened(store, "r") as opened_store:
        snapshot, skipped = await snapshot_to_export(opened_store, at, step, skip)
        paths, left_out = paths_by_name(snapshot, subtree, strip)
        arrays = {name: await snapshot.array(leaf) for name, leaf in paths.items()}
        _check(path, arrays)
        refuse_existing(path)
        tensors, report = await _planned(snapshot, arrays, requantize)
        total, done = sum(tensor.nbytes for tensor in tensors.values()), 0
        async with in_thread(exported_file(path), path) as fd:
            writer = gguf.GGUFWriter(None, architecture)
            writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
            for name, tensor in tensors.items():
                kind = gguf.GGMLQuantizationType[tensor.kind]
                writer.add_tensor_info(name, tensor.shape, np.dtype(np.float32), tensor.nbytes, raw_dtype=kind)
            await run(_write_header, writer, fd)
            try:
                for name, tensor in tensors.items():
                    data = await _data(snapshot, arrays[name], tensor)
                    await run(writer.write_tensor_data, data)
                    done += tensor.nbytes
                    if progress is not None:
                        progress(done, total)
            finally:
                await run(writer.close)
    return ExportReport(snapshot.version, len(arrays), total, 1, left_out + skipped, report)


def _write_header(writer: Any, fd: int) -> None:
    writer.write_header_to_file(Path(f"/dev/fd/{fd}"))
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()


def _check(path: str, arrays: Mapping[str, Array]) -> None:
    """Raise `InvalidArgument` for arrays that GGUF can't hold."""
    faults = []
    for name, array in arrays.items():
        if array.dtype not in _PLAIN:
            faults.append(f"{name}: dtype {array.dtype}, not one of {', '.join(map(str, _PLAIN))}")
        elif array.ndim > _MAX_AXES or not array.size:
            faults.append(f"{name}: shape {list(array.shape)}, not up to {_MAX_AXES} axes, with elements")
        elif len(name.encode()) > _MAX_NAME:
            faults.append(f"{name}: a name of more than {_MAX_NAME} bytes")
    if faults:
        raise InvalidArgument(
            f"{path} was not written, because GGUF can't hold {len(faults)} of the {len(arrays)} arrays; save a "
            f"tree without them, or with others in their place:{bullet_list(faults)}"
        )


async def _planned(
    snapshot: Snapshot, arrays: Mapping[str, Array], requantize: GgufType | None
) -> tuple[dict[str, _Tensor], list[ExportedArray]]:
    """Return how each array is written, and the GGUF types of the quantized ones."""
    formats, report, tensors = quantized_arrays(snapshot, arrays), [], {}
    for name, array in arrays.items():
        plain = tensors[name] = _Tensor(_PLAIN[array.dtype], array.shape or (1,), array.nbytes)
        if name not in formats:
            continue
        outcome = ExportedArray(name, formats[name], plain.kind)
        try:
            kind, data = await _exact(snapshot, array)
            tensors[name] = _Tensor(kind, array.shape, data.nbytes)
            outcome = outcome._replace(written_as=kind)
        except NoCounterpart as reason:
            if requantize is not None and array.ndim and array.shape[-1] % _BLOCK == 0:
                kind = requantize.upper()
                nbytes = array.size // _BLOCK * (34 if kind == "Q8_0" else 18)
                tensors[name] = _Tensor(kind, array.shape, nbytes, again=True)
                outcome = outcome._replace(written_as=kind, changed=None, reason=str(reason))
            else:
                outcome = outcome._replace(reason=str(reason))
        report.append(outcome)
    return tensors, report


async def _data(snapshot: Snapshot, array: Array, tensor: _Tensor) -> npt.NDArray[Any]:
    """Return how an array is written."""
    import gguf

    if tensor.kind in _PLAIN.values():
        return np.ascontiguousarray(await array.read())
    if not tensor.again:
        return (await _exact(snapshot, array))[1]
    values = (await array.read()).astype(np.float32)
    data: npt.NDArray[Any] = await run(gguf.quantize, values, gguf.GGMLQuantizationType[tensor.kind])
    return data


async def _exact(snapshot: Snapshot, array: Array) -> tuple[str, npt.NDArray[np.uint8]]:
    return await run(_encoded, await read_quantized(snapshot, array))


def _encoded(q: exmy.Quantized) -> tuple[str, npt.NDArray[np.uint8]]:
    """Return the type and the blocks of an array; raise `NoCounterpart` if no type represents its values."""
    if not q.shape:
        raise NoCounterpart("it has no axes")
    run_length = q.shape[-1] if q.axis is None else q.block or q.shape[-1]
    if q.shape[-1] % _BLOCK or run_length % _BLOCK:
        raise NoCounterpart(f"blocks of {_BLOCK} do not divide the runs of its last axis that share an offset")
    if q.format.bits <= 4:
        try:
            return "Q4_0", _q4_0(as_integers(q, 7))
        except NoCounterpart:
            floats = as_floats(q, ml_dtypes.float4_e2m1fn)
            if not floats.changed and q.scales is None:
                return "MXFP4", _mxfp4(floats)
    return "Q8_0", _q8_0(as_integers(q, 127))


def _q4_0(scaled: Scaled) -> npt.NDArray[np.uint8]:
    numbers = scaled.numbers.reshape(-1, _BLOCK).view(np.uint8) + np.uint8(8)
    return np.concatenate([_float16(scaled), _halves(numbers)], axis=1)


def _q8_0(scaled: Scaled) -> npt.NDArray[np.uint8]:
    return np.concatenate([_float16(scaled), scaled.numbers.reshape(-1, _BLOCK).view(np.uint8)], axis=1)


def _mxfp4(scaled: Scaled) -> npt.NDArray[np.uint8]:
    exponents = np.frexp(scaled.scales_of_runs(_BLOCK).reshape(-1, 1))[1].astype(np.int64) - 1 + _E8M0_BIAS
    if exponents.min() < 0 or exponents.max() > 2 * _E8M0_BIAS:
        raise NoCounterpart("it has scales below 2^-127 or above 2^127")
    codes = scaled.numbers.reshape(-1, _BLOCK).view(np.uint8)
    return np.concatenate([exponents.astype(np.uint8), _halves(codes)], axis=1)


def _halves(codes: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Return codes of 4 bits, two in a byte: element i in the low bits, element i + 16 in the high ones."""
    pairs = codes.reshape(-1, 2, _BLOCK // 2).transpose(0, 2, 1)
    return pack_bits(np.ascontiguousarray(pairs), 4).reshape(-1, _BLOCK // 2)


def _float16(scaled: Scaled) -> npt.NDArray[np.uint8]:
    """Return the scale of each block as the bytes of a float16."""
    scales = np.ascontiguousarray(scaled.scales_of_runs(_BLOCK)).reshape(-1, 1)
    with np.errstate(over="ignore"):
        narrow = scales.astype(np.float16)
    if not np.array_equal(narrow, scales):
        raise NoCounterpart("it has scales that are not numbers of float16")
    return narrow.astype("<f2").view(np.uint8)
