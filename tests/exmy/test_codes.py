"""Encoding and decoding: the reference against brute force, the kernels against the reference, edge cases."""

import ctypes
import ctypes.util
import platform
import threading
from fractions import Fraction

import exmy
import ml_dtypes
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

DTYPES = ["float16", "bfloat16", "float32", "float64"]


def same(a, b):
    """Assert that two arrays are equal in dtype, shape and every bit."""
    assert (a.dtype, a.shape) == (b.dtype, b.shape)
    np.testing.assert_array_equal(
        np.ascontiguousarray(a).reshape(-1).view(np.uint8), np.ascontiguousarray(b).reshape(-1).view(np.uint8)
    )


def reference(call):
    with exmy.kernels.use("reference"):
        return call()


def hard(f, dtype, seed=0):
    """Return edge cases of a format: its values, the ties, their neighbours, the limits of the dtype, noise."""
    rng = np.random.default_rng(seed)
    own = f.values()[: 2 ** (f.bits - 1)]
    if own.size > 600:
        own = own[np.sort(rng.choice(own.size, 600, replace=False))]
    own = np.append(own, [f.max, f.max + f.max / 2 ** (f.mantissa_bits + 2), f.max * 1.5, f.max * 2])
    ties = np.append((own[:-1] + own[1:]) / 2, f.smallest_subnormal / 2)
    info = ml_dtypes.finfo(dtype)
    limits = [info.max, info.smallest_normal, info.smallest_subnormal, 0]
    noise = np.exp2(rng.uniform(-150, 128, 400)) * rng.uniform(1, 2, 400)
    near = np.exp2(rng.uniform(1 - f.bias - f.mantissa_bits - 3, np.log2(f.max) + 1, 400))
    with np.errstate(over="ignore", under="ignore"):
        x = np.concatenate([own, ties, noise, near]).astype(dtype)
        x = np.concatenate([x, np.array(limits).astype(dtype)])
        x = np.concatenate([x, np.nextafter(x, dtype.type(np.inf)), np.nextafter(x, dtype.type(0))])
    x = x[np.isfinite(x)]
    return np.concatenate([x, -x])


@pytest.mark.parametrize("name", ["e0m2", "e1m1", "e2m0", "e2m1", "e3m2", "e4m3", "e5m2b20", "e3m4b-3"])
def test_the_nearest_value_is_taken_ties_to_even(name):
    f = exmy.Format(name)
    own = [exact(v) for v in f.values()[: 2 ** (f.bits - 1)].tolist()]
    x = hard(f, np.dtype(np.float32))
    x = np.concatenate([x[: 2**f.bits], x[::23]])  # the values and the ties between them come first
    expected = []
    for value in x.tolist():
        size = exact(abs(value))
        distance = [abs(size - v) for v in own]
        least = min(distance)
        nearest = [c for c, d in enumerate(distance) if d == least]
        even = [c for c in nearest if c % 2 == 0]
        if f.mantissa_bits == 0 and nearest[0] > 0:  # no normal value is even: the larger, as IEEE 754 says
            even = nearest[-1:]
        sign = 2 ** (f.bits - 1) if np.signbit(value) else 0
        expected.append((nearest[0] if len(nearest) == 1 else even[0]) + sign)
    for level in exmy.kernels.levels():
        with exmy.kernels.use(level):
            codes = exmy.encode(x, f)
        assert codes.tolist() == expected, level


def exact(value):
    """Return a float32 or a value of a format as an integer multiple of 2^-200."""
    scaled = Fraction(value) * 2**200
    assert scaled.denominator == 1
    return scaled.numerator


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_all_16_bit_inputs_in_all_formats(dtype, all_formats):
    native = [name for name in exmy.kernels.levels() if name != "reference"]
    x = np.arange(1 << 16, dtype=np.uint16).view(exmy.elements.output_dtype(dtype))
    for f in all_formats:
        for g in (f, f.with_bias(f.bias + 9)):
            codes = reference(lambda g=g: exmy.encode(x, g, nonfinite="saturate"))
            for name in native:
                with exmy.kernels.use(name):
                    same(exmy.encode(x, g, nonfinite="saturate"), codes)
                    packed = exmy.encode_packed(x, g, nonfinite="saturate")
                    same(exmy.unpack(packed, g.bits, x.size), codes)


