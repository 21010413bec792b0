"""The data types of arrays, and fill values."""

import base64
import math
import re

import numpy as np

from tests.support.independent_reader.frames import Newer, array, boolean, mapping, nat, need, text
from tests.support.independent_reader.low_bit import exmy_values


class Type:
    """A data type: its NumPy type in memory (little-endian), and the meaning of fill values."""

    def __init__(self, spec):
        name, conf = (
            (spec, {})
            if type(spec) is str
            else (mapping(spec).get("name"), mapping(spec).get("configuration", {}))
        )
        need(type(spec) is str or set(spec) <= {"name", "configuration"}, f"data type {spec!r}")
        self.name, self.struct, self.vlen, self.bits = text(name), False, None, None
        size = conf.get("length_bytes", 0)
        used = {"length_bytes"}
        if name in ("string", "variable_length_utf8", "variable_length_bytes", "bytes"):
            self.vlen, self.dtype, used = ("bytes" if "bytes" in name else "utf8"), np.dtype(object), set()
        elif re.fullmatch("bool|u?int(8|16|32|64)|float(16|32|64)|complex(64|128)", name):
            self.dtype, used = np.dtype(name), set()
        elif name == "bfloat16" or re.fullmatch("float(8|6|4)_e[0-9]m[0-9](b11)?(fn|fnu|fnuz)?", name):
            self.dtype, used = np.dtype("<u2" if name == "bfloat16" else "u1"), set()
        elif name in ("int2", "int4", "uint2", "uint4"):
            self.bits, self.dtype, used = int(name[-1]), np.dtype("u1" if name[0] == "u" else "i1"), set()
        elif name == "fixed_length_utf32":
            need(nat(size) % 4 == 0, f"data type {spec!r}")
            self.dtype = np.dtype(f"<U{size // 4}")
        elif name in ("null_terminated_bytes", "raw_bytes"):
            self.dtype = np.dtype(f"{'S' if name[0] == 'n' else 'V'}{nat(size)}")
        elif name in ("numpy.datetime64", "numpy.timedelta64"):
            unit, scale = conf.get("unit"), conf.get("scale_factor", 1)
            need(
                unit in ["Y", "M", "W", "D", "h", "m", "s", "ms", "us", "μs", "ns", "ps", "fs", "as", "generic"]
                and nat(scale) > 0,
                f"data type {spec!r}",
            )
            unit = "" if unit == "generic" else f"[{scale}{unit.replace('μ', 'u')}]"
            self.dtype, used = np.dtype(f"<{'M' if 'date' in name else 'm'}8{unit}"), {"unit", "scale_factor"}
        elif name == "structured":
            self.parts = [(text(f[0]), Type(f[1])) for f in array(conf.get("fields"))]
            self.dtype, self.struct, used = np.dtype([(n, t.dtype) for n, t in self.parts]), True, {"fields"}
        else:
            raise Newer(f"data type {spec!r}")
        need(set(conf) <= used, f"data type {spec!r}")

    def table(self):
        """The values of all codes of a type that NumPy lacks, as float64."""
        if self.name == "bfloat16":
            with np.errstate(invalid="ignore"):  # signaling NaN
                return (np.arange(65536, dtype="<u4") << 16).view("<f4").astype("f8")
        if self.name == "float8_e8m0fnu":
            return np.append(np.ldexp(1.0, np.arange(255) - 127), np.nan)
        m = re.fullmatch(r"float(\d)_e(\d)m(\d)(b11)?(\w*)", self.name)
        width, x, y = int(m[1]), int(m[2]), int(m[3])
        need(width == 1 + x + y, f"data type {self.name}")
        bias = 11 if m[4] else 2 ** (x - 1) if m[5] == "fnuz" else 2 ** (x - 1) - 1
        out = exmy_values(x, y, bias)
        if m[5] == "":
            special = (np.arange(1 << width) >> y) % (1 << x) == (1 << x) - 1
            out[special] = np.where(np.arange(1 << width) % (1 << y) == 0, np.copysign(np.inf, out), np.nan)[
                special
            ]
        elif self.name == "float8_e4m3fn":
            out[[0x7F, 0xFF]] = np.nan
        elif m[5] == "fnuz":
            out[0x80] = np.nan
        return out

    def values(self, codes):
        return self.table()[codes & (len(self.table()) - 1)]

    def number(self, value, dtype):
        if type(value) is str and value.startswith("0x"):
            need(len(value) == 2 + 2 * dtype.itemsize, f"fill value {value!r}")
            return np.frombuffer(bytes.fromhex(value[2:])[::-1], dtype.newbyteorder("<"))[0]
        special = {"NaN": np.nan, "Infinity": np.inf, "-Infinity": -np.inf}
        value = special.get(value, value) if type(value) is str else value
        need(type(value) in (int, float), f"fill value {value!r}")
        if dtype.kind == "f":
            return dtype.type(value)
        table = self.table()
        if math.isnan(
            value
        ):  # the positive one; where there are many, only the highest bit of the mantissa is set
            nans = np.flatnonzero(np.isnan(table))
            positive = nans[nans <= len(table) // 2]
            return dtype.type(positive[len(positive) // 2] if len(positive) else nans[0])
        same = np.flatnonzero((table == value) & (np.signbit(table) == np.signbit(float(value))))
        return dtype.type(same[0] if len(same) else np.nanargmin(np.abs(table - value)))

    def fill(self, value):
        d = self.dtype
        if self.vlen:
            return text(value) if self.vlen == "utf8" else base64.b64decode(text(value), validate=True)
        if self.struct or d.kind in "SV":
            raw = base64.b64decode(text(value), validate=True)
            need(len(raw) == d.itemsize or (d.kind == "S" and len(raw) < d.itemsize), "length of a fill value")
            return np.frombuffer(raw.ljust(d.itemsize, b"\0"), d)[0] if d.itemsize else np.zeros((), d)[()]
        if d.kind == "U":
            return text(value)
        if d.kind == "b":
            return boolean(value)
        if d.kind in "mM" or (d.kind in "iu" and re.fullmatch("u?int[0-9]+", self.name)):
            value = -(2**63) if d.kind in "mM" and value == "NaT" else value
            need(type(value) in (int, float) and int(value) == value, f"fill value {value!r}")
            return np.int64(int(value)).view(d) if d.kind in "mM" else d.type(int(value))
        if d.kind == "c":
            part = np.dtype(f"<f{d.itemsize // 2}")
            need(type(value) is list and len(value) == 2, f"fill value {value!r}")
            out = np.zeros(1, d)
            out.real, out.imag = (self.number(v, part) for v in value)
            return out[0]
        return self.number(value, d)
