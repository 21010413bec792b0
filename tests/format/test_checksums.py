"""The checksums of many blocks: equal to the xxhash package's, from the C module and without it."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from tests.support.threads import assert_releases_interpreter
from tstore.core.format import checksums
from tstore.core.format.checksums import BLOCK, block_checks

compiled = pytest.mark.skipif(checksums.kernels is None, reason="installed without a C compiler")


def expected(data: bytes, chunk: int, block: int = BLOCK) -> bytes:
    chunks = [data[i : i + chunk] for i in range(0, max(len(data), 1), chunk)]
    return b"".join(
        xxhash.xxh3_128_digest(c[i : i + block]) for c in chunks for i in range(0, max(len(c), 1), block)
    )


@pytest.fixture(params=["in C", "xxhash"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "xxhash":
        monkeypatch.setattr(checksums, "kernels", None)
    elif checksums.kernels is None:
        pytest.skip("installed without a C compiler")


# the hash has other code for up to 3, 8, 16, 128 and 240 bytes, and the lock is released from 32 KiB
@pytest.mark.parametrize("size", [1, 3, 8, 16, 128, 240, 241, 1023, 1024, 1025, 40_000])
def test_checks_of_blocks_are_those_of_xxhash(implementation, size):
    data = np.random.default_rng(size).bytes(3 * size + size // 2)
    for length in (0, 1, size - 1, size, size + 1, 2 * size, len(data)):
        assert block_checks(memoryview(data)[:length], size) == expected(data[:length], size)


@compiled
@given(st.binary(max_size=2000), st.integers(1, 600), st.integers(1, 600), st.integers(0, 7))
def test_the_c_module_equals_xxhash_at_any_alignment(data, chunk, block, start):
    view = memoryview(data)[start:]
    assert checksums.kernels.block_checks(view, chunk, block) == expected(bytes(view), chunk, block)


def test_a_block_of_a_chunk_is_a_mebibyte(implementation):
    data = np.random.default_rng(0).bytes(2 * BLOCK + 5)
    assert block_checks(memoryview(data)) == expected(data, len(data), 1 << 20)
    assert block_checks(memoryview(data), BLOCK + 3) == expected(data, BLOCK + 3, 1 << 20)


@compiled
def test_the_interpreter_runs_on_while_blocks_are_hashed():
    data = np.ones(1 << 29, np.uint8)
    assert_releases_interpreter(lambda: checksums.kernels.block_checks(data.data, 1 << 29, 1 << 10))


@compiled
@pytest.mark.parametrize("sizes", [(0, 1), (1, 0), (-1, 1)])
def test_chunks_and_blocks_without_bytes_are_refused(sizes):
    with pytest.raises(ValueError, match=r"bytes; expected at least 1$"):
        checksums.kernels.block_checks(b"abc", *sizes)
