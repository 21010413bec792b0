"""The data path: values into packs, and out of them again.

1. `writer`: copy, encode, checksum, compare with the previous version, write.
2. `reader`: read, verify, decode, scatter. `boxes`: many small chunks read as one.
3. `exmy_chunks`: chunks in eXmY formats, read without decoding a value.
"""
