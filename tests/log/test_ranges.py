"""The cache of decoded ranges."""

from __future__ import annotations

from tstore.core.log.pages import Ranges


def test_the_most_recently_used_ranges_stay_up_to_a_bound() -> None:
    cached = Ranges[int, bytes]()
    for first in (0, 1000):
        for number in range(first, first + 1000):
            cached.put(number, b"", 1 << 20)
        kept = [number for number in range(first + 1000) if number in cached]
        assert 16 <= len(kept) <= 64
        assert kept == list(range(kept[0], first + 1000))
    assert cached.get(kept[0]) == b""
    cached.put(-1, b"", 1 << 20)
    assert kept[0] in cached
    assert kept[1] not in cached


def test_a_range_longer_than_the_bound_is_cached_alone() -> None:
    cached = Ranges[str, int]()
    cached.put("a", 1, 10)
    assert cached.put("long", 2, 1 << 30) == 2
    assert cached.get("long") == 2
    assert cached.get("a") is None


def test_threads_that_read_the_same_range_share_what_the_first_cached() -> None:
    cached = Ranges[str, list[int]]()
    first: list[int] = []
    assert cached.put("a", first, 20 << 20) is first
    assert cached.put("a", [], 20 << 20) is first
    cached.put("b", [], 10 << 20)
    assert cached.get("a") is first  # its length was counted once
