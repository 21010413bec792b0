"""Check exmy.torch and exmy.jax on an accelerator, bit for bit against NumPy, and time them beside a copy.

Run `python tests/exmy/on_device.py` on a machine with a GPU; it needs NumPy, ml_dtypes and one of PyTorch and JAX.
Without a GPU it runs on the CPU, and says so. It prints one line for each check and exits with status 1 if any
result differs.
"""

import argparse
import itertools
import os
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "codecs"))
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch has memory of the GPU too

import exmy
import ml_dtypes
import numpy as np

FORMATS = [f for bits in range(2, 17) for f in exmy.formats(bits)]
BIASED = [exmy.Format(name) for name in ("e4m3b11", "e3m4b-20", "e5m2b100", "e0m7b-3", "e8m7b300")]
FLOATS = [np.dtype("f2"), np.dtype(ml_dtypes.bfloat16), np.dtype("f4")]
GROUPS = [
    ((), None, None),
    ((0,), None, None),
    ((1,), None, None),
    ((257,), None, None),
    ((3, 1000), None, None),
    ((0, 32), 0, None),
    ((5, 64), 0, None),
    ((5, 64), 1, None),
    ((5, 64), -1, 16),
    ((64, 5), 0, 32),
    ((3, 32, 4), 1, 16),
    ((2, 3, 256), 2, 128),
    ((2, 512), -1, 256),
    ((1031, 96), -1, 32),
    ((1 << 16, 33), None, None),
]
TIMED = [("e4m3", None), ("e4m3", 32), ("e2m1", 32), ("e3m2", 32), ("e3m7", None)]


def floats(kind, dtype, shape, rng):
    """Return floats of one kind, special values among them."""
    count = int(np.prod(shape))
    with np.errstate(over="ignore", invalid="ignore"):
        if kind == "bits":
            return rng.integers(0, 1 << 8 * dtype.itemsize, count, f"u{dtype.itemsize}").view(dtype).reshape(shape)
        if kind == "normal":
            x = rng.standard_normal(count)
        elif kind == "spread":
            x = rng.standard_normal(count) * np.exp2(rng.integers(-149, 128, count).astype(float))
        elif kind == "subnormal":
            x = rng.standard_normal(count) * (rng.random(count) < 0.3) * 1e-42
        elif kind == "ties":
            x = (rng.integers(-64, 64, count) + 0.5) * np.exp2(rng.integers(-8, 8, count).astype(float))
        elif kind == "constant":
            x = np.full(count, -0.1)
        else:
            special = [0.0, -0.0, np.inf, -np.inf, np.nan, -np.nan, 1e-45, 65504, 3.4028235e38, 2.0**-126]
            x = rng.choice(special, count)
        return x.reshape(shape).astype(dtype)


KINDS = ["bits", "normal", "spread", "subnormal", "ties", "constant", "special"]


class Torch:
    """PyTorch: its arrays, its device, and how to wait for it."""

    name = "torch"

    def __init__(self):
        import exmy.torch
        import torch

        self.api, self.torch = exmy.torch, torch
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.on_gpu = self.device.type == "cuda"
        where = torch.cuda.get_device_name() if self.on_gpu else "CPU"
        self.title = f"torch {torch.__version__} on {where}"
        self.floats = [*FLOATS, np.dtype("f8")]

    def put(self, x):
        raw = self.torch.from_numpy(np.ascontiguousarray(x).view(f"i{x.itemsize}").reshape(x.shape))
        raw = raw.to(self.device)
        return raw.view(getattr(self.torch, x.dtype.name)) if x.dtype.kind not in "iu" else raw

    def raw(self, x):
        flat = x.reshape(-1).contiguous()
        return flat.view(self.torch.uint8).cpu().numpy().tobytes() if flat.numel() else b""

    def compiled(self, function):
        self.torch.compiler.reset()  # or the ninth function of one source line would run uncompiled
        return self.torch.compile(function, dynamic=False, fullgraph=True)

    def wait(self, result):
        if self.on_gpu:
            self.torch.cuda.synchronize()
        return result

    def random(self, count):
        return self.torch.randn(count, device=self.device)

    def copy(self, x):
        return x.clone()

    def free(self):
        if self.on_gpu:
            self.torch.cuda.empty_cache()

    def gradient(self, x, f, block):
        leaf = x.detach().requires_grad_()
        (self.api.fake_quantize(leaf, f, None, block) * 3).sum().backward()
        return leaf.grad


