"""The quantized arrays of a checkpoint in an export: which keep their low bits, and why others are decoded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import exmy
import numpy as np

from tstore.convert.layouts import Encoded, Layout, encoder, quantization_config, requantized
from tstore.convert.narrow import NoCounterpart
from tstore.convert.safetensors_header import Spec
from tstore.core.array import Array
from tstore.core.format.arrays.array_metadata import ArrayMeta
from tstore.core.runtime.pool import run
from tstore.core.snapshot import Snapshot
from tstore.errors import InvalidArgument, bullet_list

__all__ = ["ExportedArray", "LowBits", "quantized_arrays", "read_quantized"]


class ExportedArray(NamedTuple):
    """How an export wrote a quantized array.

    `format` is its eXmY format, `written_as` the type in the file: that of a layout, such as "F8_E4M3", or the
    dtype of an array that was decoded. `changed` is the number of values that were rounded to a narrow type, or
    None if it was not counted. `reason` says why an array was decoded although low bits were requested.
    """

    name: str
    format: str
    written_as: str
    changed: int | None = 0
    reason: str = ""


class _Plan(NamedTuple):
    """How an array is encoded: an `Encoded` with the dtypes and shapes of its tensors."""

    encoded: Encoded
    specs: dict[str, Spec]
    rounding: bool
    again: bool  # whether its decoded values are quantized again


def quantized_arrays(snapshot: Snapshot, arrays: Mapping[str, Array]) -> dict[str, str]:
    """Return the eXmY format of each array that is in one."""
    metas = {name: _meta(snapshot, array) for name, array in arrays.items()}
    codecs = {name: meta.chain.exmy_codec for name, meta in metas.items()}
    return {name: codec.format.standard.name for name, codec in codecs.items() if codec is not None}


async def read_quantized(snapshot: Snapshot, array: Array) -> exmy.Quantized:
    """Return the codes of an array; raise `NoCounterpart` if the offsets of its chunks can't be joined."""
    try:
        return await snapshot.read_packed(array.path)
    except InvalidArgument:
        raise NoCounterpart(
            "the offsets of its chunks are not those of rows or blocks of the whole array"
        ) from None


def _meta(snapshot: Snapshot, array: Array) -> ArrayMeta:
    node = snapshot.tree.nodes[array.path]
    assert node.meta is not None
    return node.meta


class LowBits:
    """The arrays that an export to safetensors keeps in low bits: planned first, encoded when written.

    An array is read and encoded twice, so that only one at a time is in memory.
    """

    def __init__(self, snapshot: Snapshot, arrays: Mapping[str, Array], layout: Layout) -> None:
        self._snapshot, self._arrays, self._layout = snapshot, arrays, layout
        self._plans: dict[str, _Plan] = {}
        self.report: list[ExportedArray] = []

    @classmethod
    async def plan(
        cls, snapshot: Snapshot, arrays: Mapping[str, Array], layout: Layout, *, requantize: bool
    ) -> LowBits:
        """Return the arrays that have a counterpart in a layout, exactly or, with `requantize`, rounded."""
        self = cls(snapshot, arrays, layout)
        for name, format_name in quantized_arrays(snapshot, arrays).items():
            decoded = ExportedArray(name, format_name, arrays[name].dtype.name)
            try:
                if layout == "decoded":
                    raise NoCounterpart("")
                plan = self._plans[name] = await self._planned(name, requantize)
                self.report.append(decoded._replace(written_as=plan.encoded.scheme, changed=plan.encoded.changed))
            except NoCounterpart as reason:
                self.report.append(decoded._replace(reason=str(reason)))
        self._check_names()
        return self

    async def _planned(self, name: str, requantize: bool) -> _Plan:
        for rounding, again in ((False, False), *([(True, False), (True, True)] if requantize else [])):
            try:
                encoded = await self._encode(name, rounding, again)
            except NoCounterpart as error:
                reason = error
                continue
            specs = {name + suffix: (values.dtype, values.shape) for suffix, values in encoded.tensors.items()}
            return _Plan(encoded._replace(tensors={}), specs, rounding, again)
        raise reason

    async def _encode(self, name: str, rounding: bool, again: bool) -> Encoded:
        array = self._arrays[name]
        encode = encoder(self._layout)
        if not again:
            return await run(encode, name, await read_quantized(self._snapshot, array), rounding)
        values = await array.read()

        def encode_again() -> Encoded:
            encoded = encode(name, requantized(values), rounding)
            return encoded._replace(changed=int(np.count_nonzero(values)))  # an upper bound: some may stay equal

        return await run(encode_again)

    def _check_names(self) -> None:
        taken = [n for name in self._plans for n in self._plans[name].specs if n in self._arrays and n != name]
        if taken:
            raise InvalidArgument(
                f"version {self._snapshot.version} has arrays with the names that the layout {self._layout} gives "
                f"to scales and codes; rename them and save again:{bullet_list(taken)}"
            )

    def specs(self, name: str) -> dict[str, Spec]:
        """Return the dtypes and shapes of the tensors of an array; none if it is not kept in low bits."""
        return self._plans[name].specs if name in self._plans else {}

    async def tensors(self, name: str) -> dict[str, Any]:
        """Read and encode an array, and return its tensors."""
        plan = self._plans[name]
        encoded = await self._encode(name, plan.rounding, plan.again)
        return {name + suffix: values for suffix, values in encoded.tensors.items()}

    def config(self) -> dict[str, Any]:
        """Return the `quantization_config` of compressed-tensors."""
        schemes = {name: plan.encoded for name, plan in self._plans.items()}
        matrices = [n for n, a in self._arrays.items() if a.ndim == 2 and n.endswith(".weight")]
        return quantization_config(schemes, [name for name in matrices if name not in schemes])
