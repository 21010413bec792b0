"""The chunk, the unit of an array that is encoded, checked and referenced: how values become chunks and come back.

1. `grid`: which chunks an index touches, and which part of each.
2. `compressors`, `chain`, `metadata`: the codecs that make bytes of a chunk; the `zarr.json` of an array, which
   names them.
3. `table`: where each chunk lies, and what its bytes must be.
4. `writer`: values into packs. `reader`: out of them again, checked; `boxes`: many small chunks read as one.
5. `packed`: chunks in eXmY out of packs without decoding a value.

The first three are pure; the others stand on `tstore.kv`.
"""
