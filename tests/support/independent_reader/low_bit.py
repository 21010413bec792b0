"""Chunks of low-bit floats, from the document of the eXmY format."""

import math
import re

import numpy as np

from tests.support.independent_reader.frames import need, text


def exmy_values(x, y, bias):
    code = np.arange(1 << (1 + x + y))
    e, m = code >> y & (1 << x) - 1, code & (1 << y) - 1
    value = np.ldexp((e > 0) + m / 2.0**y, np.maximum(e, 1) - bias)
    return np.where(code >> (x + y), -value, value)


def exmy_format(name):
    m = re.fullmatch(r"e(0|[1-9]\d*)m(0|[1-9]\d*)(?:b(0|-?[1-9]\d*))?", text(name))
    need(m, f"format {name!r}")
    x, y = int(m[1]), int(m[2])
    standard = 2 ** (x - 1) - 1 if x else 1
    bias = standard if m[3] is None else int(m[3])
    need(x <= 8 and 2 <= 1 + x + y <= 16 and -512 <= bias <= 512, f"format {name!r}")
    return x, y, standard, bias


def exmy_unpack(data, n, width):
    planes = [8, 8] if width == 16 else [p for p in (8, 4, 2, 1) if width & p]
    data = np.frombuffer(data, "u1")
    need(len(data) == -(-n // 8) * width, "length of packed codes")
    out = []
    for first, tiles, size in ((0, n // 256, 256), (n // 256, 1, -(-(n % 256) // 8) * 8)):
        part = data[first * 32 * width :][: tiles * size * width // 8].reshape(tiles, size * width // 8)
        codes, low, start = np.zeros((tiles, size), "u4"), 0, 0
        for p in planes:
            q = size * p // 8
            plane = part[:, start : start + q].astype("u4")
            codes |= np.concatenate([plane >> p * k & (1 << p) - 1 for k in range(8 // p)], axis=1) << low
            low, start = low + p, start + q
        out.append(codes.ravel())
    return np.concatenate(out)[:n]


def exmy_decode(conf, data, type_name, shape):
    x, y, standard, bias = exmy_format(conf.get("format"))
    need(type_name in ("float16", "bfloat16", "float32", "float64"), f"exmy of {type_name}")
    n, width, scale, axis, block = (
        math.prod(shape),
        1 + x + y,
        conf.get("scale", "search"),
        conf.get("axis"),
        conf.get("block"),
    )
    number = type(scale) in (int, float)
    need(
        (number and 2.0**-125 <= scale <= 2.0**125) or scale in ("search", "max", "none", "float", "e4m3", "6bit"),
        "scale",
    )
    need(block in (None, 16, 32, 64, 128, 256) and type(block) is not bool, "block")
    need(not (scale == "none" and (axis is not None or block is not None)), "axis beside this scale")
    axis = -1 if axis is None and block else axis
    if axis is None:
        groups, each = (), n
    else:
        need(type(axis) is int and -len(shape) <= axis < len(shape), "axis")
        axis %= len(shape)
        each = block or shape[axis]
        need(shape[axis] % each == 0, "block")
        groups = shape[:axis] + ((shape[axis] // block,) if block else ()) + shape[axis + 1 :]
    g = math.prod(groups)
    base = bias if scale == "none" else standard
    need(len(data) >= 8 and not any(data[2:8]), "header of a chunk")
    stored = int.from_bytes(data[:2], "little", signed=True)
    at, offsets, scales = 8, np.zeros(g, int), np.ones(g, "f4")
    if number and axis is None:
        scales[:] = np.float32(scale)
    elif scale == "float":
        scales, at = np.frombuffer(data[8 : 8 + 4 * g], "<f4"), 8 + 4 * g
    elif scale == "e4m3" or number:
        unit, codes, at = np.frombuffer(data[8:12], "<f4"), np.frombuffer(data[12 : 12 + g], "u1"), 12 + g
        need(len(codes) == g and codes.min() >= 1 and codes.max() <= 127, "codes of scales")
        scales = (exmy_values(4, 3, 7)[codes] * unit.astype("f8")).astype("f4")
    elif scale == "6bit":
        run = max(1, 256 // each)
        units, at = -(-g // run), 8 + 2 * -(-g // run)
        unit = (np.frombuffer(data[8:at], "<u2").astype("<u4") << 16).view("<f4").astype("f8")
        end = at + -(-g // 8) * 6
        codes, at = exmy_unpack(data[at:end], g, 6), end
        need(len(unit) == units and codes.min() >= 1 and np.isfinite(unit).all(), "codes of scales")
        scales = (codes * np.repeat(unit, run)[:g]).astype("f4")
    elif scale != "none" and axis is not None:
        offsets, at = np.frombuffer(data[8 : 8 + g], "u1").astype(int), 8 + g
    need(len(offsets) == len(scales) == g and (scales > 0).all() and np.isfinite(scales).all(), "scales")
    need(scale in ("search", "max") or stored == base, "bias")
    need(stored >= -512 and stored + offsets.max() <= 512, "bias")
    h = -(-at // 8) * 8
    need(not any(data[at:h]), "padding of a chunk")
    rest = data[h:]
    if number and width > 8:
        upper = -(-n // 8) * 8
        codes = exmy_unpack(rest[:upper], n, 8) << (width - 8) | exmy_unpack(rest[upper:], n, width - 8)
    else:
        codes = exmy_unpack(rest, n, width)

    def spread(of_groups):
        if axis is None:
            return of_groups.reshape(())
        wide = of_groups.reshape(groups)
        return np.repeat(wide, block, axis) if block else np.expand_dims(wide, axis)

    value = exmy_values(x, y, stored)[codes].reshape(shape) * spread(scales).astype("f8")
    value = np.ldexp(value, -spread(offsets))
    return round_to(value, type_name)


def round_to(value, type_name):
    """float64 rounded once, with the largest finite number in place of infinity."""
    with np.errstate(over="ignore", under="ignore"):
        if type_name != "bfloat16":
            out, top = value.astype(type_name), np.finfo(type_name).max
            return np.where(np.isinf(out), np.copysign(top, out), out).astype(type_name)
        exponent = np.maximum(np.frexp(value)[1] - 1, -126)
        out = np.ldexp(np.rint(np.ldexp(value, 7 - exponent)), exponent - 7)
        out = np.where(np.abs(out) >= 2.0**128, np.copysign(2.0**128 - 2.0**120, out), out)
        return (out.astype("<f4").view("<u4") >> 16).astype("<u2")
