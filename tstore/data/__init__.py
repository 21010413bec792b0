"""The data path: values into packs, and back out of them.

What holds the address of a chunk on its way from `save` to disk and back:

    save      writer            array --> ChunkBox, Stack --> EncodedRun --> ChunkRow (one for each chunk written)
    commit    format            ChunkRow --> ChunkTable (columns) --> manifest
    open      format            manifest --> ChunkTable (a part of the manifest's columns for each node)
    restore   pieces, reader    ChunkTable --> ChunkRow --> Piece, which delivers its values

1. `batches`: copy, encode, checksum. `writer`: compare with the previous version, write.
2. `pieces`: the byte ranges of packs to read (a chunk, some of its blocks, many chunks). Each delivers its values.
   `reader`: plan, read in batches, verify, decode, store in the result.
3. `exmy_chunks`: chunks in eXmY formats, read without decoding a value.
"""
