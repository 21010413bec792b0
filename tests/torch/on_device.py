"""Check tstore.torch and tstore.jax on an accelerator, bit for bit, and time them beside torch.save.

Run `python tests/torch/on_device.py` on a machine with a GPU; without one it runs on the CPU, and says so. It
prints one line for each check and exits with status 1 if one fails.
"""

import argparse
import importlib.util
import os
import statistics
import sys
import tempfile
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[2] / "codecs"))
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch has memory of the GPU too
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic products

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import tstore.sync as tstore

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool, torch.complex64, torch.complex128,
]  # fmt: skip


def synchronize():
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def random_bits(dtype, shape):
    """Return a tensor on the device with random bits, NaNs among them; a bool has only two."""
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, device=DEVICE).bool()
    size = torch.empty((), dtype=dtype).element_size()
    raw = torch.randint(0, 256, (*shape, size), dtype=torch.uint8, device=DEVICE)
    return raw.view(dtype).squeeze(-1)


def bits_of(tensor):
    tensor = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_same(tree, other):
    assert tree.keys() == other.keys(), (tree.keys(), other.keys())
    for name, tensor in tree.items():
        assert tensor.shape == other[name].shape, name
        assert tensor.dtype == other[name].dtype, name
        assert bits_of(tensor) == bits_of(other[name]), name


def check_dtypes(folder):
    """Tensors of every dtype, layout and size come back equal, on the host and in place on the device."""
    tree = {f"plain.{dtype}": random_bits(dtype, (33, 65)) for dtype in DTYPES}
    base = torch.randn(64, 48, device=DEVICE)
    tree |= {
        "transposed": base.T,
        "strided": base[::3, 1::2],
        "scalar": torch.tensor(3.5, device=DEVICE),
        "empty": torch.empty(0, 4, device=DEVICE),
        "conjugated": torch.randn(8, 8, dtype=torch.complex64, device=DEVICE).conj(),
        "negated": torch.randn(8, dtype=torch.complex64, device=DEVICE).conj().imag,
        "large conjugated": torch.randn(1024, 1024, dtype=torch.complex64, device=DEVICE).conj(),
        "large negated": torch.randn(1024, 2048, dtype=torch.complex64, device=DEVICE).conj().imag,
        "tied": base,
        "host": torch.randn(5),
        "channels_last": torch.randn(2, 3, 4, 5, device=DEVICE).to(memory_format=torch.channels_last),
        "parameter": nn.Parameter(torch.randn(7, device=DEVICE)),
    }
    tstore.torch.save(folder / "dtypes", tree, 0)
    assert_same(tree, tstore.torch.restore(folder / "dtypes"))
    resolved = {name: tensor.detach().resolve_conj().resolve_neg() for name, tensor in tree.items()}
    target = {name: torch.zeros_like(tensor) for name, tensor in resolved.items()}
    restored = tstore.torch.restore(folder / "dtypes", target=target)
    assert_same(tree, restored)
    for name, tensor in restored.items():
        assert tensor.device == tree[name].device, name
        assert tensor.data_ptr() == target[name].data_ptr(), name
    return f"{len(tree)} tensors"


class Net(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x):
        for layer in self.layers:
            x = F.gelu(layer(x)) + x
        return self.norm(x)


def training(width=64, depth=3, fused=True):
    model = Net(width, depth).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused and DEVICE.type == "cuda")
    scaler = torch.amp.GradScaler(DEVICE.type)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)
    return {"model": model, "optimizer": optimizer, "scaler": scaler, "scheduler": scheduler}


def steps_of(job, first, count):
    model, losses = job["model"], []
    for step in range(first, first + count):
        x = torch.randn(32, model.norm.num_features, generator=torch.Generator().manual_seed(step)).to(DEVICE)
        with torch.autocast(DEVICE.type, torch.bfloat16):
            loss = (model(x) - x).square().mean()
        job["scaler"].scale(loss).backward()
        job["scaler"].step(job["optimizer"])
        job["scaler"].update()
        job["optimizer"].zero_grad()
        job["scheduler"].step()
        losses.append(float(loss.detach()))
    return losses


