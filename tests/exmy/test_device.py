"""Quantization on devices: `exmy.jax` and `exmy.torch` equal `exmy.quantize`, and devices exchange codes."""

import dataclasses
import subprocess
import sys

import exmy
import ml_dtypes
import numpy as np
import pytest

from tests.support.lazy import lazy

jax = lazy("jax")
jnp = lazy("jax.numpy")
on_jax = lazy("exmy.jax")
torch = lazy("torch")
on_torch = lazy("exmy.torch")

ALL_FORMATS = [f for bits in range(2, 17) for f in exmy.formats(bits)]
DTYPES = [np.dtype("f2"), np.dtype(ml_dtypes.bfloat16), np.dtype("f4")]
SHAPES = [(), (0,), (7,), (300,), (2, 256), (5, 64), (64, 5), (3, 32, 4)]


def case(rng):
    """Return an array, a format, an axis and a block."""
    dtype, shape = DTYPES[rng.integers(3)], SHAPES[rng.integers(len(SHAPES))]
    axis = block = None
    if shape and rng.integers(2):
        axis = int(rng.integers(len(shape)))
        block = 16 if shape[axis] % 16 == 0 and shape[axis] and rng.integers(2) else None
    with np.errstate(over="ignore"):
        x = [
            lambda: rng.integers(0, 1 << 8 * dtype.itemsize, shape, f"u{dtype.itemsize}").view(dtype),  # any bits
            lambda: rng.standard_normal(shape).astype(dtype),
            lambda: (rng.standard_normal(shape) * np.exp2(rng.integers(-140, 120, shape))).astype(dtype),
            lambda: (rng.standard_normal(shape) * (rng.random(shape) < 0.3) * 1e-42).astype(dtype),  # subnormals
        ][rng.integers(4)]
        return np.asarray(x()), ALL_FORMATS[rng.integers(len(ALL_FORMATS))], axis, block


def tensor(array):
    """Return a tensor of a NumPy array of any of the dtypes; PyTorch does not accept NumPy's bfloat16."""
    return torch.from_numpy(array.view(f"i{array.itemsize}")).view(getattr(torch, array.dtype.name))


def check(x, f, axis, block, q, decoded):
    """Assert that codes from a device are those of `exmy.quantize`, and that they decode to the same bytes."""
    expected = exmy.quantize(x, f, axis, block, "max", nonfinite="saturate")
    what = (f, x.dtype, x.shape, axis, block)
    on_host = q.to_numpy()
    assert np.array_equal(on_host.offsets, expected.offsets), what
    assert on_host.to_bytes() == expected.to_bytes(), what
    assert decoded.tobytes() == expected.dequantize(x.dtype).tobytes(), what


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.deep) for seed in range(1, 10))])
def test_jax_has_the_codes_of_numpy(seed):
    rng = np.random.default_rng(seed)
    for _ in range(6):  # each is compiled, which takes most of a second
        x, f, axis, block = case(rng)
        q = on_jax.quantize(jnp.asarray(x), f, axis, block)
        check(x, f, axis, block, q, np.asarray(q.dequantize()))


@pytest.mark.parametrize("seed", [0, 1, 2, *(pytest.param(seed, marks=pytest.mark.deep) for seed in range(3, 8))])
def test_torch_has_the_codes_of_numpy(seed):
    rng = np.random.default_rng(seed)
    for _ in range(80):
        x, f, axis, block = case(rng)
        q = on_torch.quantize(tensor(x), f, axis, block)
        check(x, f, axis, block, q, q.dequantize().view(getattr(torch, f"int{8 * x.itemsize}")).numpy())


@pytest.mark.parametrize("count", [0, 1, 13, 256, 700])
def test_pack_and_unpack_in_torch(count):
    for bits in range(2, 17):
        codes = np.random.default_rng(bits).integers(0, 1 << bits, count).astype("u1" if bits <= 8 else "u2")
        packed = exmy.pack(codes, bits)
        array = torch.from_numpy(packed.copy())
        assert np.array_equal(on_torch.pack(torch.from_numpy(codes.astype("i4")), bits).numpy(), packed)
        assert np.array_equal(on_torch.unpack(array, bits, count).numpy(), codes)
        with pytest.raises(exmy.SizeError, match="packed has shape"):
            on_torch.unpack(array, bits, count + 8)


