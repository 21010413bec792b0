"""Steps: every bit comes back, from the bytes of any level; golden bytes; hostile bytes; sizes."""

from __future__ import annotations

import contextlib

import exmy
import ml_dtypes
import numpy as np
import pytest
from exmy import step
from exmy.errors import CodeError, DtypeError, FormatError, SizeError
from hypothesis import given, settings
from hypothesis import strategies as st

DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2]
SPECIAL = [0.0, -0.0, np.inf, -np.inf, np.nan, -np.nan, 1.0, -1.0, 1e-40, 6e-8, -6e-8]


def words(x: np.ndarray) -> np.ndarray:
    return x.view(f"u{x.dtype.itemsize}")


def pair(dtype: type, count: int, changed: float, size: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return weights with every special value, and a later version: a share has moved by up to `size` ulps."""
    rng = np.random.default_rng(seed)
    old = (rng.standard_normal(count) * 0.02).astype(dtype)
    old[: len(SPECIAL)] = np.array(SPECIAL, np.float32).astype(dtype)[:count]
    moves = rng.integers(-size, size + 1, count) * (rng.random(count) < changed)
    new = words(words(old) + moves.astype(words(old).dtype)).view(dtype)
    return old, new


def assert_same_bits(data: object, old: np.ndarray, new: np.ndarray, f: str | None = None) -> None:
    result = step.decode(data, old, f)
    assert result.dtype == new.dtype
    np.testing.assert_array_equal(words(result), words(new))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("count", "changed", "size", "kind"),
    [
        (5000, 0, 1, 1),
        (5000, 0.001, 3, 3),
        (70001, 0.08, 1, 3),
        (9001, 0.6, 2, 2),
        (140_001, 1, 1, 2),
        (40, 1, 90, 0),
    ],
)
def test_every_bit_comes_back(native, dtype, count, changed, size, kind):
    old, new = pair(dtype, count, changed, size, count)
    data = step.encode(new, old)
    assert data[0] == kind
    assert data.size <= new.nbytes + 1
    assert_same_bits(data, old, new)
    with exmy.kernels.use("reference" if count < 6000 else "baseline"):
        assert_same_bits(data, old, new)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_reference_writes_what_every_level_reads(dtype):
    for count, changed, size in [(3, 1, 1), (700, 0.3, 1), (5003, 1, 2)]:
        old, new = pair(dtype, count, changed, size, count)
        with exmy.kernels.use("reference"):
            data = step.encode(new, old)
        for level in exmy.kernels.levels():
            with exmy.kernels.use(level):
                assert_same_bits(data, old, new)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_any_bits_come_back(data):
    dtype = data.draw(st.sampled_from(DTYPES))
    count = data.draw(st.sampled_from([0, 1, 2, 63, 64, 65, 127, 500, 1023, 4095, 4096, 4097, 16385]))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    limit = 1 << 8 * np.dtype(dtype).itemsize
    old = rng.integers(0, limit, count).astype(f"u{np.dtype(dtype).itemsize}")
    new = old.copy()
    at = rng.random(count) < data.draw(st.sampled_from([0.001, 0.02, 0.12, 0.5, 1]))
    new[at] = old[at] + rng.integers(0, data.draw(st.sampled_from([2, 9, limit])), count).astype(old.dtype)[at]
    if data.draw(st.booleans()):
        new[rng.random(count) < 0.01] ^= old.dtype.type(limit >> 1)  # signs
    encoded = step.encode(new.view(dtype), old.view(dtype))
    assert encoded.size <= new.nbytes + 1
    assert_same_bits(encoded, old.view(dtype), new.view(dtype))


@pytest.mark.parametrize("f", ["e0m2", "e2m1", "e4m3", "e5m2", "e8m0", "e3m5", "e8m7", "e0m15"])
def test_codes_of_any_format(native, f):
    form = exmy.Format(f)
    rng = np.random.default_rng(form.bits)
    old = rng.integers(0, 1 << form.bits, (90, 100)).astype(np.uint8 if form.bits <= 8 else np.uint16)
    new = np.where(rng.random(old.shape) < 0.05, old ^ 1, old)
    new[0] = old[0] ^ (1 << (form.bits - 1))  # other signs; those of zeros differ most
    data = step.encode(new, old, f)
    assert data.size < old.nbytes
    assert_same_bits(data, old, new, f)
    if form.bits not in (8, 16):
        with pytest.raises(CodeError, match="more than"):
            step.encode(new | old.dtype.type(1 << form.bits), old, f)


def test_golden_bytes(level):
    """The examples of FORMAT.md, section 10."""
    old = np.array([1.0, -2.0, 0.5, 0.0] * 6, np.float16)
    new = words(old).copy()
    new[[0, 3, 5, 9]] = new[0] + 1, 0x8000, new[5] - 3, new[9] + 2
    assert_same_bits(bytes.fromhex("0208040e0f10016001400058020017030000004550c0deb4"), old, new.view(np.float16))
    old32 = (np.arange(1024) % 7).astype(np.float32)
    new32 = words(old32).copy()
    new32[[100, 700, 701]] = new32[100] + 1, 0xFFFFFFFB, new32[701] + 1
    sparse = bytes.fromhex(
        "03010300000008010900000017c00503000000b250a08c0508015f000000000000000000000000000000700105000000b05040feffff3f"
    )
    assert_same_bits(sparse, old32, new32.view(np.float32))
    assert step.encode(old, old).tobytes() == b"\1"
    assert step.encode(old[:1], old[1:2]).tobytes().hex() == "00003c"


def test_hostile_bytes_are_refused_or_decode_to_something(native):
    rng = np.random.default_rng(0)
    for dtype, count, changed in [(ml_dtypes.bfloat16, 5000, 1), (np.float32, 5000, 0.05), (np.float16, 900, 0.1)]:
        old, new = pair(dtype, count, changed, 1, 1)
        data = step.encode(new, old)
        for _ in range(1500):
            bad = data.copy()
            head = rng.random() < 0.7
            for _ in range(rng.integers(1, 4)):
                bad[rng.integers(0, min(150, bad.size) if head else bad.size)] = rng.integers(0, 256)
            bad = bad[: rng.integers(0, bad.size)] if rng.random() < 0.2 else bad
            with contextlib.suppress(FormatError):
                step.decode(bad, old)
        with pytest.raises(FormatError):
            step.decode(np.append(data, np.uint8(0)), old)


def test_steps_without_their_sequence_and_codes_of_too_many_bits_are_refused(level):
    for data in (b"", b"\2", b"\3", b"\4"):
        with pytest.raises(FormatError):
            step.decode(data, np.ones(3, np.float32))
    with pytest.raises(FormatError):
        step.decode(b"\0\1\7\10", np.uint8([1, 2, 3]), "e0m2")


def test_arguments_are_checked():
    x = np.zeros(3, np.float32)
    with pytest.raises(SizeError, match="one shape"):
        step.encode(x, x[:2])
    with pytest.raises(DtypeError, match="one dtype"):
        step.encode(x, x.astype(np.float16))
    with pytest.raises(DtypeError, match="has no steps"):
        step.encode(x.astype(np.int32), x.astype(np.int32))
    with pytest.raises(DtypeError, match="codes of e4m3"):
        step.encode(x, x, "e4m3")
    with pytest.raises(SizeError, match="writable"):
        step.decode(b"\1", x, out=np.zeros(2, np.float32))
    with pytest.raises(DtypeError, match="out is"):
        step.decode(b"\1", x, out=np.zeros(3, np.float16))
    out = x + 1
    assert step.decode(step.encode(out, x), x, out=x) is x  # in place
    np.testing.assert_array_equal(x, out)
