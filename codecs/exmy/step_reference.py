"""The specification of the step codec in plain Python: FORMAT.md, section 10.

It decodes whatever the C kernels write, about a thousand times slower. Its encoder makes simpler choices, which
decode to the same elements: all changes are dense, and each exponent of the base has its table.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from exmy.elements import Array
from exmy.errors import FormatError

__all__ = ["decode", "encode"]

RAW, EQUAL, DENSE, SPARSE = range(4)
SYMBOLS, CONTEXTS, CLASSES, LONG = 33, 32, 8, 4096


def _ordered(code: int, bits: int) -> int:
    """Return a code as an integer in the order of values, modulo 2^bits; this is its own inverse."""
    return code ^ ((1 << (bits - 1)) - 1) if code >> (bits - 1) else code


def _number(old: int, new: int, bits: int) -> int:
    difference = (_ordered(new, bits) - _ordered(old, bits)) % (1 << bits)
    if difference > 1 << (bits - 1):
        return 2 * ((1 << bits) - difference) + 1
    return 2 * difference if difference else 1


def _element(old: int, number: int, bits: int) -> int:
    difference = (number >> 1) * (-1 if number & 1 else 1)
    return _ordered((_ordered(old, bits) + difference) % (1 << bits), bits)


class _Bits:
    """Bits of bytes, from the lowest bit of each byte on; zeros follow the last."""

    def __init__(self, data: bytes, at: int = 0) -> None:
        self.value = int.from_bytes(data, "little")
        self.at = at

    def take(self, count: int) -> int:
        result = self.value >> self.at & ((1 << count) - 1)
        self.at += count
        return result


class _Reader:
    """The bytes of a step, which raise `FormatError` when they end."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def take(self, count: int) -> bytes:
        self.at += count
        if self.at > len(self.data):
            raise FormatError("a step is truncated")
        return self.data[self.at - count : self.at]

    def integer(self, size: int) -> int:
        return int.from_bytes(self.take(size), "little")


def _spread(frequencies: Sequence[int], log: int) -> list[int]:
    """Return the symbol of each state."""
    states = 1 << log
    symbols, position = [0] * states, 0
    for symbol, frequency in enumerate(frequencies):
        for _ in range(frequency):
            symbols[position] = symbol
            position = (position + (states >> 1) + (states >> 3) + 3) % states
    return symbols


def _steps(frequencies: Sequence[int], log: int) -> list[tuple[int, int, int]]:
    """Return for each state its symbol, the number of bits that it reads, and what it adds to them."""
    numbers, result = list(frequencies), []
    for symbol in _spread(frequencies, log):
        x = numbers[symbol]
        numbers[symbol] += 1
        bits = log - (x.bit_length() - 1)
        result.append((symbol, bits, (x << bits) - (1 << log)))
    return result


def _frequencies(bits: _Bits, log: int) -> list[int]:
    last, most = bits.take(6), bits.take(6)
    if last >= SYMBOLS or most > last:
        raise FormatError("a table of a step is invalid")
    result = [0] * SYMBOLS
    for symbol in range(last + 1):
        if symbol == most:
            continue
        if length := bits.take(4):
            below = min(length - 1, 2)
            result[symbol] = ((1 << below) + bits.take(below)) << (length - 1 - below)
        if length > log:
            raise FormatError("a table of a step is invalid")
    result[most] = (1 << log) - sum(result)
    if result[most] < 1:
        raise FormatError("a table of a step is invalid")
    return result