# in JAX, which compiles each case: codes of a whole number of bytes and of others, and every length
COMPILED = [(2, 700), (3, 13), (5, 0), (7, 256), (8, 1), (11, 700), (15, 1), (16, 13)]


@pytest.mark.parametrize(
    ("bits", "count"),
    COMPILED
    + [
        pytest.param(bits, count, marks=pytest.mark.deep)
        for bits in range(2, 17)
        for count in (0, 1, 13, 256, 700)
        if (bits, count) not in COMPILED
    ],
)
def test_pack_and_unpack_in_jax(bits, count):
    codes = np.random.default_rng(bits).integers(0, 1 << bits, count).astype("u1" if bits <= 8 else "u2")
    packed = exmy.pack(codes, bits)
    assert np.array_equal(np.asarray(on_jax.pack(jnp.asarray(codes), bits)), packed)
    assert np.array_equal(np.asarray(on_jax.unpack(jnp.asarray(packed), bits, count)), codes)
    with pytest.raises(exmy.SizeError, match="packed has shape"):
        on_jax.unpack(jnp.asarray(packed), bits, count + 8)


def test_jax_under_jit_vmap_and_grad():
    x = np.random.default_rng(0).standard_normal((6, 4, 32)).astype("f4")

    @jax.jit
    def through(x):
        return jax.vmap(lambda each: on_jax.quantize(each, "e2m1", block=32).dequantize())(x)

    expected = np.stack([exmy.quantize(each, "e2m1", block=32, scale="max").dequantize() for each in x])
    assert np.asarray(through(x)).tobytes() == expected.tobytes()
    value, slope = jax.value_and_grad(lambda x: (on_jax.fake_quantize(x, "e2m1", 2) * 3).sum())(jnp.asarray(x))
    assert np.array_equal(slope, np.full(x.shape, 3.0))
    rows = exmy.quantize(x, "e2m1", 2, scale="max").dequantize()
    assert value == pytest.approx(3 * rows.sum(), abs=1e-3)


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # its tracer steps on its own deprecations
def test_torch_under_compile_vmap_and_grad():
    x = np.random.default_rng(0).standard_normal((6, 4, 32)).astype("f4")
    expected = np.stack([exmy.quantize(each, "e2m1", block=32, scale="max").dequantize() for each in x])

    def through(x):
        return on_torch.fake_quantize(x, "e2m1", None, 32)

    assert torch.func.vmap(through)(tensor(x)).numpy().tobytes() == expected.tobytes()
    compiled = torch.compile(through, fullgraph=True, backend="eager")
    assert compiled(tensor(x[0])).numpy().tobytes() == expected[0].tobytes()
    leaf = tensor(x).requires_grad_()
    (on_torch.fake_quantize(leaf, "e2m1", 2) * 3).sum().backward()
    assert np.array_equal(leaf.grad.numpy(), np.full(x.shape, 3.0))


def test_arguments_that_devices_refuse():
    for module, array in ((on_jax, jnp.zeros((4, 20))), (on_torch, torch.zeros((4, 20)))):
        with pytest.raises(exmy.SizeError, match="blocks of 16 do not divide axis 1"):
            module.quantize(array, "e2m1", block=16)
        with pytest.raises(exmy.FormatError):
            module.quantize(array, "e9m9")
        with pytest.raises(exmy.FormatError):
            module.pack(array, 17)
        with pytest.raises(exmy.DtypeError, match=r"codes have dtype .*float32; expected integers"):
            module.pack(array, 4)
        with pytest.raises(exmy.DtypeError, match=r"codes have dtype .*bool; expected integers"):
            module.pack(array > 0, 4)
        with pytest.raises(exmy.DtypeError, match=r"packed codes have dtype .*float32; expected uint8"):
            module.unpack(array[0, :4], 4, 8)
    with pytest.raises(exmy.DtypeError, match=r"float64; expected .* exmy.quantize takes float64"):
        on_torch.quantize(torch.zeros(3, dtype=torch.float64), "e2m1")
    with pytest.raises(exmy.DtypeError):
        on_jax.quantize(jnp.zeros(3, jnp.int32), "e2m1")


