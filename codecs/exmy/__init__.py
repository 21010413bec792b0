"""eXmY: numbers of 2 to 16 bits for tensors, with any split between exponent and mantissa.

>>> import exmy, numpy as np
>>> f = exmy.Format("e4m3")
>>> x = np.array([0.3, -1.0, 500.0], np.float32)
>>> exmy.decode(exmy.encode(x, f), f)
array([   0.3125,   -1.    ,  480.    ], dtype=float32)

FORMAT.md, beside this file, says what each code is worth and how codes are packed.  Reading the source:
format.py (the nouns), reference.py (the specification), codes.py and packing.py (the verbs), fit.py and
tensor_fit.py (the shared exponent of a tensor, slab by slab), quantizer.py, groups.py and offsets.py (of rows
and blocks), quantized.py, chunk.py (the bytes of chunks), exponents.py and noise.py (what the values are like,
and what rounding did to them), sample.py, survey.py and choice.py (the format that suits), kernels.py (who does
the work), _lanes.h (how it is done fast).  exmy.jax, exmy.torch, exmy.zarr and exmy.numcodecs are imported by
name; `python -m exmy formats` prints all formats.
"""

from exmy import kernels
from exmy.choice import Choice, choose
from exmy.chunk import ChunkCodec, ChunkSlice
from exmy.codes import decode, decode_packed, encode, encode_packed, round
from exmy.errors import (
    CodeError,
    DtypeError,
    ExmyError,
    FormatError,
    KernelError,
    NonFiniteError,
    SizeError,
    SlowPathWarning,
)
from exmy.exponents import Exponents, exponents
from exmy.format import Format, formats
from exmy.groups import BLOCKS, Groups
from exmy.noise import Difference, compare, sqnr
from exmy.packing import TILE, pack, packed_size, slice_bytes, unpack
from exmy.quantized import Quantized
from exmy.quantizer import quantize
from exmy.survey import Candidate, survey
from exmy.tensor_fit import TensorFit

__all__ = [
    "BLOCKS",
    "TILE",
    "Candidate",
    "Choice",
    "ChunkCodec",
    "ChunkSlice",
    "CodeError",
    "Difference",
    "DtypeError",
    "ExmyError",
    "Exponents",
    "Format",
    "FormatError",
    "Groups",
    "KernelError",
    "NonFiniteError",
    "Quantized",
    "SizeError",
    "SlowPathWarning",
    "TensorFit",
    "choose",
    "compare",
    "decode",
    "decode_packed",
    "encode",
    "encode_packed",
    "exponents",
    "formats",
    "kernels",
    "pack",
    "packed_size",
    "quantize",
    "round",
    "slice_bytes",
    "sqnr",
    "survey",
    "unpack",
]