def _lanes(count: int) -> list[tuple[int, int]]:
    lanes = 1 if count < LONG else 4
    part = -(-count // lanes)
    return [(start, min(start + part, count)) for start in range(0, part * lanes, part)]


def _read_numbers(reader: _Reader, fields: Sequence[int]) -> list[int]:
    """Read a sequence of numbers, one for each field (the exponent or class of an element)."""
    log, contexts = reader.take(2)
    if not (8 <= log <= 10 and 1 <= contexts <= CONTEXTS):
        raise FormatError("the header of a sequence in a step is invalid")
    bounds = [0, *reader.take(contexts - 1), 256]
    if any(a >= b for a, b in pairwise(bounds)):
        raise FormatError("the contexts of a step are not in order")
    context = [c for c in range(contexts) for _ in range(bounds[c], bounds[c + 1])]
    bits = _Bits(reader.data[reader.at :])
    tables = [_steps(_frequencies(bits, log), log) for _ in range(contexts)]
    reader.take(-(-bits.at // 8))
    lanes = _lanes(len(fields))
    headers = [(reader.integer(4), reader.integer(2)) for _ in lanes]
    numbers = []
    for (start, stop), (size, state) in zip(lanes, headers, strict=True):
        first, state = state >> 12, state & 4095
        if first > 7 or state >> log:
            raise FormatError("a lane of a step is invalid")
        lane = _Bits(reader.take(size), first)
        for field in fields[start:stop]:
            symbol, count, low = tables[context[field]][state]
            numbers.append(1 << symbol | lane.take(symbol))
            state = low + lane.take(count)
        if lane.at != 8 * size or state:
            raise FormatError("a lane of a step does not end where its bytes do")
    return numbers


def decode(bits: int, mantissa_bits: int, old: Array, data: Array, out: Array) -> None:
    """Write the elements of a step into out. Raise `FormatError` if the bytes are invalid."""
    exponents = (1 << (bits - 1 - mantissa_bits)) - 1
    base = [int(x) & ((1 << bits) - 1) for x in old]
    fields = [x >> mantissa_bits & exponents for x in base]
    reader = _Reader(data.tobytes())
    kind, count = reader.integer(1), len(base)
    if kind > SPARSE or (kind >= DENSE and not 0 < count < 1 << 31):
        raise FormatError("a step is of an unknown kind")
    if kind == RAW:
        out[:] = np.frombuffer(reader.take(out.nbytes), out.dtype)
        if out.size and int(out.max()) >> bits:
            raise FormatError("an element of a step has too many bits")
    elif kind == EQUAL:
        out[:] = old
    elif kind == DENSE:
        numbers = _read_numbers(reader, fields)
        out[:] = [_element(a, t, bits) for a, t in zip(base, numbers, strict=True)]
    else:
        out[:] = old
        positions = _positions(reader, fields, exponents)
        numbers = _read_numbers(reader, [fields[i] for i in positions])
        for i, t in zip(positions, numbers, strict=True):
            out[i] = _element(base[i], t, bits)
    if reader.at != len(reader.data):
        raise FormatError("bytes follow a step")


def _positions(reader: _Reader, fields: list[int], exponents: int) -> list[int]:
    """Read which elements changed, in order."""
    classes = reader.integer(1)
    if not 1 <= classes <= CLASSES:
        raise FormatError("the classes of a step are invalid")
    bounds = [0, *reader.take(classes - 1), 256]
    if any(a >= b for a, b in pairwise(bounds)) or (classes > 1 and bounds[-2] > exponents):
        raise FormatError("the classes of a step are not in order")
    counts = [reader.integer(4) for _ in range(classes)]
    if not 0 < sum(counts) <= len(fields) // 8:
        raise FormatError("a sparse step changes too many elements or none")
    numbers = iter(_read_numbers(reader, [j for j in range(classes) for _ in range(counts[j])]))
    positions = []
    for j, count in enumerate(counts):
        members = [i for i, field in enumerate(fields) if bounds[j] <= field < bounds[j + 1]]
        rank = -1
        for _ in range(count):
            rank += next(numbers)
            if rank >= len(members):
                raise FormatError("a sparse step changes an element beyond the last")
            positions.append(members[rank])
    return sorted(positions)


def _scaled(counts: Counter[int], log: int) -> tuple[list[int], int]:
    most = max(range(SYMBOLS), key=lambda symbol: counts[symbol])
    result = [0] * SYMBOLS
    for symbol, count in counts.items():
        f = max(1, (count << log) // counts.total())
        drop = max(0, f.bit_length() - 3)
        result[symbol] = f >> drop << drop
    result[most] = (1 << log) - (sum(result) - result[most])
    return result, most


def _table_bits(frequencies: list[int], most: int) -> str:
    """Return the bits of a table, the first first."""
    last = max(symbol for symbol, f in enumerate(frequencies) if f)
    fields = [(last, 6), (most, 6)]
    for symbol, f in enumerate(frequencies[: last + 1]):
        if symbol != most:
            length = f.bit_length()
            below = max(0, min(length - 1, 2))
            fields += [(length, 4), (f >> max(0, length - 1 - below) & ((1 << below) - 1), below)]
    return "".join(format(value, f"0{width}b")[::-1] for value, width in fields if width)


def _bytes(bits: str) -> bytes:
    return int(bits[::-1] or "0", 2).to_bytes(-(-len(bits) // 8), "little")


def _write_lane(
    numbers: list[int], contexts: list[int], tables: list[list[int]], log: int, greatest: int
) -> bytes:
    """Return the length, the state and the bytes of a lane."""
    states: list[dict[tuple[int, int], int]] = []
    for frequencies in tables:
        seen, places = list(frequencies), {}
        for state, symbol in enumerate(_spread(frequencies, log)):
            places[symbol, seen[symbol]] = state
            seen[symbol] += 1
        states.append(places)
    state, parts = 0, []
    for t, c in zip(reversed(numbers), reversed(contexts), strict=True):
        symbol = t.bit_length() - 1
        x, count = state + (1 << log), 0
        while x >> count >= 2 * tables[c][symbol]:
            count += 1
        low = x & ((1 << count) - 1)
        parts.append((low << symbol | t & ((1 << symbol) - 1), count + symbol))
        state = states[c][symbol, x >> count]
    bits = "".join(format(value, f"0{width}b")[::-1] for value, width in reversed(parts) if width)
    unused = -len(bits) % 8
    data = _bytes("0" * unused + bits)
    return len(data).to_bytes(4, "little") + (state | unused << 12).to_bytes(2, "little") + data


def encode(bits: int, mantissa_bits: int, old: Array, new: Array) -> bytes:
    """Return the bytes of a step."""
    base, target = old.tolist(), new.tolist()
    raw = bytes([RAW]) + new.tobytes()
    if base == target:
        return bytes([EQUAL])
    exponents = (1 << (bits - 1 - mantissa_bits)) - 1
    fields = [x >> mantissa_bits & exponents for x in base]
    numbers = [_number(a, b, bits) for a, b in zip(base, target, strict=True)]
    used = sorted(set(fields))
    bounds = used[1:] if len(used) <= CONTEXTS else []
    contexts = [sum(field >= bound for bound in bounds) for field in fields]
    log = 8 if len(base) < 1024 else 10
    scaled = [
        _scaled(Counter(t.bit_length() - 1 for t, c in zip(numbers, contexts, strict=True) if c == context), log)
        for context in range(len(bounds) + 1)
    ]
    tables = [frequencies for frequencies, _ in scaled]
    header = bytes([DENSE, log, len(tables), *bounds]) + _bytes("".join(_table_bits(*table) for table in scaled))
    lanes = [
        _write_lane(numbers[start:stop], contexts[start:stop], tables, log, bits)
        for start, stop in _lanes(len(base))
    ]
    dense = header + b"".join(lane[:6] for lane in lanes) + b"".join(lane[6:] for lane in lanes)
    return min(dense, raw, key=len)
