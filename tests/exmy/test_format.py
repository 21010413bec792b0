"""Formats: names, limits, and values compared with the formula in exact fractions."""

import pickle
from fractions import Fraction

import exmy
import numpy as np
import pytest


def exact(f: exmy.Format, code: int) -> Fraction:
    x, y, bias = f.exponent_bits, f.mantissa_bits, f.bias
    m, e, s = code % 2**y, code // 2**y % 2**x, code // 2 ** (x + y)
    return (-1) ** s * Fraction(2) ** (max(e, 1) - bias) * ((e > 0) + Fraction(m, 2**y))


def test_every_format_exists_once(all_formats):
    expected = {f"e{x}m{y}" for x in range(9) for y in range(16) if 2 <= 1 + x + y <= 16}
    assert sorted(f.name for f in all_formats) == sorted(expected)
    assert [f.name for f in exmy.formats(7)] == ["e0m6", "e1m5", "e2m4", "e3m3", "e4m2", "e5m1", "e6m0"]
    assert len(exmy.formats(16)) == 9


@pytest.mark.parametrize("name", ["e0m3", "e1m1", "e2m1", "e3m2", "e4m3", "e5m2", "e8m0", "e4m3b11", "e3m0b-3"])
def test_values_follow_the_formula(name):
    f = exmy.Format(name)
    values = f.values()
    assert values.dtype == np.float64
    assert values.shape == (2**f.bits,)
    assert [Fraction(v) for v in values.tolist()] == [exact(f, code) for code in range(2**f.bits)]
    assert np.signbit(values).tolist() == [code >= 2 ** (f.bits - 1) for code in range(2**f.bits)]
    assert f.max == values.max()
    assert f.smallest_subnormal == values[values > 0].min()
    assert len(np.unique(values)) == 2**f.bits - 1


@pytest.mark.parametrize(
    ("name", "largest", "normal", "subnormal"),
    [
        ("e4m3", 480.0, 2.0**-6, 2.0**-9),
        ("e2m1", 6.0, 1.0, 0.5),
        ("e3m2", 28.0, 0.25, 2.0**-4),
        ("e2m3", 7.5, 1.0, 0.125),
        ("e5m10", 131008.0, 2.0**-14, 2.0**-24),
        ("e8m7", 2.0**128 * (2 - 2**-7), 2.0**-126, 2.0**-133),
        ("e0m7", 127 / 128, None, 1 / 128),
        ("e3m0", 16.0, 0.25, 0.25),
        ("e4m3b11", 30.0, 2.0**-10, 2.0**-13),
    ],
)
def test_limits(name, largest, normal, subnormal):
    f = exmy.Format(name)
    assert (f.max, f.smallest_normal, f.smallest_subnormal) == (largest, normal, subnormal)


@pytest.mark.parametrize(
    ("name", "bias", "canonical"),
    [
        ("e4m3", 7, "e4m3"),
        ("e4m3b7", 7, "e4m3"),
        ("e4m3b11", 11, "e4m3b11"),
        ("e4m3b-3", -3, "e4m3b-3"),
        ("e4m3b0", 0, "e4m3b0"),
        ("e0m7", 1, "e0m7"),
        ("e1m2", 0, "e1m2"),
        ("e8m7b512", 512, "e8m7b512"),
    ],
)
def test_names(name, bias, canonical):
    f = exmy.Format(name)
    assert (f.bias, f.name, str(f), repr(f)) == (bias, canonical, canonical, f"Format({canonical!r})")
    assert exmy.Format(f.name) == f
    assert hash(exmy.Format(f.name)) == hash(f)
    assert pickle.loads(pickle.dumps(f)) == f


def test_with_bias():
    assert exmy.Format("e4m3").with_bias(11) == exmy.Format("e4m3b11")
    assert exmy.Format("e4m3b11").with_bias(7) == exmy.Format("e4m3") != exmy.Format("e4m3b11")
    with pytest.raises(exmy.FormatError, match="-512 to 512"):
        exmy.Format("e4m3").with_bias(513)
    with pytest.raises(exmy.DtypeError, match="a bias is an int, not float"):
        exmy.Format("e4m3").with_bias(3.0)


def test_formats_do_not_change():
    f = exmy.Format("e4m3")
    with pytest.raises(AttributeError):
        f.bias = 3


@pytest.mark.parametrize(
    "name",
    [
        *[
            "",
            "e4",
            "m3",
            "E4M3",
            "e4m3 ",
            "e04m3",
            "e4m03",
            "e9m3",
            "e8m8",
            "e0m0",
            "e0m16",
            "e4m3b",
            "e4m3b-0",
        ],
        *["e4m3b+1", "e4m3b07", "e4m3b513", "e4m3b-513", "e4m3fn", "e4m-3", "e4m3b1\n", "e\u0664m3", "e" * 9999],
    ],
)
def test_wrong_names(name):
    with pytest.raises(exmy.FormatError, match="expected") as caught:
        exmy.Format(name)
    assert isinstance(caught.value, exmy.ExmyError)
    assert isinstance(caught.value, ValueError)
    assert len(str(caught.value)) < 300


def test_wrong_types():
    with pytest.raises(exmy.DtypeError, match="named by a str"):
        exmy.Format(43)
    for bits in (1, 17, 0, -3, 2.0, True, "8"):
        with pytest.raises(exmy.FormatError, match="from 2 to 16"):
            exmy.formats(bits)
