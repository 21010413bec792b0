"""One array, without its values: its metadata, data type, chunk grid and codecs, and what an index selects.

1. `array_metadata`: the `zarr.json` of an array, and the names of its chunks.
2. `dtypes`: data types and fill values; `variable`: variable-length data types.
3. `grid`: chunk grids and ranges of them; `samples`: regions spread over an array. `indices`: the items of an
   index; `views`: chains of indices; `points`: what index arrays select, by chunk.
4. `codecs`: the codec chain of a chunk: filters, one of the `array_codecs` or `sharded` chunks, and
   `compressors` or other `bytes_codecs`; `numcodecs_classes`: filters, and codecs of numcodecs. `gather`: copies
   of chunks, with their checksums.
"""