def test_all_codes_of_all_formats_to_all_dtypes(all_formats):
    native = [name for name in exmy.kernels.levels() if name != "reference"]
    for f in all_formats:
        codes = np.arange(1 << f.bits, dtype=np.uint8 if f.bits <= 8 else np.uint16)
        for bias in (f.bias, f.bias + 9, -120, 140, 512, -512):
            g = f.with_bias(bias)
            for dtype in DTYPES:
                values = reference(lambda c=codes, g=g, d=dtype: exmy.decode(c, g, d))
                for name in native:
                    with exmy.kernels.use(name):
                        same(exmy.decode(codes, g, dtype), values)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_hard_inputs_in_all_formats(dtype, all_formats):
    native = [name for name in exmy.kernels.levels() if name != "reference"]
    for i, f in enumerate(all_formats):
        for bias in (f.bias, f.bias + 11, 127, 128, -60, 404, 512, -512):
            g = f.with_bias(bias)
            x = hard(g, np.dtype(dtype), seed=i)
            packed = reference(lambda g=g, x=x: exmy.encode_packed(x, g))
            rounded = reference(lambda g=g, x=x: exmy.round(x, g))
            for name in native:
                with exmy.kernels.use(name):
                    same(exmy.encode_packed(x, g), packed)
                    same(exmy.round(x, g), rounded)


def test_values_survive(level, all_formats):
    for f in all_formats:
        codes = np.arange(1 << f.bits, dtype=np.uint8 if f.bits <= 8 else np.uint16)
        values = exmy.decode(codes, f, "float64")
        same(values, f.values())
        same(exmy.encode(values, f), codes)


@pytest.mark.parametrize("name", ["float4_e2m1fn", "float6_e2m3fn", "float6_e3m2fn"])
def test_ml_dtypes_agrees(level, name):
    f = exmy.Format(name.split("_")[1].removesuffix("fn"))
    theirs = np.dtype(getattr(ml_dtypes, name))
    codes = np.arange(1 << f.bits, dtype=np.uint8)
    same(exmy.decode(codes, f), codes.view(theirs).astype(np.float32))
    every_half = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    every_half = every_half[np.isfinite(every_half)]
    for x in (every_half, hard(f, np.dtype(np.float32))):
        same(exmy.encode(x, f), x.astype(theirs).view(np.uint8))


def test_golden():
    e4m3 = exmy.Format("e4m3")
    x = np.array([0.0, -0.0, 2.0**-9, 2.0**-10, 3 * 2.0**-10, 1.0, -1.0, 1.0625, 1.1875, 480.0, 1e9], np.float32)
    assert exmy.encode(x, e4m3).tobytes().hex() == "0080010002" + "38b8383a" + "7f7f"
    assert exmy.decode(np.array([0x01, 0x38, 0x7F, 0xFF], np.uint8), e4m3).tolist() == [
        2.0**-9,
        1.0,
        480.0,
        -480.0,
    ]
    assert exmy.encode_packed(np.array([1.0, -2.0, 0.5], np.float32), "e2m1").tobytes().hex() == "020c0100"
    assert exmy.decode_packed(bytes.fromhex("020c0100"), "e2m1", 3).tolist() == [1.0, -2.0, 0.5]
    for name, code, value in [
        ("e4m3b11", 0x7F, 30.0),
        ("e2m1", 7, 6.0),
        ("e3m2", 0x1F, 28.0),
        ("e2m3", 0x1F, 7.5),
        ("e0m3", 0xF, -7 / 8),
        ("e1m2", 7, 3.5),
    ]:
        assert exmy.decode(np.uint8(code), name) == value


def test_float64_is_rounded_once(level):
    x = np.array([1 + 2.0**-4 + 2.0**-40, 1 + 2.0**-4, 1 + 3 * 2.0**-4 - 2.0**-40])
    assert exmy.round(x, "e4m3").tolist() == [1.125, 1.0, 1.125]
    assert exmy.round(x.astype(np.float32), "e4m3").tolist() == [1.0, 1.0, 1.25]