def test_gathered_codes_are_not_those_of_one_array():
    x = np.random.default_rng(0).standard_normal((8, 64, 8)).astype("f4")
    gathered = jax.vmap(lambda each: on_jax.quantize(each, "e4m3"))(x)  # of shapes that broadcast to those of one
    parts = [on_torch.quantize(tensor(each), "e4m3") for each in x]
    packed, offsets = torch.cat([q.packed for q in parts]), torch.stack([q.offsets for q in parts])
    joined = dataclasses.replace(parts[0], packed=packed, offsets=offsets)
    for q in (gathered, joined):
        for decode in (q.dequantize, q.to_numpy):
            with pytest.raises(exmy.SizeError, match=r"\(8,\); expected \(512,\) and \(\) .* decode each array"):
                decode()
    each = jax.vmap(lambda q: q.dequantize())(gathered)
    assert np.array_equal(each, np.stack([q.dequantize() for q in parts]))


def test_quantized_arrays_are_compared_by_identity():
    """As those of NumPy are: comparing their arrays has no single result."""
    x = np.linspace(-3, 3, 64, dtype="f4")
    for make in (lambda: on_jax.quantize(x, "e2m1"), lambda: on_torch.quantize(tensor(x), "e2m1")):
        a, b = make(), make()
        assert [b, a].index(a) == 1
        assert len({a, b}) == 2


def test_torch_packs_tensors_only():
    with pytest.raises(exmy.DtypeError, match="codes are ndarray; expected a tensor"):
        on_torch.pack(np.zeros(8, np.uint8), 4)
    with pytest.raises(exmy.DtypeError, match="packed codes are ndarray; expected a tensor"):
        on_torch.unpack(np.zeros(4, np.uint8), 4, 8)


JAX_DEVICES = """
import exmy, exmy.jax, jax, jax.numpy as jnp, numpy as np
from functools import partial
from jax.sharding import Mesh, PartitionSpec as P
mesh = Mesh(np.array(jax.devices()), ("data",))
assert len(jax.devices()) == 4
x = np.random.default_rng(0).standard_normal((4, 512)).astype("f4")

@jax.jit
@partial(jax.shard_map, mesh=mesh, in_specs=P("data"), out_specs=P(), check_vma=False)
def gathered(part):
    q = exmy.jax.quantize(part, "e2m1", block=32)  # what each device sends: 4 bits a value and the offsets
    assert q.packed.dtype == jnp.uint8 and q.packed.size == part.size // 2
    every = jax.lax.all_gather(q, "data")
    return jax.vmap(lambda q: q.dequantize())(every).reshape(4, 512)

expected = np.concatenate([exmy.quantize(row[None], "e2m1", block=32, scale="max").dequantize() for row in x])
assert np.asarray(gathered(x)).tobytes() == expected.tobytes()
print("gathered")
"""

TORCH_PROCESSES = """
import os, sys, torch, torch.distributed as dist, exmy, exmy.torch, numpy as np
child = os.fork()  # after the imports, which take most of the time
rank = 0 if child else 1
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=2)
x = np.random.default_rng(0).standard_normal((2, 512)).astype("f4")
q = exmy.torch.quantize(torch.from_numpy(x[rank]), "e3m2", block=32)
packed = [torch.empty_like(q.packed) for _ in range(2)]
offsets = [torch.empty_like(q.offsets.to(torch.int32)) for _ in range(2)]
dist.all_gather(packed, q.packed)
dist.all_gather(offsets, q.offsets.to(torch.int32))
for row, codes, shifts in zip(x, packed, offsets):
    received = exmy.torch.Quantized(codes, shifts.to(torch.int16), q.format, q.groups, q.dtype)
    expected = exmy.quantize(row, "e3m2", block=32, scale="max").dequantize()
    assert received.dequantize().numpy().tobytes() == expected.tobytes()
dist.destroy_process_group()
if child:
    assert os.waitpid(child, 0)[1] == 0
    print("gathered")
"""


def test_jax_devices_send_each_other_codes():
    assert jax.numpy  # skips without JAX
    flags = "--xla_force_host_platform_device_count=4"
    code = f"import os; os.environ['XLA_FLAGS'] = {flags!r}" + JAX_DEVICES
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=250, check=False)
    assert done.stdout == "gathered\n", done.stderr


def test_torch_processes_send_each_other_codes(tmp_path):
    assert torch.Tensor  # skips without PyTorch
    command = [sys.executable, "-c", TORCH_PROCESSES, str(tmp_path / "rendezvous")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert done.stdout == "gathered\n", done.stderr
