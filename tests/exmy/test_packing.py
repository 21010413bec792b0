"""Packing: the layout of FORMAT.md element by element, slices, and invalid input."""

import exmy
import numpy as np
import pytest

COUNTS = [0, 1, 3, 8, 9, 64, 255, 256, 257, 511, 512, 1000, 2048, 2049, 4500]


def code_at(packed: bytes, bits: int, count: int, i: int) -> int:
    """Decode one element as in section 5 of FORMAT.md."""
    start, r = 32 * bits * (i // 256), i % 256
    length = min(256, (count - i // 256 * 256 + 7) // 8 * 8)
    code, shift, rest = 0, 0, bits
    for p in (8, 8, 4, 2, 1):
        if rest >= p:
            q = length * p // 8
            code += ((packed[start + r % q] >> (p * (r // q))) % 2**p) << shift
            shift, rest, start = shift + p, rest - p, start + q
    return code


def codes_of(bits: int, count: int) -> np.ndarray:
    rng = np.random.default_rng(bits * 10_000 + count)
    return rng.integers(0, 1 << bits, count).astype(np.uint8 if bits <= 8 else np.uint16)


@pytest.mark.parametrize("bits", range(2, 17))
def test_the_layout(level, bits):
    for count in COUNTS:
        codes = codes_of(bits, count)
        packed = exmy.pack(codes, bits)
        assert packed.dtype == np.uint8
        assert packed.shape == (exmy.packed_size(count, bits),)
        data = packed.tobytes()
        for i in {*range(0, count, 37), *range(max(0, count - 9), count)}:
            assert code_at(data, bits, count, i) == codes[i]
        unpacked = exmy.unpack(packed, bits, count)
        assert unpacked.dtype == codes.dtype
        np.testing.assert_array_equal(unpacked, codes)


@pytest.mark.parametrize("bits", range(2, 17))
def test_kernels_pack_as_the_reference(native, bits):
    for count in COUNTS:
        codes = codes_of(bits, count)
        with exmy.kernels.use("reference"):
            expected = exmy.pack(codes, bits)
        np.testing.assert_array_equal(exmy.pack(codes, bits), expected)


def test_golden(level):
    def packed(codes, bits):
        return exmy.pack(np.array(codes, np.uint16), bits).tobytes().hex()

    assert packed(range(8), 3) == "88ddf0"
    assert packed([0, 1, 2, 3, 0, 1, 2, 3], 2) == "88dd"
    assert packed(range(16), 4) == "8091a2b3c4d5e6f7"
    assert packed([0x21, 0x3F], 6) == "010f00000203"
    assert packed([0x1FF, 0x0AB], 9) == "ffab00000000000001"
    assert packed([0x1234], 16) == "3400000000000000" + "1200000000000000"
    assert packed([], 5) == ""
    # a whole tile of 2 bits: byte j has elements j, j+64, j+128, j+192
    assert packed([0] * 64 + [1] * 64 + [2] * 64 + [3] * 64, 2) == "e4" * 64
    # a whole tile and one more: the second tile is 8 long
    assert packed([1] * 257, 4) == "11" * 128 + "01000000"


@pytest.mark.parametrize("bits", [2, 3, 5, 6, 7, 8, 9, 13, 16])
def test_slices(level, bits):
    count = 1500
    codes = codes_of(bits, count)
    packed = exmy.pack(codes, bits)
    for start, stop in [(0, 256), (256, 1024), (512, 512), (1280, 1500), (0, 1500), (1500, 1500)]:
        first, end = exmy.slice_bytes(bits, start, stop, count)
        np.testing.assert_array_equal(exmy.unpack(packed[first:end], bits, stop - start), codes[start:stop])
    assert exmy.slice_bytes(6, 256, 512) == (192, 384)


def test_sizes_beyond_32_bits():
    assert exmy.packed_size(1 << 40, 6) == 6 << 37
    assert exmy.slice_bytes(13, 1 << 40, (1 << 40) + 256) == (13 << 37, (13 << 37) + 13 * 32)


def test_shapes_and_integers(level):
    codes = np.arange(60).reshape(3, 4, 5)
    np.testing.assert_array_equal(exmy.pack(codes, 6), exmy.pack(codes.reshape(-1).astype(np.uint8), 6))
    np.testing.assert_array_equal(exmy.pack(codes.T, 6), exmy.pack(codes.T.reshape(-1), 6))
    frozen = exmy.pack(codes, 6).tobytes()
    np.testing.assert_array_equal(exmy.unpack(frozen, 6, 60), codes.reshape(-1))


def test_wrong_arguments():
    for bits in (1, 17, 0, "8", 6.0):
        with pytest.raises(exmy.FormatError, match="2 to 16"):
            exmy.pack(np.zeros(8, np.uint8), bits)
        with pytest.raises(exmy.FormatError, match="2 to 16"):
            exmy.packed_size(8, bits)
    with pytest.raises(exmy.CodeError, match="code 4 does not fit 2 bits"):
        exmy.pack(np.array([1, 4], np.uint8), 2)
    with pytest.raises(exmy.CodeError, match="code 256 does not fit 8 bits"):
        exmy.pack(np.array([1, 256]), 8)
    with pytest.raises(exmy.SizeError, match="truncated"):
        exmy.unpack(bytes(5), 6, 8)
    with pytest.raises(exmy.SizeError, match="too long"):
        exmy.unpack(bytes(7), 6, 8)
    with pytest.raises(exmy.SizeError, match="widen it to 0:512"):
        exmy.slice_bytes(6, 3, 300)
    with pytest.raises(exmy.SizeError, match="pass count="):
        exmy.slice_bytes(6, 256, 300)
    with pytest.raises(exmy.SizeError, match="stop <= 300"):
        exmy.slice_bytes(6, 0, 512, 300)
    with pytest.raises(exmy.SizeError, match="0 <= start <= stop"):
        exmy.slice_bytes(6, 512, 256)
    with pytest.raises(exmy.SizeError, match="start is -256"):
        exmy.slice_bytes(6, -256, 256)