def test_overflow_of_the_output_dtype_is_infinity(level):
    assert exmy.decode(np.uint16(0x7FFF), "e5m10", "float16") == np.inf
    assert exmy.decode(np.uint16(0x7BFF), "e5m10", "float16") == 65504
    assert exmy.decode(np.uint16(0xFFFF), "e8m7") == -np.inf
    assert exmy.decode(np.uint16(0xFFFF), "e8m7", "bfloat16") == -np.inf
    assert exmy.decode(np.uint16(0x7FFF), "e8m7", "float64") == 2.0**128 * (2 - 2.0**-7)
    assert exmy.decode(np.uint8(1), "e0m7b200", "float32") == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["e4m3", "e3m2", "e8m7", "e2m2b300"])
def test_lengths_and_misalignment(level, dtype, name):
    f, dtype = exmy.Format(name), exmy.elements.output_dtype(dtype)
    for count in (0, 1, 7, 8, 9, 255, 256, 257, 2047, 2048, 2049, 5000):
        values = np.random.default_rng(count).standard_normal(count).astype(np.float32).astype(dtype)
        packed = exmy.encode_packed(values, f)
        assert packed.nbytes == exmy.packed_size(count, f.bits) == -(-count // 8) * f.bits
        decoded = exmy.decode_packed(packed, f, count, dtype)
        same(decoded, exmy.round(values, f))
        same(decoded, exmy.decode(exmy.encode(values, f), f, dtype))
        for shift in (1, 3):
            memory = np.zeros(values.nbytes + shift, np.uint8)
            crooked = memory[shift:].view(dtype)
            crooked[...] = values
            room = np.full(packed.nbytes + shift + 5, 0xAA, np.uint8)
            same(exmy.encode_packed(crooked, f, out=room[shift : shift + packed.nbytes]), packed)
            assert (room[:shift] == 0xAA).all()
            assert (room[shift + packed.nbytes :] == 0xAA).all()
            crooked[...] = 0
            guarded = np.full(values.nbytes + shift + 5, 0xAA, np.uint8)
            target = guarded[shift : shift + values.nbytes].view(dtype)
            exmy.decode_packed(room[shift : shift + packed.nbytes], f, count, out=target)
            same(target.copy(), decoded)
            assert (guarded[:shift] == 0xAA).all()
            assert (guarded[shift + values.nbytes :] == 0xAA).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_many_codes_of_few_bits_to_16_bits(native, dtype, all_formats):
    for f in all_formats[:35]:  # up to 8 bits
        for bias in (f.bias, -120, 140):
            g, each, times = f.with_bias(bias), np.arange(1 << f.bits, dtype=np.uint8), 3000 // (1 << f.bits) + 1
            once = reference(lambda c=each, g=g: exmy.decode(c, g, dtype))
            same(exmy.decode(np.tile(each, times), g, dtype), np.tile(once, times))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [0, 1, 4, 16])
def test_large_outputs_that_pass_the_caches(native, dtype, offset):
    dtype = exmy.elements.output_dtype(dtype)
    count = (5 << 20) // dtype.itemsize + 3
    packed = np.random.default_rng(0).integers(0, 256, exmy.packed_size(count, 6), np.uint8)
    memory = np.full(count * dtype.itemsize + offset + 8, 0xAA, np.uint8)
    target = memory[offset : offset + count * dtype.itemsize].view(dtype)
    exmy.decode_packed(packed, "e3m2", count, out=target)
    same(target.copy(), exmy.decode(exmy.unpack(packed, 6, count), "e3m2", "float64").astype(dtype))
    assert (memory[:offset] == 0xAA).all()
    assert (memory[-8:] == 0xAA).all()


