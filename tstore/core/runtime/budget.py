"""The memory budget of a process, and scratch buffers within it.

Worker threads retain their scratch buffers, up to a limit, to avoid the page faults of fresh memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import queue
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = [
    "BUDGET",
    "acquire",
    "aligned_offset",
    "on_shortage",
    "page_aligned",
    "populate",
    "prefer_huge_pages",
    "release",
    "return_large_buffers",
    "returnable_buffer",
    "scratch",
]

BUDGET = 256 << 20
"""The bytes that all buffers of this process together may take, besides the caller's arrays (see `_Budget`)."""

_MAX_RETAINED = 32 << 20  # bytes of the longest buffer that a thread retains
_ALIGNMENT = 64
_SHORTAGE_INTERVAL = 0.05  # seconds after which a waiting caller reports the shortage again

_MIN_HUGE = 4 << 20
"""The smallest size of memory, in bytes, for which huge pages pay off."""

_MIN_POPULATED = 64 << 10
_MADV_POPULATE_WRITE = 23  # from mman.h, since Linux 5.14

_M_MMAP_THRESHOLD = -3  # from malloc.h
_MIN_RETURNED = 1 << 20

if sys.platform == "linux":
    _madvise = ctypes.CDLL(None).madvise
    _madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    _mincore = ctypes.CDLL(None).mincore
    _mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)


