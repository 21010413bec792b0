"""Emulation in JAX: equality with `exmy.round`, jit, vmap, and straight-through derivatives."""

import contextlib
import subprocess
import sys

import exmy
import numpy as np
import pytest

from tests.support.emulation import (
    DTYPES,
    EDGES,
    FORMATS,
    assert_same_bits,
    bits_of,
    every_16_bit,
    hard_inputs,
    is_finite,
    stochastic,
)
from tests.support.lazy import lazy

jax = lazy("jax")
jnp = lazy("jax.numpy")
emulated = lazy("exmy.jax")


ALL = pytest.param(True, marks=pytest.mark.deep)
"""Every format; otherwise some of them, since each is compiled."""


def wide(dtype):
    return jax.enable_x64(True) if dtype == "float64" else contextlib.nullcontext()


@pytest.mark.parametrize("every", [False, ALL])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_all_16_bit_inputs(dtype, every):
    x = every_16_bit(dtype)
    finite = is_finite(x)
    for f in FORMATS if every else FORMATS[::4] if dtype == "float16" else FORMATS[1::4]:
        expected = exmy.round(x, f, nonfinite="saturate")
        assert_same_bits(np.asarray(emulated.round(x, f, nonfinite="saturate")), expected, f)
    for f in FORMATS if every else FORMATS[::9]:
        expected = exmy.round(x, f, nonfinite="saturate")
        kept = np.asarray(emulated.round(x, f))
        assert_same_bits(kept[finite], expected[finite], f)
        assert_same_bits(kept[~finite], x[~finite], f)


@pytest.mark.parametrize("every", [False, ALL])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_hard_inputs(dtype, every):
    with wide(dtype):
        for f in FORMATS if every else FORMATS[::2] if dtype == "float32" else FORMATS[::4]:
            x = hard_inputs(f, dtype)
            assert_same_bits(np.asarray(emulated.round(x, f)), exmy.round(x, f), f)


@pytest.mark.parametrize("every", [False, ALL])
@pytest.mark.parametrize("dtype", DTYPES)
def test_stochastic_rounding_is_as_defined(dtype, every):
    with wide(dtype):
        for f in FORMATS if every else FORMATS[1::4] if dtype == "float32" else FORMATS[1::8]:
            x = hard_inputs(f, dtype)
            for seed in (0, 1 << 32, 2**64 - 1):
                result = np.asarray(emulated.round(x, f, rounding="stochastic", seed=seed))
                assert_same_bits(result, stochastic(x, f, seed), (f, seed))


def test_the_last_bit_of_the_noise_decides():
    for seed, position, value, expected in EDGES:
        x = np.full(2000, value, np.float32)
        result = emulated.round(x, "e3m1", rounding="stochastic", seed=seed)
        assert result[position] == stochastic(x, exmy.Format("e3m1"), seed)[position] == expected


def test_nan_and_infinity():
    x = np.array([np.nan, -np.nan, np.inf, -np.inf, 1e30, -0.0], np.float32)
    bits_of(x)[0] |= 5  # a payload
    for rounding in ("nearest", "stochastic"):
        kept = np.asarray(emulated.round(x, "e4m3", rounding=rounding))
        assert_same_bits(kept, np.concatenate([x[:4], np.array([480, -0.0], np.float32)]))
        saturated = np.asarray(emulated.round(x, "e4m3", rounding=rounding, nonfinite="saturate"))
        assert_same_bits(saturated, np.array([0, 0, 480, -480, 480, -0.0], np.float32))


def test_shapes():
    x = np.random.default_rng(0).standard_normal((3, 5, 1, 7), np.float32)
    f = exmy.Format("e2m1")
    assert_same_bits(np.asarray(emulated.round(x, f)), exmy.round(x, f))
    result = emulated.round(x, f, rounding="stochastic", seed=9)
    assert_same_bits(np.asarray(result), stochastic(x, f, 9))
    assert emulated.round(jnp.float32(5.3), f, rounding="stochastic").shape == ()
    assert emulated.round(jnp.zeros((0, 3)), f, rounding="stochastic").shape == (0, 3)
    assert emulated.round(0.3, "e4m3") == 0.3125


def test_under_jit_and_vmap():
    x = np.random.default_rng(0).standard_normal((4, 50), np.float32)
    assert_same_bits(np.asarray(jax.jit(lambda x: emulated.round(2 * x, "e2m1"))(x)), exmy.round(2 * x, "e2m1"))
    assert_same_bits(np.asarray(jax.vmap(lambda r: emulated.round(r, "e2m1"), 1, 1)(x)), exmy.round(x, "e2m1"))

    def draw(row, seed):
        return emulated.round(row, "e2m1", rounding="stochastic", seed=seed)

    rows = np.stack([stochastic(row, exmy.Format("e2m1"), 7 + i) for i, row in enumerate(x)])
    assert_same_bits(np.asarray(jax.jit(jax.vmap(draw))(x, jnp.arange(7, 11))), rows)