class Jax:
    """JAX: its arrays, its device, and how to wait for it."""

    name = "jax"

    def __init__(self):
        import exmy.jax
        import jax

        self.api, self.jax = exmy.jax, jax
        device = jax.devices()[0]
        self.on_gpu = device.platform != "cpu"
        self.title = f"jax {jax.__version__} on {device.device_kind}"
        self.floats = FLOATS

    def put(self, x):
        return self.jax.numpy.asarray(x)

    def raw(self, x):
        return np.asarray(x).tobytes()

    def compiled(self, function):
        return self.jax.jit(function)

    def wait(self, result):
        return self.jax.block_until_ready(result)

    def random(self, count):
        return self.jax.random.normal(self.jax.random.key(0), (count,))

    def copy(self, x):
        return self.jax.numpy.copy(x)

    def free(self):
        pass

    def gradient(self, x, f, block):
        return self.jax.grad(lambda x: (self.api.fake_quantize(x, f, None, block) * 3).sum())(x)


def same(actual, expected, what):
    assert actual == expected, f"{what} differs from NumPy"


def check_quantized(framework, x, f, axis, block, quantize):
    """Compare codes, offsets and values of one array with those of NumPy."""
    expected = exmy.quantize(x, f, axis, block, "max", nonfinite="saturate")
    what = f"{f} of {x.dtype} {x.shape}, axis={axis}, block={block}"
    packed, offsets, values = quantize(framework.put(x), f, axis, block)
    same(framework.raw(packed), expected.packed.tobytes(), f"codes: {what}")
    same(framework.raw(offsets), expected.offsets.astype("i2").tobytes(), f"offsets: {what}")
    same(framework.raw(values), expected.dequantize(x.dtype).tobytes(), f"values: {what}")


def quantized_cases(count):
    """Yield arrays, formats, axes and blocks: all formats, shapes and kinds of values in turn."""
    rng = np.random.default_rng(0)
    for i in range(count):
        shape, axis, block = GROUPS[i % len(GROUPS)]
        x = floats(KINDS[i % len(KINDS)], FLOATS[i % len(FLOATS)], shape, rng)
        yield x, FORMATS[i * 31 % len(FORMATS)], axis, block


def check_quantize(framework, cases):
    """Check quantize and dequantize of arrays of many shapes, groups, formats and values."""

    def quantize(x, f, axis, block):
        q = framework.api.quantize(x, f, axis, block)
        return q.packed, q.offsets, q.dequantize()

    for x, f, axis, block in quantized_cases(cases):
        check_quantized(framework, x, f, axis, block, quantize)
    return f"{cases} arrays"


def check_compiled(framework, cases):
    """Check quantize and dequantize that one compiled function contains."""

    def quantize(x, f, axis, block):
        def both(x):
            q = framework.api.quantize(x, f, axis, block)
            return q.packed, q.offsets, q.dequantize()

        return framework.compiled(both)(x)

    for x, f, axis, block in quantized_cases(cases):
        check_quantized(framework, x, f, axis, block, quantize)
    return f"{cases} functions"


