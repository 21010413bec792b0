"""Emulation in PyTorch: equality with `exmy.round`, straight-through gradients, vmap and torch.compile."""

import exmy
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

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

torch = lazy("torch")
emulated = lazy("exmy.torch")

INTEGERS = {2: "int16", 4: "int32", 8: "int64"}


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Use one thread: on a busy machine, two threads spend most time on small tensors waiting for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def tensor(array):
    """Return a tensor that shares memory with x; PyTorch does not accept NumPy's bfloat16."""
    return torch.from_numpy(array.view(f"i{array.itemsize}")).view(getattr(torch, array.dtype.name))


def rounded(array, f, **choices):
    result = emulated.round(tensor(array), f, **choices)
    return result.view(getattr(torch, INTEGERS[result.itemsize])).numpy().view(array.dtype)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_all_16_bit_inputs_in_all_formats(dtype, all_formats):
    x = every_16_bit(dtype)
    finite = is_finite(x)
    for f in all_formats + FORMATS:
        expected = exmy.round(x, f, nonfinite="saturate")
        assert_same_bits(rounded(x, f, nonfinite="saturate"), expected, f)
        kept = rounded(x, f)
        assert_same_bits(kept[finite], expected[finite], f)
        assert_same_bits(kept[~finite], x[~finite], f)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_hard_inputs_in_all_formats(dtype, all_formats):
    for f in all_formats + FORMATS:
        x = hard_inputs(f, dtype)
        assert_same_bits(rounded(x, f), exmy.round(x, f), f)


@given(
    st.integers(0, 8).flatmap(lambda x: st.tuples(st.just(x), st.integers(0 if x else 1, 15 - x))),
    st.integers(-512, 512),
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=40),
)
def test_any_format_on_any_floats(split, bias, values):
    f = exmy.Format(f"e{split[0]}m{split[1]}b{bias}")
    for x in (np.array(values, np.float32), np.array(values)):
        assert_same_bits(rounded(x, f), exmy.round(x, f), f)


@pytest.mark.parametrize("dtype", DTYPES)
def test_stochastic_rounding_is_as_defined(dtype):
    for f in FORMATS:
        x = hard_inputs(f, dtype)
        for seed in (0, 1, 1 << 32, 2**64 - 1):
            assert_same_bits(rounded(x, f, rounding="stochastic", seed=seed), stochastic(x, f, seed), (f, seed))


def test_seeds_as_tensors():
    x = np.random.default_rng(0).standard_normal((3, 50), np.float32)
    f = exmy.Format("e3m2")
    for seed, number in [
        (torch.tensor(7), 7),
        (torch.tensor([2**40 + 3]), 2**40 + 3),
        (torch.tensor(-1), 2**64 - 1),
        (torch.tensor(-1, dtype=torch.int32), 2**32 - 1),
        (torch.tensor(200, dtype=torch.uint8), 200),
        (torch.tensor(2**64 - 2, dtype=torch.uint64), 2**64 - 2),
    ]:
        assert_same_bits(rounded(x, f, rounding="stochastic", seed=seed), stochastic(x, f, number), seed)


def test_the_last_bit_of_the_noise_decides():
    for seed, position, value, expected in EDGES:
        x = np.full(2000, value, np.float32)
        result = rounded(x, "e3m1", rounding="stochastic", seed=seed)
        assert result[position] == stochastic(x, exmy.Format("e3m1"), seed)[position] == expected


def test_nan_and_infinity():
    x = np.array([np.nan, -np.nan, np.inf, -np.inf, 1e30, -0.0], np.float32)
    bits_of(x)[0] |= 5  # a payload
    for rounding in ("nearest", "stochastic"):
        expected = np.concatenate([x[:4], np.array([480, -0.0], np.float32)])
        assert_same_bits(rounded(x, "e4m3", rounding=rounding), expected)
        expected = np.array([0, 0, 480, -480, 480, -0.0], np.float32)
        assert_same_bits(rounded(x, "e4m3", rounding=rounding, nonfinite="saturate"), expected)


