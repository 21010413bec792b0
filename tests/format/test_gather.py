"""Copies of chunks with their checksums: equal to slices of NumPy arrays, from the C module and without it."""

from __future__ import annotations

import itertools
import math
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from tests.support.threads import assert_releases_interpreter
from tstore.core.format.arrays import gather as module
from tstore.core.format.arrays.array_metadata import ArrayMeta
from tstore.core.format.arrays.gather import Source, gather, scatter, scatter_region
from tstore.core.format.arrays.grid import view_as_chunks
from tstore.core.format.checksums import BLOCK

Values = npt.NDArray[Any]

compiled = pytest.mark.skipif(module.kernels is None, reason="installed without a C compiler")
DTYPES = ["?", "u1", "<f2", ">f2", "<i4", ">f4", "f8", ">c8", "c16", ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn]


@pytest.fixture(params=["in C", "NumPy"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "NumPy":
        monkeypatch.setattr(module, "kernels", None)
    elif module.kernels is None:
        pytest.skip("installed without a C compiler")


def expected_chunks(values: Values, chunks: tuple[int, ...], fill: Any) -> list[bytes]:
    """Return the bytes of each chunk, by padding the values and slicing."""
    counts = [-(-n // c) for n, c in zip(values.shape, chunks, strict=True)]
    padded = np.full([n * c for n, c in zip(counts, chunks, strict=True)], fill, values.dtype)
    padded[tuple(slice(n) for n in values.shape)] = values
    return [
        padded[tuple(slice(i * c, (i + 1) * c) for i, c in zip(at, chunks, strict=True))].tobytes()
        for at in itertools.product(*map(range, counts))
    ]


def checks_of(chunk: bytes, block: int) -> bytes:
    return b"".join(xxhash.xxh3_128_digest(chunk[i : i + block]) for i in range(0, len(chunk), block))


@st.composite
def views(draw: st.DrawFn) -> tuple[Values, tuple[int, ...], bytes]:
    """Draw a view of any order, steps and alignment, the shape of its chunks, and the bytes of a fill value."""
    dtype = np.dtype(draw(st.sampled_from([*DTYPES, "S3", "V5", "M8[s]"])))
    shape = draw(st.lists(st.integers(0, 7), max_size=4))
    steps = [draw(st.sampled_from([1, 1, 2, 3, -1, -2])) for _ in shape]
    margins = [draw(st.integers(0, 2)) for _ in shape]
    lengths = [n * abs(s) + m for n, s, m in zip(shape, steps, margins, strict=True)]
    size = math.prod(lengths) * dtype.itemsize
    shift = draw(st.integers(0, 9))
    seed = draw(st.integers(0, 99))
    memory = np.random.default_rng(seed).integers(0, 256, size + shift, np.uint8)
    whole = memory[shift:].view(dtype).reshape(lengths, order=draw(st.sampled_from("CF")))
    values = whole[(*(slice(None, None, s) for s in steps), ...)][(*map(slice, shape), ...)]
    values = values.transpose(draw(st.permutations(range(values.ndim))))
    if values.ndim and draw(st.booleans()):
        values = np.broadcast_to(values, (2, *values.shape))[:, ...]
    chunks = tuple(draw(st.integers(1, n + 2)) for n in values.shape)
    fill = draw(st.binary(min_size=dtype.itemsize, max_size=dtype.itemsize))
    return values, chunks, fill


@compiled
@given(st.lists(views(), max_size=3), st.integers(1, 40), st.integers(0, 3))
def test_chunks_of_any_view_are_copied_and_hashed(parts, block, gap):
    expected: list[list[bytes]] = []
    arguments, offset = [], gap
    for values, chunks, fill in parts:
        bits = values.view(f"V{values.itemsize}")
        expected.append(expected_chunks(bits, chunks, np.frombuffer(fill, bits.dtype)[0]))
        arguments.append((values, chunks, fill, offset))
        offset += sum(map(len, expected[-1])) + gap
    buffer = np.full(offset, 0xA5, np.uint8)
    checks = module.kernels.gather(arguments, buffer, block)
    assert checks == [b"".join(checks_of(chunk, block) for chunk in each) for each in expected]
    pad = b"\xa5" * gap
    assert buffer.tobytes() == pad + b"".join(b"".join(each) + pad for each in expected)


@pytest.mark.parametrize(
    ("shape", "chunks"),
    [((), ()), ((5,), (2,)), ((7, 10), (3, 4)), ((6, 8), (3, 4)), ((4, 4), (4, 4)), ((2, 3, 5), (1, 2, 9))],
)
def test_gathered_chunks_are_padded_with_the_fill_value(implementation, shape, chunks):
    for dtype in DTYPES:
        meta = ArrayMeta.new(shape, np.dtype(dtype).newbyteorder("="), chunks, fill_value=1)
        values = np.arange(math.prod(shape)).reshape(shape).astype(dtype)
        expected = expected_chunks(values.astype(meta.dtype), chunks, meta.fill_value)
        once = sum(map(len, expected))
        buffer = np.empty(2 * once, np.uint8)
        sources = [Source(values.astype(meta.dtype), meta, 0), Source(values, meta, once)]  # one may need a cast
        checks = b"".join(checks_of(chunk, BLOCK) for chunk in expected)
        assert gather(sources, buffer) == [checks, checks]
        assert buffer.tobytes() == 2 * b"".join(expected)


@pytest.mark.parametrize("columns", [3, 512, 1000])
def test_chunks_of_several_blocks_have_a_checksum_for_each(implementation, columns):
    values = np.random.default_rng(0).random((700, 2000), np.float32)
    meta = ArrayMeta.new(values.shape, "f4", (600, columns))
    expected = expected_chunks(values, meta.chunks, 0)
    buffer = np.empty(sum(map(len, expected)), np.uint8)
    assert gather([Source(values, meta, 0)], buffer) == [b"".join(checks_of(c, BLOCK) for c in expected)]
    assert buffer.tobytes() == b"".join(expected)


@pytest.mark.parametrize("shape", [(), (5,), (3, 4)])
@pytest.mark.parametrize("dtype", ["f4", "u1", ml_dtypes.bfloat16])
def test_a_list_of_arrays_gives_a_chunk_of_each(implementation, dtype, shape):
    arrays = [np.arange(i, i + math.prod(shape)).reshape(shape).astype(dtype) for i in range(7)]
    if len(shape) == 2:
        arrays[3] = np.asfortranarray(arrays[3])
    meta = ArrayMeta.new(shape, dtype, shape)
    buffer = np.empty(7 * meta.encoded_size, np.uint8)
    chunks = [array.tobytes() for array in arrays]
    assert gather([Source(arrays, meta, 0)], buffer) == [b"".join(checks_of(chunk, BLOCK) for chunk in chunks)]
    assert buffer.tobytes() == b"".join(chunks)


@compiled
def test_the_interpreter_runs_on_while_chunks_are_gathered():
    values, buffer = np.ones((1 << 14, 1 << 14), np.uint8), np.empty(1 << 28, np.uint8)
    source = (values, (1 << 14, 1 << 8), b"\0", 0)
    assert_releases_interpreter(lambda: module.kernels.gather([source], buffer, 1 << 10))


@compiled
@pytest.mark.parametrize(
    ("source", "error"),
    [
        ((np.zeros((2, 2)), (2, 2), bytes(8), 1), "do not fit into 31 bytes"),
        ((np.zeros((3, 2)), (2, 2), bytes(8), 0), "do not fit into 32 bytes"),
        ((np.zeros((2, 2)), (2, 2), bytes(8), -1), "no offset -1 in 32 bytes"),
        ((np.zeros((2, 2)), (2, 2), bytes(8), 33), "no offset 33 in 32 bytes"),
        (
            (np.zeros((2, 2)), (2,), bytes(8), 0),
            "chunks of 1 axes and a fill value of 8 bytes for values of 2 axes",
        ),
        ((np.zeros((2, 2)), (2, 2), bytes(4), 0), "a fill value of 4 bytes for values of 2 axes and 8 bytes"),
        ((np.zeros((2, 2)), (2, 0), bytes(8), 0), "chunks of 0 elements; expected at least 1"),
        ((np.zeros((2, 2)), (1 << 40, 1 << 40), bytes(8), 0), "the chunks are too large"),
        ((np.zeros((2, 2)), (2, "2"), bytes(8), 0), "integer"),
        ((np.broadcast_to(np.zeros(1), (1 << 30, 1 << 29)), (1, 1), bytes(8), 0), "do not fit into 32 bytes"),
        ((np.zeros(3, "V0"), (1,), b"", 0), "a fill value of 0 bytes for values of 1 axes and 0 bytes"),
        ((object(), (1,), b"", 0), "bytes-like object is required"),
        (([np.zeros(2)] * 3, (2,), bytes(8), 0), "do not fit into 32 bytes"),
        (([np.zeros(2), np.zeros(1)], (2,), bytes(8), 0), "differ in their shape or itemsize"),
        (([np.zeros(2), np.zeros(2, "f4")], (2,), bytes(8), 0), "differ in their shape or itemsize"),
        (([np.zeros(2), object()], (2,), bytes(8), 0), "bytes-like object is required"),
        (([], (2,), bytes(8), 0), "a source without arrays"),
        ((np.zeros(2), (2,), bytes(8), "0"), "integer"),
        (np.zeros(3), "must be a tuple"),
    ],
)
def test_sources_that_do_not_fit_are_refused(source, error):
    buffer = np.full(32, 7, np.uint8)
    fits = (np.zeros((2, 2)), (2, 2), bytes(8), 0)
    with pytest.raises((ValueError, TypeError, OverflowError), match=error):
        module.kernels.gather([fits, source], buffer, 1)
    assert (buffer == 7).all()
    with pytest.raises(ValueError, match="blocks of 0 bytes"):
        module.kernels.gather([fits], buffer, 0)


@st.composite
def targets(draw: st.DrawFn) -> tuple[Values, Values]:
    """Draw an array of any order, steps and alignment, and a view of its chunks."""
    dtype = np.dtype(draw(st.sampled_from([*DTYPES, "S3", "V5", "M8[s]"])))
    chunks = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    steps = [draw(st.sampled_from([1, 1, 2, -1])) for _ in chunks]
    lengths = [c * draw(st.integers(1, 3)) * abs(s) for c, s in zip(chunks, steps, strict=True)]
    memory = np.zeros(math.prod(lengths) * dtype.itemsize + 9, np.uint8)[draw(st.integers(0, 9)) :]
    whole = (
        memory[: math.prod(lengths) * dtype.itemsize]
        .view(dtype)
        .reshape(lengths, order=draw(st.sampled_from("CF")))
    )
    values = whole[(*(slice(None, None, s) for s in steps),)]
    return values, view_as_chunks(values, chunks)


@pytest.mark.parametrize("in_c", [True, False])
@given(st.data())
def test_chunks_are_scattered_to_any_view_and_hashed(in_c, data):
    if in_c and module.kernels is None:
        pytest.skip("installed without a C compiler")
    values, target = data.draw(targets())
    size = values.nbytes // math.prod(target.shape[: values.ndim])
    chunks = np.random.default_rng(values.size).integers(0, 256, values.nbytes, np.uint8)
    with pytest.MonkeyPatch.context() as patch:
        if not in_c:
            patch.setattr(module, "kernels", None)
        checks = scatter(chunks, target)
    assert checks == checks_of(chunks.tobytes(), size)
    stored = expected_chunks(values.view(f"V{values.itemsize}"), target.shape[values.ndim :], 0)
    assert b"".join(stored) == chunks.tobytes()


@compiled
@pytest.mark.parametrize(
    ("size", "first", "block"), [(7, 1, 9), (9, 1, 9), (8, 3, 9), (8, -1, 9), (8, 1, 0), (0, 1, 9)]
)
def test_chunks_that_do_not_fill_an_array_are_not_scattered(size, first, block):
    target = np.zeros((2, size and 4), np.uint8)
    with pytest.raises(ValueError, match="do not fill"):
        module.kernels.scatter(np.ones(size, np.uint8), target, first, block)
    assert not target.any()
    target.flags.writeable = False
    with pytest.raises((ValueError, BufferError)):
        module.kernels.scatter(np.ones(target.size, np.uint8), target, 1, 9)


@compiled
def test_the_interpreter_runs_on_while_chunks_are_scattered():
    data, target = np.ones(1 << 28, np.uint8), np.empty((1 << 14, 1 << 14), np.uint8)
    chunks = view_as_chunks(target, (1 << 14, 1 << 8))
    assert_releases_interpreter(lambda: module.kernels.scatter(data, chunks, 2, 1 << 10))


@st.composite
def regions(draw: st.DrawFn) -> tuple[Values, Values, tuple[int, ...], tuple[int, ...]]:
    """Draw the values of a box of chunks, a target with any strides, the chunks' shape and the region's start."""
    dtype = np.dtype(draw(st.sampled_from([*DTYPES, "S3", "V5", "M8[s]"])))
    chunks = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))
    start = tuple(draw(st.integers(0, c - 1)) for c in chunks)
    shape = [draw(st.integers(1, 3 * c)) for c in chunks]
    counts = [-(-(first + n) // c) for first, n, c in zip(start, shape, chunks, strict=True)]
    box = np.random.default_rng(math.prod(shape)).integers(
        0, 256, math.prod(counts) * math.prod(chunks) * dtype.itemsize, np.uint8
    )
    steps = [draw(st.sampled_from([1, 1, 2, -1])) for _ in chunks]
    room = np.zeros(
        [n * abs(step) for n, step in zip(shape, steps, strict=True)], dtype, draw(st.sampled_from("CF"))
    )
    target = room[tuple(slice(None, None, step) for step in steps)]
    return box.view(f"V{dtype.itemsize}").reshape((*counts, *chunks)), target, chunks, start


@pytest.mark.parametrize("in_c", [True, False])
@given(regions())
def test_a_region_of_a_box_of_chunks_is_copied_and_the_chunks_are_hashed(in_c, drawn):
    if in_c and module.kernels is None:
        pytest.skip("installed without a C compiler")
    box, target, chunks, start = drawn
    data = box.reshape(-1).view(np.uint8)
    with pytest.MonkeyPatch.context() as patch:
        if not in_c:
            patch.setattr(module, "kernels", None)
        checks = scatter_region(data, target, chunks, start)
    assert checks == checks_of(data.tobytes(), math.prod(chunks) * target.itemsize)
    axes = [axis for i in range(len(chunks)) for axis in (i, len(chunks) + i)]
    whole = box.transpose(axes).reshape([n * c for n, c in zip(box.shape, chunks, strict=False)])
    expected = whole[tuple(slice(first, first + n) for first, n in zip(start, target.shape, strict=True))]
    assert np.ascontiguousarray(target).tobytes() == np.ascontiguousarray(expected).tobytes()


@compiled
@pytest.mark.parametrize(
    ("chunk", "start", "block"),
    [
        *[((length,), (0,), 9) for length in (3, 0, -2, 1 << 62)],
        *[((2,), (first,), 9) for first in (1, 2, -1)],
        ((2, 2), (0, 0), 9),
        ((2,), (0, 0), 9),
        ((2,), (0,), 0),
    ],
)
def test_bytes_that_are_not_the_chunks_of_a_region_are_refused(chunk, start, block):
    target = np.zeros(4, np.uint8)
    with pytest.raises(ValueError, match=r"expected at least 1|are not the chunks of a region"):
        module.kernels.scatter_region(np.ones(4, np.uint8), target, chunk, start, block)
    assert not target.any()


@compiled
def test_values_of_no_bytes_are_refused():
    """A division by the size of an element would end the process."""
    empty = np.zeros(4, "V0")
    with pytest.raises(ValueError, match="are not the chunks of a region"):
        module.kernels.scatter_region(np.ones(4, np.uint8), empty, (2,), (0,), 9)
    with pytest.raises(ValueError, match="do not fill"):
        module.kernels.scatter(b"", empty, 0, 9)
    with pytest.raises(ValueError, match="0 bytes"):
        module.kernels.gather([(empty, (2,), b"", 0)], np.zeros(9, np.uint8), 9)
