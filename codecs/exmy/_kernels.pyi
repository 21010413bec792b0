from exmy.elements import Array

def supports(level: int, /) -> bool: ...
def encode(
    level: int,
    kind: int,
    exponent_bits: int,
    mantissa_bits: int,
    bias: int,
    packed: bool,
    saturate: bool,
    src: Array,
    out: Array,
    /,
) -> tuple[int, int]: ...
def decode(
    level: int,
    kind: int,
    exponent_bits: int,
    mantissa_bits: int,
    bias: int,
    packed: bool,
    codes: Array,
    out: Array,
    /,
) -> None: ...
def round(
    level: int,
    kind: int,
    exponent_bits: int,
    mantissa_bits: int,
    bias: int,
    saturate: bool,
    src: Array,
    out: Array,
    /,
) -> tuple[int, int]: ...
def pack(level: int, bits: int, count: int, codes: Array, out: Array, /) -> None: ...
def unpack(level: int, bits: int, count: int, packed: Array, out: Array, /) -> None: ...
def split_planes(level: int, bits: int, count: int, packed: Array, upper: Array, lower: Array, /) -> None: ...
def join_planes(level: int, bits: int, count: int, upper: Array, lower: Array, packed: Array, /) -> None: ...
def peak(level: int, kind: int, src: Array, /) -> tuple[float, int, int]: ...
def squared_errors(
    level: int,
    kind: int,
    exponent_bits: int,
    mantissa_bits: int,
    bias: int,
    wide: bool,
    src: Array,
    out: Array,
    /,
) -> None: ...
def energy(level: int, kind: int, src: Array, /) -> float: ...
def least(
    level: int,
    kind: int,
    exponent_bits: int,
    mantissa_bits: int,
    bias: int,
    wide: bool,
    rising: bool,
    length: int,
    scales: Array,
    factors: Array,
    tries: Array,
    src: Array,
    best: Array,
    least: Array,
    /,
) -> None: ...
def columns(itemsize: int, rows: int, stride: int, first: int, width: int, src: Array, out: Array, /) -> None: ...
def encode_groups(
    level: int,
    kind: int,
    exponent_bits: int,
    mantissa_bits: int,
    bias: int,
    wide: bool,
    length: int,
    inner: int,
    first: int,
    scales: Array,
    src: Array,
    out: Array,
    one_zero: bool,
    /,
) -> bool: ...
def decode_groups(
    level: int,
    kind: int,
    exponent_bits: int,
    mantissa_bits: int,
    bias: int,
    wide: bool,
    length: int,
    inner: int,
    first: int,
    scales: Array,
    packed: Array,
    out: Array,
    in_planes: bool,
    /,
) -> None: ...
def peaks(level: int, kind: int, length: int, src: Array, out: Array, /) -> None: ...
def noise(
    level: int,
    kind: int,
    exponent_bits: int,
    mantissa_bits: int,
    bias: int,
    wide: bool,
    length: int,
    scales: Array,
    factors: Array,
    src: Array,
    out: Array,
    /,
) -> None: ...
def stochastic(
    level: int,
    kind: int,
    exponent_bits: int,
    mantissa_bits: int,
    bias: int,
    seed: int,
    first: int,
    target: int,
    saturate: bool,
    src: Array,
    out: Array,
    /,
) -> tuple[int, int]: ...
def stochastic_groups(
    level: int,
    kind: int,
    exponent_bits: int,
    mantissa_bits: int,
    bias: int,
    wide: bool,
    length: int,
    inner: int,
    first: int,
    seed: int,
    scales: Array,
    src: Array,
    out: Array,
    /,
) -> None: ...
def exponents(level: int, kind: int, src: Array, out: Array, /) -> None: ...
def compare(level: int, kind: int, x: Array, y: Array, /) -> tuple[float, float, float, float]: ...
def measure(
    level: int,
    kind: int,
    exponent_bits: int,
    mantissa_bits: int,
    bias: int,
    wide: bool,
    length: int,
    inner: int,
    limit: float,
    scales: Array | None,
    packed: Array,
    src: Array,
    /,
) -> tuple[float, float, float, float, int]: ...
def step_encode(
    level: int, width: int, bits: int, mantissa_bits: int, old: Array, new: Array, out: Array, /
) -> int: ...
def step_decode(
    level: int, width: int, bits: int, mantissa_bits: int, old: Array, data: Array, out: Array, /
) -> bool: ...