def check_pack(framework, cases):
    """Check pack and unpack at every width."""
    rng = np.random.default_rng(1)
    widths = list(itertools.product(range(2, 17), [0, 1, 13, 256, 700, 100_003]))[:: max(1, 90 // cases)]
    for bits, count in widths:
        codes = rng.integers(0, 1 << bits, count)
        packed = exmy.pack(codes.astype("u1" if bits <= 8 else "u2"), bits)
        device = framework.api.pack(framework.put(codes.astype("i4")), bits)
        same(framework.raw(device), packed.tobytes(), f"{count} codes of {bits} bits")
        unpacked = framework.api.unpack(device, bits, count)
        same(
            framework.raw(unpacked), codes.astype("u1" if bits <= 8 else "u2").tobytes(), f"unpack {bits} {count}"
        )
    return f"{len(widths)} widths and counts"


def check_round(framework, cases):
    """Check round: every float16 and bfloat16, and special float32 and float64, nearest and stochastic."""
    rng = np.random.default_rng(2)
    every = np.arange(1 << 16, dtype="u2")
    formats = (BIASED + FORMATS)[:cases]
    for i, f in enumerate(formats):
        dtype = framework.floats[i % len(framework.floats)]
        x = every.view(dtype) if dtype.itemsize == 2 else floats(KINDS[i % 7], dtype, (3, 7001), rng)
        rounded = framework.api.round(framework.put(x), f, nonfinite="saturate")
        same(framework.raw(rounded), exmy.round(x, f, nonfinite="saturate").tobytes(), f"round to {f} of {dtype}")
        if dtype.itemsize < 8:
            seed = int(rng.integers(1 << 63))
            options = {"nonfinite": "saturate", "rounding": "stochastic", "seed": seed}
            rounded = framework.api.round(framework.put(x), f, **options)
            same(framework.raw(rounded), exmy.round(x, f, **options).tobytes(), f"stochastic {f} of {dtype}")
    return f"{len(formats)} formats"


def check_gradient(framework, cases):
    """Check that the gradient passes straight through on the device."""
    x = floats("normal", np.dtype("f4"), (8, 64), np.random.default_rng(3))
    slope = framework.gradient(framework.put(x), "e2m1", 32)
    same(framework.raw(slope), np.full(x.shape, 3, "f4").tobytes(), "gradient")
    return "fake_quantize"


TORCH_PROCESS = """
import sys
import numpy as np, torch, torch.distributed as dist
import exmy, exmy.torch
rank, address, device = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{address}", rank=rank, world_size=2)
x = np.random.default_rng(0).standard_normal((2, 4096)).astype("f4")
mine = exmy.torch.quantize(torch.from_numpy(x[rank]).to(device), "e3m2", block=32)
for sender in range(2):
    packed, offsets = mine.packed.clone(), mine.offsets.to(torch.int32)
    dist.broadcast(packed, sender)
    dist.broadcast(offsets, sender)
    received = exmy.torch.Quantized(packed, offsets.to(torch.int16), mine.format, mine.groups, mine.dtype)
    expected = exmy.quantize(x[sender], "e3m2", block=32, scale="max").dequantize()
    assert received.dequantize().cpu().numpy().tobytes() == expected.tobytes()
dist.destroy_process_group()
print("received")
"""


def check_send(framework, cases):
    """Check that codes arrive: two processes with PyTorch, all devices of one process with JAX."""
    if framework.name == "torch":
        with tempfile.TemporaryDirectory() as folder:
            arguments = [str(Path(folder) / "rendezvous"), framework.device.type]
            command = [sys.executable, "-c", TORCH_PROCESS]
            pipes = {"stdout": -1, "stderr": -1, "text": True}
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
            processes = [
                subprocess.Popen([*command, str(rank), *arguments], env=environment, **pipes) for rank in range(2)
            ]
            for process in processes:
                out, err = process.communicate(timeout=250)
                assert out == "received\n", err[-1500:]
        return "two processes broadcast codes with gloo"
    jax = framework.jax
    from jax.sharding import Mesh
    from jax.sharding import PartitionSpec as P

    devices = jax.devices()
    x = np.random.default_rng(0).standard_normal((len(devices), 4096)).astype("f4")

    def gathered(part):
        every = jax.lax.all_gather(framework.api.quantize(part, "e2m1", block=32), "data")
        return jax.vmap(lambda q: q.dequantize())(every).reshape(x.shape)

    mesh = Mesh(np.array(devices), ("data",))
    sent = jax.shard_map(gathered, mesh=mesh, in_specs=P("data"), out_specs=P(), check_vma=False)
    expected = np.concatenate([exmy.quantize(row[None], "e2m1", block=32, scale="max").dequantize() for row in x])
    same(framework.raw(jax.jit(sent)(x)), expected.tobytes(), "codes gathered")
    return f"all_gather over {len(devices)} device(s)"


def seconds(framework, function, *arguments):
    """Return the least time of five calls after one that compiles."""
    framework.wait(function(*arguments))
    times = []
    for _ in range(5):
        start = time.perf_counter()
        framework.wait(function(*arguments))
        times.append(time.perf_counter() - start)
    return min(times)


def print_timings(framework, mebibytes, compile_torch):
    """Print GB/s of the float32 values, beside a copy of them on the device."""
    x = framework.random(mebibytes << 18)
    size = 4 * (mebibytes << 18)
    base = seconds(framework, framework.copy, x)
    print(f"  {mebibytes} MiB of float32; copy {size / base / 1e9:8.1f} GB/s (times two for reads and writes)")
    wrap = framework.compiled if framework.name == "jax" or compile_torch else (lambda function: function)
    how = "compiled" if framework.name == "jax" or compile_torch else "eager"
    for f, block in TIMED:

        def parts(x, f=f, block=block):
            q = framework.api.quantize(x, f, None, block)
            return q.packed, q.offsets

        encode = seconds(framework, wrap(parts), x)
        q = framework.wait(framework.api.quantize(x, f, None, block))

        def values(packed, offsets, q=q):
            return type(q)(packed, offsets, q.format, q.groups, q.dtype).dequantize()

        decode = seconds(framework, wrap(values), q.packed, q.offsets)
        rounded = seconds(framework, wrap(lambda x, f=f: framework.api.round(x, f)), x)
        name = f if block is None else f"{f} block={block}"
        rates = [f"{size / t / 1e9:7.1f} GB/s ({base / t:.2f} x copy)" for t in (encode, decode, rounded)]
        print(f"  {name:14} {how}: quantize {rates[0]}, dequantize {rates[1]}, round {rates[2]}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["torch", "jax"], help="check one framework")
    parser.add_argument("--cases", type=int, default=150, help="number of arrays and formats (150)")
    parser.add_argument("--mib", type=int, help="size of the timed array (1024 on a GPU, 16 on a CPU)")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    print(f"exmy with {exmy.kernels.level()} kernels, NumPy {np.__version__}, Python {sys.version.split()[0]}")
    failures = checked = 0
    for make in (Torch, Jax):
        if options.only not in (None, make.name):
            continue
        try:
            framework = make()
        except ImportError as error:
            print(f"{make.name}: not installed ({error})")
            continue
        print(framework.title)
        compiles = framework.name == "jax" or not options.no_compile
        fewer = options.cases if framework.name == "torch" else max(1, options.cases // 4)  # each shape compiles
        checks = [(check_quantize, fewer), (check_pack, fewer), (check_round, fewer), (check_gradient, 1)]
        checks += [(check_compiled, max(1, options.cases // 15))] if compiles else []
        for check, cases in [*checks, (check_send, 1)]:
            checked += 1
            start = time.perf_counter()
            try:
                done = f"ok: {check(framework, cases)}"
            except Exception as error:
                failures += 1
                traceback.print_exc(limit=3)
                done = f"FAILED: {type(error).__name__}: {str(error)[:300]}"
            print(f"  {check.__name__:16} {done} ({time.perf_counter() - start:.1f} s)", flush=True)
        size = options.mib or (1024 if framework.on_gpu else 16)
        try:
            if framework.name == "torch":
                print_timings(framework, size, compile_torch=False)
            if compiles:
                print_timings(framework, size, compile_torch=True)
        except Exception as error:
            failures += 1
            traceback.print_exc(limit=3)
            print(f"  timings FAILED: {type(error).__name__}: {str(error)[:300]}")
        framework.free()
    print(
        f"{checked - failures} of {checked} checks passed" if checked else "neither PyTorch nor JAX is installed"
    )
    sys.exit(failures > 0 or not checked)


if __name__ == "__main__":
    main()
