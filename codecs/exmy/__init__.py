"""eXmY: numbers of 2 to 16 bits for tensors, with any split between exponent and mantissa.

>>> import exmy, numpy as np
>>> f = exmy.Format("e4m3")
>>> x = np.array([0.3, -1.0, 500.0], np.float32)
>>> exmy.decode(exmy.encode(x, f), f)
array([   0.3125,   -1.    ,  480.    ], dtype=float32)

FORMAT.md, beside this file, says what each code is worth and how codes are packed; `python -m exmy formats` prints
all formats. `jax`, `torch`, `zarr` and `numcodecs` are imported by name. Reading the source:

1. `format`: a format. `reference`: the specification of all that is done with one.
2. `codes`, `packing`: the verbs, on arrays of `elements`; `rounding`: to nearest or at random.
3. `fit`, `tensor_fit`: the shared exponent of a tensor, whole or slab by slab.
4. `quantizer`: arrays to `quantized` ones, with `offsets` that `groups` share; `chunk`: the bytes of chunks.
5. `exponents`, `noise`: what values are like, and what rounding did to them. `sample`, `survey`, `choice`: the
   format that suits.
6. `kernels`: who does the work: the C of `_kernels.c` (`_lanes.h`: how it is fast), or `blockwise`, the reference.
   `threads`: many parts of an array at once. `emulation`: what JAX and PyTorch need to round in their own terms.
7. `errors`: what can go wrong.
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