class _Budget:
    """The budget: half for buffers that threads retain, half for temporary claims.

    A temporary claim larger than its half waits until there is no other claim. A thread that has a claim from
    `claim` gets its next claim at once: if it waited, it could never release the first.

    Ctrl-C at any moment leaves no lock and no claim behind. For this, the lock is not a `Condition`, whose
    `__enter__` is Python code that Ctrl-C can interrupt, and a claim ends with one call that it can't interrupt.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit // 2  # the limit of either half
        self._retained = 0
        self._acquired = 0  # bytes claimed by `acquire`
        self._claims: dict[object, tuple[int, int]] = {}  # the thread and the size of each `claim`
        self._lock = threading.RLock()  # a finalizer may need it while its thread has it
        self._waiting: set[queue.SimpleQueue[None]] = set()

    def retain(self, size: int) -> bool:
        """Reserve memory for a small buffer permanently if enough is left; return whether it was reserved."""
        with self._lock:
            fits = size <= _MAX_RETAINED and self._retained + size <= self._limit
            self._retained += size if fits else 0
            return fits

    def drop(self, size: int) -> None:
        """Return retained memory, whose thread has ended."""
        with self._lock:
            self._retained -= size

    @contextlib.contextmanager
    def claim(self, size: int) -> Iterator[None]:
        """Claim bytes for the duration of the `with` block."""
        claim, thread = object(), threading.get_ident()

        def note() -> None:
            self._claims[claim] = thread, size

        try:
            self._wait_until_noted(size, note)
            yield
        finally:
            self._claims.pop(claim, None)
            self._wake()

    def acquire(self, size: int) -> None:
        """Claim bytes until `release`."""

        def note() -> None:
            self._acquired += size

        self._wait_until_noted(size, note)

    def release(self, size: int) -> None:
        """Return bytes that `acquire` has claimed."""
        with self._lock:
            self._acquired -= size
        self._wake()

    def _wait_until_noted(self, size: int, note: Callable[[], None]) -> None:
        """Call `note` as soon as the claim fits."""
        while not self._note_if_fits(size, note):
            for call in _on_shortage:
                call()
            woken = queue.SimpleQueue[None]()
            self._waiting.add(woken)
            try:
                if self._note_if_fits(size, note):
                    return
                # after this wait, the calls are repeated: they may free memory that was acquired meanwhile
                with contextlib.suppress(queue.Empty):
                    woken.get(timeout=_SHORTAGE_INTERVAL)
            finally:
                self._waiting.discard(woken)

    def _note_if_fits(self, size: int, note: Callable[[], None]) -> bool:
        thread = threading.get_ident()
        with self._lock:
            claims = list(self._claims.values())
            claimed = self._acquired + sum(size for _, size in claims)
            fits = not claimed or claimed + size <= self._limit or any(owner == thread for owner, _ in claims)
            if fits:
                note()
            return fits

    def _wake(self) -> None:
        for woken in list(self._waiting):
            woken.put(None)


class _FreeBuffers(list[npt.NDArray[np.uint8]]):
    """The buffers that a thread retains and does not use; the budget gets them back when the thread ends."""

    def __init__(self, budget: _Budget) -> None:
        super().__init__()
        self._budget = budget

    def __del__(self) -> None:
        self._budget.drop(sum(buffer.size for buffer in self))


class _State:
    """The budget of this process and the buffers of its threads; a forked child starts with new ones."""

    def __init__(self) -> None:
        self.budget = _Budget(BUDGET)
        self.local = threading.local()


_on_shortage: list[Callable[[], None]] = []
_state = _State()


def _after_fork() -> None:
    global _state  # noqa: PLW0603 - the parent's threads, which hold memory, do not exist in the child
    _state = _State()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def acquire(size: int) -> None:
    """Claim bytes of the budget until `release(size)`; block until they are available."""
    _state.budget.acquire(size)


def release(size: int) -> None:
    """Return bytes to the budget, from any thread."""
    _state.budget.release(size)


def on_shortage(call: Callable[[], None]) -> None:
    """Register a function that starts to free memory; threads that wait for memory call it."""
    _on_shortage.append(call)


@contextlib.contextmanager
def scratch(size: int) -> Iterator[npt.NDArray[np.uint8]]:
    """Yield an uninitialized buffer of `size` bytes for this worker thread; nested calls get distinct buffers."""
    free: _FreeBuffers | None = getattr(_state.local, "free", None)
    if free is None:
        free = _state.local.free = _FreeBuffers(_state.budget)
    index = next((i for i, buffer in enumerate(free) if buffer.size >= size), None)
    if index is not None:
        buffer = free.pop(index)
    elif _state.budget.retain(rounded := 1 << max(16, (size - 1).bit_length())):
        buffer = page_aligned(rounded)
    else:
        with _state.budget.claim(size):
            yield returnable_buffer(size)
        return
    try:
        yield buffer[:size]
    finally:
        free.append(buffer)


def page_aligned(size: int) -> npt.NDArray[np.uint8]:
    """Return uninitialized memory that is page-aligned.

    A processor copies several times more slowly if the destination's offset within a page exceeds the source's by
    up to 32 bytes. malloc returns large memory at offset 16 of a page, and the bytes of files mostly begin at
    offset 0.
    """
    memory = np.empty(size + mmap.PAGESIZE, np.uint8)
    start = -memory.__array_interface__["data"][0] % mmap.PAGESIZE
    return memory[start : start + size]


def returnable_buffer(size: int) -> npt.NDArray[np.uint8]:
    """Return a buffer whose memory goes back to the system when the buffer is freed; malloc would retain it."""
    try:
        memory = mmap.mmap(-1, max(1, size), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{size:,} bytes: {error.strerror}") from error
    return np.frombuffer(memory, np.uint8, size)


def return_large_buffers() -> None:
    """Make malloc return every freed buffer of a MiB or more to the system; for long-lived processes.

    By default glibc retains freed buffers of up to 32 MiB, in each thread's arena.
    """
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(_M_MMAP_THRESHOLD, _MIN_RETURNED)


def prefer_huge_pages(address: int, size: int) -> None:
    """Ask the system to back untouched memory with huge pages, as NumPy does: there are fewer page faults."""
    if sys.platform != "linux" or size < _MIN_HUGE:
        return
    start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    _madvise(start, (address + size - start) // mmap.PAGESIZE * mmap.PAGESIZE, mmap.MADV_HUGEPAGE)


def populate(memory: npt.NDArray[Any]) -> None:
    """Ask the system for the pages of contiguous memory that will be written at once, unless they are huge.

    One call takes a third of the time of a page fault for each. If the page in the middle is resident, the memory
    was used before, and the call does nothing. Systems without support ignore it.
    """
    if sys.platform == "linux" and _MIN_POPULATED <= memory.nbytes < _MIN_HUGE and memory.flags.c_contiguous:
        address = memory.__array_interface__["data"][0]
        start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
        size = address + memory.nbytes - start
        resident = ctypes.c_ubyte()
        _mincore(start + size // 2 // mmap.PAGESIZE * mmap.PAGESIZE, 1, ctypes.byref(resident))
        if not resident.value & 1:
            _madvise(start, size, _MADV_POPULATE_WRITE)


def aligned_offset(minimum: int) -> int:
    """Return the first offset, at least `minimum`, at which a scratch buffer is aligned for every dtype."""
    return -(-minimum // _ALIGNMENT) * _ALIGNMENT
