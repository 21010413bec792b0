"""A second reader of stores, written from the two FORMAT.md alone, before its author saw any code.

It shares no code with tstore or exmy and imports neither, so it shows whether the documents suffice. Reading only,
in memory, unhurried. Values come as NumPy arrays, and types that NumPy lacks as their bytes: bfloat16 as uint16,
floats of up to 8 bits as uint8 (`Type.values` has the numbers), ints of 2 and 4 bits as int8 and uint8.
"""

from tests.support.independent_reader.frames import Expired, Newer, Refused
from tests.support.independent_reader.store import Store

__all__ = ["Expired", "Newer", "Refused", "Store"]