def test_shapes_and_strides():
    x = np.random.default_rng(0).standard_normal((6, 5, 7), np.float32)
    f = exmy.Format("e2m1")
    for cut in (
        lambda a: a.swapaxes(0, 2),
        lambda a: a[::2, :, 1::3],
        lambda a: a[:, 2],
        lambda a: a[0, 0, 0],
        lambda a: a[:0],
    ):
        view, expected = cut(torch.from_numpy(x)), np.ascontiguousarray(cut(x)).reshape(cut(x).shape)
        assert_same_bits(emulated.round(view, f).contiguous().numpy(), exmy.round(expected, f))
        drawn = emulated.round(view, f, rounding="stochastic", seed=3)
        assert_same_bits(drawn.contiguous().numpy(), stochastic(expected, f, 3))


def test_gradients_pass_straight_through():
    x = torch.tensor([0.3, -7.0, 6.0, 6.1, torch.nan, torch.inf, 0.0], requires_grad=True)
    weight = torch.arange(1.0, 8.0)
    for choices, expected in [
        ({}, [1, 2, 3, 4, 5, 6, 7]),
        ({"rounding": "stochastic", "seed": torch.tensor(3)}, [1, 2, 3, 4, 5, 6, 7]),
        ({"gradient": "clipped"}, [1, 0, 3, 0, 0, 0, 7]),
    ]:
        [gradient] = torch.autograd.grad((emulated.round(x, "e2m1", **choices) * weight).sum(), x)
        assert gradient.tolist() == expected
    y = emulated.round(x[:2], "e2m1")
    [first] = torch.autograd.grad((y**2).sum(), x, create_graph=True)
    [second] = torch.autograd.grad(first.sum(), x)
    assert second.tolist() == [2, 2, 0, 0, 0, 0, 0]
    half = x.detach().to(torch.bfloat16).requires_grad_()
    emulated.round(half, "e2m1", gradient="clipped").sum().backward()
    assert half.grad.dtype == torch.bfloat16


def test_under_vmap():
    x = torch.randn(4, 50, generator=torch.Generator().manual_seed(0)) * 4

    def loss(row, seed):
        return emulated.round(row, "e2m1", rounding="stochastic", seed=seed, gradient="clipped").sum()

    def draw(row, seed):
        return emulated.round(row, "e2m1", rounding="stochastic", seed=seed)

    seeds = torch.arange(7, 11)
    rows = [stochastic(row.numpy(), exmy.Format("e2m1"), 7 + i) for i, row in enumerate(x)]
    assert_same_bits(torch.vmap(draw)(x, seeds).numpy(), np.stack(rows))
    gradients = torch.vmap(torch.func.grad(loss))(x, seeds)
    assert torch.equal(gradients, (x.abs() <= 6).float())
    assert 0 < gradients.mean() < 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # its tracer steps on its own deprecations
def test_under_compile():
    x = torch.randn(300, requires_grad=True)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def draw(x, seed):
        return emulated.round(x, "e3m2b5", rounding="stochastic", seed=seed, gradient="clipped")

    for seed in (1, 2):
        y = draw(x, torch.tensor(seed))
        assert_same_bits(y.detach().numpy(), stochastic(x.detach().numpy(), exmy.Format("e3m2b5"), seed))
    y.sum().backward()
    assert torch.equal(x.grad, (x.abs() <= exmy.Format("e3m2b5").max).float())


def test_wrong_arguments():
    x = torch.ones(3)
    for wrong in (torch.arange(3), np.ones(3, np.float32), torch.ones(3, dtype=torch.complex64)):
        with pytest.raises(exmy.DtypeError, match="expected a tensor of float16, bfloat16, float32 or float64"):
            emulated.round(wrong, "e4m3")
    for choice in ("nonfinite", "rounding", "gradient"):
        with pytest.raises(exmy.FormatError, match=f"{choice} is 'error'; expected '"):
            emulated.round(x, "e4m3", **{choice: "error"})
    for seed in (-1, 1 << 64, 1.0, True):
        with pytest.raises(exmy.FormatError, match=r"seed is .*; expected an integer from 0 to 2\^64 - 1"):
            emulated.round(x, "e4m3", seed=seed)
    for seed in (torch.ones(1), torch.tensor(True), torch.arange(2)):
        with pytest.raises(exmy.DtypeError, match=r"seed is a .*; expected one integer"):
            emulated.round(x, "e4m3", seed=seed)
    many = torch.zeros(1).expand((1 << 32) + 1)
    with pytest.raises(exmy.SizeError, match=r"expected at most 2\^32"):
        emulated.round(many, "e4m3", rounding="stochastic")
