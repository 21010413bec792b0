"""Positions beyond 2^32, without arrays of that size."""

import itertools

import exmy
import numpy as np
from exmy.elements import Kind
from exmy.groups import Groups
from exmy.threads import split_at_tiles

BIG = (1 << 32) + 1000


def test_sizes_and_slices():
    for bits in range(2, 17):
        assert exmy.packed_size(BIG, bits) == BIG // 8 * bits
        assert exmy.slice_bytes(bits, 1 << 32, BIG, BIG) == (bits << 29, BIG // 8 * bits)
    parts = split_at_tiles(BIG, 3)
    assert parts[0][0] == 0
    assert parts[-1][1] == BIG
    assert all(a[1] == b[0] and b[0] % exmy.TILE == 0 for a, b in itertools.pairwise(parts))


def test_groups_beyond(level):
    rows, width = (1 << 20) + 4, 4096  # rows from 2^20 on lie beyond 2^32
    first = 1 << 32
    x = np.random.default_rng(0).standard_normal((4, width)).astype(np.float32)
    layout = exmy.Format("e3m2").layout
    for groups, scales in [
        (Groups((rows, width), 1, None), np.exp2(np.arange(rows) % 7)),
        (Groups((rows, width), 1, 2048), np.exp2(np.arange(rows * 2) % 5)),
        (Groups((rows, width), 0, None), np.exp2(np.arange(width) % 5)),
    ]:
        each = scales[groups.index(first, first + x.size)].reshape(x.shape)
        packed = np.zeros(exmy.packed_size(x.size, 6), np.uint8)
        float32_scales = scales.astype(np.float32)
        exmy.kernels.encode_groups(Kind.FLOAT32, layout, groups, first, float32_scales, x.reshape(-1), packed)
        np.testing.assert_array_equal(packed, exmy.encode_packed((x * each).astype(np.float32), "e3m2"))
        y = np.zeros(x.size, np.float32)
        exmy.kernels.decode_groups(Kind.FLOAT32, layout, groups, first, (1 / scales).astype("f4"), packed, y)
        expected = exmy.round((x * each).astype(np.float32), "e3m2") / each
        np.testing.assert_array_equal(y.reshape(x.shape), expected)
