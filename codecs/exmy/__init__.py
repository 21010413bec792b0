"""eXmY: low-bit number formats for tensors, with 2 to 16 bits, including 0 to 8 exponent bits.

>>> import exmy, numpy as np
>>> f = exmy.Format("e4m3")
>>> x = np.array([0.6, -1.0, 500.0], np.float32)
>>> exmy.decode(exmy.encode(x, f), f)
array([  0.625,  -1.   , 480.   ], dtype=float32)

FORMAT.md, beside this file, defines the value of each code and the packing of codes; `python -m exmy formats`
lists all formats. Import the integrations explicitly: `jax`, `torch`, `zarr` and `numcodecs`. Reading the source:

1. `format`: number formats. `reference`: the specification of encoding, decoding and packing, in NumPy.
2. `codes`, `packing`: encode, decode, round, pack, unpack. `elements`: the float types of their input and output.
   `rounding`: the rounding modes, to nearest and stochastic.
3. `fit`, `tensor_fit`: choose the shared exponent of a tensor, in memory or slab by slab.
4. `quantizer`: quantize arrays. `quantized`: the result. `groups`: the elements that share an offset or scale.
   `offsets`: choose the offsets. `scales`: choose and store float scales. `importance`: weighted errors in these
   choices. `chunk`: the bytes of Zarr chunks; `reencoding`: those of a chunk in which some values have changed.
5. `exponents`: the histogram of exponents. `noise`: the error of an approximation. `sample`, `survey`, `choice`:
   choose a format for an array.
6. `kernels`: dispatch to the C kernels in `_kernels.c` (`_lanes.h` explains their loops) or to `blockwise`, which
   runs the reference in blocks. `threads`: parallel work on parts of an array. `emulation`: the constants that
   `jax` and `torch` use to round in integer arithmetic. `integers`: their other integer operations.
7. `step`: an array as the difference to an earlier one, losslessly; `step_reference` specifies its bytes.
8. `errors`: the exceptions. `user_warnings`: warnings at the line of the caller.
"""

from exmy import kernels, step
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
from exmy.noise import Difference, compare, energy, sqnr
from exmy.packing import TILE, pack, packed_size, slice_bytes, unpack
from exmy.quantized import Quantized
from exmy.quantizer import quantize
from exmy.scales import FLOAT_SCALES, GroupScales
from exmy.survey import Candidate, survey
from exmy.tensor_fit import TensorFit

__all__ = [
    "BLOCKS",
    "FLOAT_SCALES",
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
    "GroupScales",
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
    "energy",
    "exponents",
    "formats",
    "kernels",
    "pack",
    "packed_size",
    "quantize",
    "round",
    "slice_bytes",
    "sqnr",
    "step",
    "survey",
    "unpack",
]