def test_strides_shapes_and_byte_order(level):
    f = exmy.Format("e4m3")
    x = np.random.default_rng(0).standard_normal((40, 50)).astype(np.float32)
    for view in (x.T, x[::3, ::-2], x[:, 7], np.asfortranarray(x), x.astype(">f4"), x[None, :, None]):
        same(exmy.encode(view, f), exmy.encode(np.array(view, np.float32, order="C"), f))
        same(exmy.round(view, f), exmy.decode(exmy.encode(view, f), f))
    frozen = x.copy()
    frozen.flags.writeable = False
    same(exmy.encode(frozen, f), exmy.encode(x, f))
    codes = exmy.encode(x, f)
    same(exmy.decode(codes.T, f), exmy.decode(codes, f).T.copy())
    assert exmy.encode(np.float32(1.5), f).shape == ()
    assert exmy.decode(exmy.encode(np.float32(1.5), f), f) == 1.5
    assert exmy.round(np.zeros((0, 3), np.float16), f).shape == (0, 3)
    assert exmy.encode(1.5, "e4m3") == exmy.encode(np.float64(1.5), f)


def test_outputs_of_the_caller(level):
    x = np.linspace(-2, 2, 96, dtype=np.float32).reshape(8, 12)
    packed = exmy.encode_packed(x, "e3m2")
    assert packed.shape == (72,)
    out = np.empty((8, 12), np.float16)
    assert exmy.decode_packed(packed, "e3m2", 96, out=out) is out
    same(out, exmy.round(x, "e3m2").astype(np.float16))
    memory = bytearray(72)
    exmy.encode_packed(x, "e3m2", out=memory)
    assert bytes(memory) == packed.tobytes()
    floats = bytearray(96 * 4)
    exmy.decode_packed(memoryview(memory), "e3m2", 96, out=floats)
    assert bytes(floats) == exmy.round(x, "e3m2").tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("call", [exmy.encode, exmy.encode_packed, exmy.round])
def test_nonfinite(level, dtype, call):
    dtype = exmy.elements.output_dtype(dtype)
    x = np.ones((300, 11), dtype)
    x[250, 3], x[250, 4], x[299, 10], x[251, 0] = np.nan, np.inf, -np.inf, -np.nan
    with pytest.raises(
        exmy.NonFiniteError, match=r"4 of 3300 .* first at \[250, 3\].*nonfinite='saturate'"
    ) as caught:
        call(x, "e4m3")
    assert (caught.value.count, caught.value.index) == (4, (250, 3))
    assert isinstance(caught.value, ValueError)
    codes = exmy.encode(x, "e4m3", nonfinite="saturate")
    assert (codes[250, 3], codes[250, 4], codes[299, 10], codes[251, 0], codes[0, 0]) == (
        0,
        0x7F,
        0xFF,
        0,
        0x38,
    )
    same(exmy.encode_packed(x, "e4m3", nonfinite="saturate"), exmy.pack(codes, 8))
    assert exmy.round(x, "e4m3", nonfinite="saturate")[299, 10] == -480
    wide = exmy.encode(x, "e8m7", nonfinite="saturate")
    assert (wide[250, 3], wide[250, 4], wide[299, 10]) == (0, 0x7FFF, 0xFFFF)
    with pytest.raises(exmy.NonFiniteError, match="1 of 1 values are NaN or infinite, which"):
        call(x[250, 3], "e4m3")


@pytest.mark.parametrize("x", [np.ones(3, np.int32), np.ones(3, np.complex64), np.array([None]), np.array(["a"])])
def test_dtypes_that_are_refused(x):
    with pytest.raises(exmy.DtypeError, match="expected float16, bfloat16, float32 or float64"):
        exmy.encode(x, "e4m3")
    with pytest.raises(exmy.DtypeError, match="expected float16, bfloat16, float32 or float64"):
        exmy.decode(np.zeros(1, np.uint8), "e4m3", x.dtype)