def test_a_traced_seed_is_the_same_seed():
    x = jnp.asarray(np.random.default_rng(0).standard_normal(1000, np.float32))
    traces = []

    @jax.jit
    def draw(x, seed):
        traces.append(seed)
        return emulated.round(x, "e3m2", rounding="stochastic", seed=seed)

    drawn = [np.asarray(draw(x, jnp.int32(step))) for step in range(3)]
    assert len(traces) == 1
    for step, y in enumerate(drawn):
        assert_same_bits(y, np.asarray(emulated.round(x, "e3m2", rounding="stochastic", seed=step)))
    assert (drawn[0] != drawn[1]).any()
    last = np.asarray(draw(x, np.uint32(2**32 - 1)))
    assert_same_bits(last, stochastic(np.asarray(x), exmy.Format("e3m2"), 2**32 - 1))
    for seed in (np.array([2**63 + 5], np.uint64), np.uint64(2**63 + 5)):
        big = np.asarray(emulated.round(x, "e3m2", rounding="stochastic", seed=seed))
        assert_same_bits(big, stochastic(np.asarray(x), exmy.Format("e3m2"), 2**63 + 5))
    with jax.enable_x64(True):
        big = np.asarray(draw(x, np.array([2**63 + 5], np.uint64)))
    assert_same_bits(big, stochastic(np.asarray(x), exmy.Format("e3m2"), 2**63 + 5))


def test_derivatives_pass_straight_through():
    x = jnp.array([0.3, -7.0, 6.0, 6.1, jnp.nan, jnp.inf, 0.0])
    weight = jnp.arange(1.0, 8.0)

    def loss(x, **choices):
        return (emulated.round(x, "e2m1", **choices) * weight).sum()

    assert (jax.grad(loss)(x) == weight).all()
    clipped = jax.jit(jax.grad(lambda x: loss(x, gradient="clipped", rounding="stochastic")))(x)
    assert clipped.tolist() == [1, 0, 3, 0, 0, 0, 7]
    seeded = jax.grad(lambda x, seed: loss(x, rounding="stochastic", seed=seed))
    assert (seeded(x, jnp.int32(3)) == weight).all()
    _, tangent = jax.jvp(lambda x: emulated.round(x, "e2m1"), (x,), (weight,))
    assert (tangent == weight).all()
    hessian = jax.hessian(lambda x: (emulated.round(x, "e2m1") ** 2).sum())(x[:2])
    assert (hessian == 2 * jnp.eye(2)).all()
    half = jax.grad(lambda x: emulated.round(x, "e2m1", gradient="clipped").sum())(x.astype(jnp.bfloat16))
    assert half.dtype == jnp.bfloat16


def test_wrong_arguments():
    x = jnp.ones(3)
    with pytest.raises(exmy.DtypeError, match="expected float16, bfloat16, float32 or float64"):
        emulated.round(jnp.arange(3), "e4m3")
    with pytest.raises(exmy.FormatError, match="does not name a format"):
        emulated.round(x, "float8")
    for choice in ("nonfinite", "rounding", "gradient"):
        with pytest.raises(exmy.FormatError, match=f"{choice} is 'error'; expected '"):
            emulated.round(x, "e4m3", **{choice: "error"})
    for seed in (-1, 1 << 64, 1.0, True):
        with pytest.raises(exmy.FormatError, match=r"seed is .*; expected an integer from 0 to 2\^64 - 1"):
            emulated.round(x, "e4m3", seed=seed)
    for seed in (jnp.ones(1), jnp.arange(2)):
        with pytest.raises(exmy.DtypeError, match=r"seed is a .*; expected one integer"):
            emulated.round(x, "e4m3", seed=seed)
    many = jax.ShapeDtypeStruct(((1 << 32) + 1,), jnp.float16)
    assert jax.eval_shape(lambda x: emulated.round(x, "e4m3"), many).shape == many.shape
    with pytest.raises(exmy.SizeError, match=r"expected at most 2\^32"):
        jax.eval_shape(lambda x: emulated.round(x, "e4m3", rounding="stochastic"), many)


def test_exmy_alone_imports_neither_jax_nor_torch():
    code = "import exmy, sys; assert not {'jax', 'torch', 'ml_dtypes.jax'} & set(sys.modules)"
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)
