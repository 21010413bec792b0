"""The machine that runs a benchmark, its page cache, and the peak memory of this process (Linux)."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import threading
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import exmy
import numpy as np
import numpy.typing as npt

PACKAGES = ("tstore", "tensorstore", "icechunk", "safetensors", "numpy", "zarr", "xxhash", "ml_dtypes", "aiohttp")
PACKAGES += ("gcsfs", "jax", "orbax-checkpoint", "torch")


def describe(folder: Path) -> dict[str, Any]:
    """Return what readers need to compare figures: processor, kernel, file system, versions."""
    cpu = _cpuinfo()
    flags = cpu.get("flags", "").split()
    device, kind, options = _mount(folder)
    return {
        "cpu": cpu.get("model name", platform.processor()),
        "cores": len(os.sched_getaffinity(0)),
        "simd": [f for f in ("avx2", "avx512f", "avx512bw", "avx512vbmi") if f in flags],
        "kernels": exmy.kernels.level(),
        "memory_GiB": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "kernel": platform.release(),
        "hugepages": _read("/sys/kernel/mm/transparent_hugepage/enabled"),
        "filesystem": {"device": device, "type": kind, "options": options},
        "load_average": os.getloadavg(),
        "python": platform.python_version(),
        "versions": dict(_versions()),
    }


def clear(folder: Path) -> None:
    """Empty a folder and sync the disk, so that no measurement pays for the dirty pages of another."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    os.sync()


class Reserve:
    """Memory that is held between timed regions and released just before each, so that the host keeps it backed.

    A virtual machine with free page reporting returns free memory to its host after about two seconds. The next
    measurement would touch that memory at 0.5 GB/s instead of 20.
    """

    slack = 512 << 20

    def __init__(self) -> None:
        self._held: npt.NDArray[np.uint8] | None = None

    def acquire(self, nbytes: int) -> None:
        """Allocate and touch `nbytes` and some slack."""
        if self._held is None or self._held.size != nbytes + self.slack:
            self._held = None
            self._held = np.empty(nbytes + self.slack, np.uint8)
            self._held[::4096] = 1

    def release(self) -> None:
        self._held = None


def warm(folder: Path) -> None:
    """Read every file under a folder into the page cache."""
    scratch = bytearray(8 << 20)
    for path in _files(folder):
        with path.open("rb", buffering=0) as file:
            while file.readinto(scratch):
                pass


def evict(folder: Path) -> None:
    """Drop every file under a folder from the page cache (needs no root)."""
    os.sync()  # dirty pages cannot be dropped
    for path in _files(folder):
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def stored_bytes(folder: Path) -> int:
    """Return the bytes of every file under a folder."""
    return sum(path.stat().st_size for path in _files(folder))


def bytes_from_disk() -> int:
    """Return the bytes that this process has read from the disk so far."""
    return _io()["read_bytes"]


def bytes_moved() -> tuple[int, int]:
    """Return the bytes that calls of this process have read and written so far, from and to the page cache too."""
    counters = _io()
    return counters["rchar"], counters["wchar"]


def waited_for_core() -> float:
    """Return the seconds in which the current thread was ready to run and had no core."""
    return int(_read(f"/proc/self/task/{threading.get_native_id()}/schedstat").split()[1]) / 1e9


def core_times() -> tuple[float, float]:
    """Return the seconds for which all cores ran, and for which the hypervisor kept them from running."""
    user, nice, system, _, _, irq, softirq, stolen, *_ = map(int, _read("/proc/stat").splitlines()[0].split()[1:])
    tick = os.sysconf("SC_CLK_TCK")
    return (user + nice + system + irq + softirq) / tick, stolen / tick


def reset_peak() -> int:
    """Return freed memory to the system, reset the peak of resident memory, and return the resident bytes."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def peak() -> int:
    """Return the peak of resident bytes since `reset_peak`."""
    return _status("VmHWM")


def _io() -> dict[str, int]:
    return {name: int(value) for name, value in (line.split(": ") for line in _read("/proc/self/io").splitlines())}


def _status(field: str) -> int:
    line = next(line for line in _read("/proc/self/status").splitlines() if line.startswith(field + ":"))
    return int(line.split()[1]) * 1024


def _files(folder: Path) -> Iterator[Path]:
    for parent, _, names in os.walk(folder):
        yield from (Path(parent, name) for name in names)


def _cpuinfo() -> dict[str, str]:
    first = _read("/proc/cpuinfo").split("\n\n")[0]
    return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in first.splitlines())}


def _mount(folder: Path) -> tuple[str, str, str]:
    """Return the device, type and options of the file system of a folder."""
    mounts = [line.split()[:4] for line in _read("/proc/mounts").splitlines()]
    above = [m for m in mounts if folder.resolve().is_relative_to(m[1])]
    device, _, kind, options = max(above, key=lambda m: len(m[1]))
    return device, kind, options


def _versions() -> Iterator[tuple[str, str]]:
    for name in PACKAGES:
        try:
            yield name, metadata.version(name)
        except metadata.PackageNotFoundError:
            continue


def _read(path: str) -> str:
    return Path(path).read_text().strip()