def test_wrong_arguments():
    x = np.ones(256, np.float32)
    with pytest.raises(exmy.CodeError, match="code 64 does not fit 6 bits"):
        exmy.decode(np.array([64], np.uint8), "e3m2")
    with pytest.raises(exmy.CodeError, match="code -1 does not fit"):
        exmy.decode(np.array([-1]), "e3m2")
    with pytest.raises(exmy.DtypeError, match="codes have dtype 'float32'"):
        exmy.decode(x, "e3m2")
    with pytest.raises(exmy.SizeError, match="truncated: 191 bytes, expected 192"):
        exmy.decode_packed(bytes(191), "e3m2", 256)
    with pytest.raises(exmy.SizeError, match="too long: 193 bytes"):
        exmy.decode_packed(bytes(193), "e3m2", 256)
    with pytest.raises(exmy.SizeError, match="count is -1"):
        exmy.decode_packed(b"", "e3m2", -1)
    with pytest.raises(exmy.DtypeError, match="expected uint8 or a bytes object"):
        exmy.decode_packed(np.zeros(48, np.float32), "e3m2", 256)
    with pytest.raises(exmy.DtypeError, match="expected uint8 or a bytes object"):
        exmy.decode_packed(3.5, "e3m2", 256)
    with pytest.raises(exmy.SizeError, match="out has 100 bytes; expected 192"):
        exmy.encode_packed(x, "e3m2", out=np.empty(100, np.uint8))
    with pytest.raises(exmy.DtypeError, match="out has dtype"):
        exmy.encode_packed(x, "e3m2", out=np.empty(192, np.int8))
    with pytest.raises(exmy.SizeError, match="read-only"):
        exmy.encode_packed(x, "e3m2", out=bytes(192))
    with pytest.raises(exmy.SizeError, match="not C-contiguous"):
        exmy.encode_packed(x, "e3m2", out=np.empty(384, np.uint8)[::2])
    with pytest.raises(exmy.DtypeError, match="expected an array or a writable buffer"):
        exmy.encode_packed(x, "e3m2", out=3)
    with pytest.raises(exmy.SizeError, match="out has 255 elements; expected 256"):
        exmy.decode_packed(bytes(192), "e3m2", 256, out=np.empty(255, np.float32))
    with pytest.raises(exmy.DtypeError, match="out has dtype"):
        exmy.decode_packed(bytes(192), "e3m2", 256, "float64", out=np.empty(256, np.float32))
    with pytest.raises(exmy.SizeError, match="a multiple of"):
        exmy.decode_packed(bytes(192), "e3m2", 256, out=bytearray(3))
    with pytest.raises(exmy.FormatError, match="expected 'error' or 'saturate'"):
        exmy.encode(x, "e3m2", nonfinite="ignore")


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the kernels set the floating-point mode on x86-64")
def test_the_rounding_mode_of_the_thread_does_not_matter(native):
    libm = ctypes.CDLL(ctypes.util.find_library("m"))
    x = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    expected = exmy.encode(x, "e4m3")
    upward = 0x800
    assert libm.fesetround(upward) == 0
    try:
        codes = exmy.encode(x, "e4m3")
        kept = libm.fegetround()
    finally:
        libm.fesetround(0)
    assert kept == upward
    same(codes, expected)


def test_threads(level):
    x = np.random.default_rng(0).standard_normal(200_000).astype(np.float32)
    expected = exmy.encode_packed(x, "e3m2")
    results = [np.zeros_like(expected) for _ in range(4)]
    threads = [
        threading.Thread(target=exmy.encode_packed, args=(x, "e3m2"), kwargs={"out": out}) for out in results
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for out in results:
        same(out, expected)


@given(
    st.integers(0, 8),
    st.integers(0, 15),
    st.integers(-300, 300),
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=40),
)
def test_any_format_on_any_floats(x, y, bias, values):
    bits = 1 + x + y
    assume(2 <= bits <= 16)
    f = exmy.Format(f"e{x}m{y}b{bias}")
    array = np.array(values, np.float32)
    codes = reference(lambda: exmy.encode(array, f))
    decoded = exmy.decode(codes, f, "float64")
    same(exmy.encode(decoded, f), codes)  # rounding twice is rounding once
    for name in exmy.kernels.levels():
        with exmy.kernels.use(name):
            same(exmy.encode(array, f), codes)
            same(exmy.decode_packed(exmy.encode_packed(array, f), f, array.size, "float64"), decoded)