def check_resume(folder):
    """A job that resumes from a checkpoint makes exactly the steps that the uninterrupted one makes."""
    torch.manual_seed(0)
    job = training()
    steps_of(job, 0, 5)
    tstore.torch.save(folder / "resume", job, 5)
    expected = steps_of(job, 5, 5)
    other = training()
    steps_of(other, 100, 1)  # makes the optimizer's state
    tstore.torch.restore(folder / "resume", target=other)
    assert steps_of(other, 5, 5) == expected
    fresh = training()
    tstore.torch.restore(folder / "resume", target=fresh)
    assert steps_of(fresh, 5, 5) == expected
    return "5 steps with autocast, GradScaler and fused AdamW, with and without a state before"


def check_background(folder):
    """A background save has the values of the moment it was called, whatever the training does next."""
    for staging in ("memory", "turns"):
        torch.manual_seed(1)
        job = training(width=512, depth=8)
        steps_of(job, 0, 2)
        before = {name: tensor.clone() for name, tensor in job["model"].state_dict().items()}
        save = tstore.torch.save_async(folder / staging, job, 0, staging=staging)
        for parameter in job["model"].parameters():
            parameter.data.fill_(torch.nan)
        synchronize()
        save.wait()
        restored = tstore.torch.restore(folder / staging, target=training(width=512, depth=8))
        assert_same(before, restored["model"].state_dict())
    return "staging in memory and in turns"


def check_streams(folder):
    """A save waits for the kernels of the current stream that still write the tensors."""
    if DEVICE.type != "cuda":
        return "skipped: no streams on the CPU"
    x = torch.zeros(4096, 4096, device=DEVICE)
    for turn in range(5):
        with torch.cuda.stream(torch.cuda.Stream()):
            product = x + turn
            for _ in range(20):
                product = (product @ torch.eye(4096, device=DEVICE)) + 1
            tstore.torch.save(folder / "streams", {"x": product}, turn)
        restored = tstore.torch.restore(folder / "streams", step=turn)["x"]
        assert torch.all(restored == turn + 20), restored
        target = {"x": torch.empty_like(product)}
        with torch.cuda.stream(torch.cuda.Stream()):
            tstore.torch.restore(folder / "streams", target=target)
        assert torch.all(target["x"] == turn + 20)
    return "5 saves and restores in streams of their own"


def whole(model):
    """Return the state of a model with each DTensor gathered."""
    state = model.state_dict()
    return {name: t.full_tensor() if hasattr(t, "full_tensor") else t for name, t in state.items()}


def check_sharded(folder):
    """FSDP2's parameters, one process with NCCL, come back into a new model and into a plain one."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29511")
    dist.init_process_group("nccl" if DEVICE.type == "cuda" else "gloo", rank=0, world_size=1)
    try:
        mesh = init_device_mesh(DEVICE.type, (1,))

        def sharded():
            job = training(fused=False)
            for layer in job["model"].layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(job["model"], mesh=mesh)
            job["optimizer"] = torch.optim.AdamW(job["model"].parameters(), lr=1e-3)
            return {"model": job["model"], "optimizer": job["optimizer"]}

        job = sharded()
        x = torch.randn(32, 64, device=DEVICE)
        job["model"](x).square().mean().backward()
        job["optimizer"].step()
        tstore.torch.save(folder / "sharded", job, 0, attempt="on-device")
        full = whole(job["model"])
        other = sharded()
        tstore.torch.restore(folder / "sharded", target=other)
        assert_same(full, whole(other["model"]))
        plain = training()["model"]
        tstore.torch.restore(folder / "sharded", target={"model": plain}, only="model/**")
        assert_same(full, plain.state_dict())
        import torch.distributed.checkpoint as dcp

        tensors = {name: tensor.clone() for name, tensor in full.items()}
        dcp.save(tensors, storage_writer=tstore.torch.Writer(folder / "dcp", 0))
        loaded = {name: torch.zeros_like(tensor) for name, tensor in full.items()}
        dcp.load(loaded, storage_reader=tstore.torch.Reader(folder / "dcp"))
        assert_same(full, loaded)
    finally:
        dist.destroy_process_group()
    return f"{'NCCL' if DEVICE.type == 'cuda' else 'gloo'}, FSDP2, DCP's writer and reader"


def check_jax(folder):
    """JAX arrays on the device are saved, restored with their shardings, and donated right after save_async."""
    import jax
    import jax.numpy as jnp

    key = jax.random.key(0)
    tree = {
        "w": jax.random.normal(key, (257, 129), jnp.float32),
        "b": jax.random.normal(key, (1000,), jnp.bfloat16),
        "e": jax.random.normal(key, (64, 64), jnp.float32).astype(jnp.float8_e4m3fn),
        "i": jnp.arange(10, dtype=jnp.int4),
        "key": key,
    }
    tstore.jax.save(folder / "jax", tree, 0)
    restored = tstore.jax.restore(folder / "jax", target=tree)
    for name in ("w", "b", "e", "i"):
        assert np.asarray(tree[name]).tobytes() == np.asarray(restored[name]).tobytes(), name
        assert restored[name].sharding == tree[name].sharding, name
        assert restored[name].devices() == tree[name].devices(), name
    assert jnp.array_equal(jax.random.key_data(restored["key"]), jax.random.key_data(key))
    step = jax.jit(lambda x: x * 0 - 1, donate_argnums=0)
    large = jax.random.normal(key, (4096, 4096))
    expected = np.array(large)
    save = tstore.jax.save_async(folder / "donated", {"x": large}, 0)
    step(large).block_until_ready()
    save.wait()
    assert np.array_equal(tstore.restore(folder / "donated")["x"], expected)
    return f"{jax.devices()[0].device_kind}"


def timed(call, rounds=3):
    seconds = []
    for _ in range(rounds):
        synchronize()
        start = time.perf_counter()
        call()
        synchronize()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def show_speed(folder, mib):
    tree = {f"layer{i}": torch.randn(1024, 1024, device=DEVICE) for i in range(mib // 4)}
    target = {name: torch.empty_like(tensor) for name, tensor in tree.items()}
    gb, numbers = mib * 2**20 / 1e9, iter(range(1000))
    file = folder / "torch.pt"

    def torch_save():
        torch.save(tree, file)
        with file.open("rb+") as opened:
            os.fsync(opened.fileno())

    def changed():
        for tensor in tree.values():
            tensor.add_(1)  # else nothing is written

    def save():
        changed()
        tstore.torch.save(folder / "speed", tree, next(numbers))

    def blocked():
        changed()
        synchronize()
        start = time.perf_counter()
        saving.append(tstore.torch.save_async(folder / "speed", tree, next(numbers)))
        stalls.append(time.perf_counter() - start)
        saving[-1].wait()

    saving, stalls = [], []
    rows = {"torch.save, fsync": timed(torch_save), "tstore.torch.save": timed(save)}
    timed(blocked)
    rows["tstore.torch.save_async: caller is blocked"] = statistics.median(stalls)
    rows["torch.load, map_location"] = timed(lambda: torch.load(file, map_location=DEVICE))
    rows["tstore.torch.restore, in place"] = timed(lambda: tstore.torch.restore(folder / "speed", target=target))
    assert_same(tree, target)
    host = torch.empty(mib * 2**18, pin_memory=DEVICE.type == "cuda")
    flat = torch.empty(mib * 2**18, device=DEVICE)
    rows["copy to pinned memory"] = timed(lambda: host.copy_(flat))
    for name, seconds in rows.items():
        print(f"  {name:44} {seconds:7.3f} s {gb / seconds:8.2f} GB/s", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", help="where stores are written (default: a temporary folder)")
    parser.add_argument(
        "--mib", type=int, default=4096 if DEVICE.type == "cuda" else 256, help="of the timed tree"
    )
    args = parser.parse_args()
    torch.use_deterministic_algorithms(True)
    name = torch.cuda.get_device_name() if DEVICE.type == "cuda" else "the CPU (no GPU is there)"
    print(f"torch {torch.__version__} on {name}", flush=True)
    failed = 0
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        checks = [check_dtypes, check_resume, check_background, check_streams, check_sharded]
        if importlib.util.find_spec("jax"):
            checks.append(check_jax)
        for check in checks:
            start = time.perf_counter()
            try:
                outcome = f"ok: {check(Path(folder))}"
            except Exception:
                traceback.print_exc()
                outcome, failed = "FAILED", failed + 1
            print(f"  {check.__name__:18} {outcome} ({time.perf_counter() - start:.1f} s)", flush=True)
        torch.use_deterministic_algorithms(False)
        show_speed(Path(folder), args.mib)
    print(f"{len(checks) - failed} of {len(checks)} checks passed")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
