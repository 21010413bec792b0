"""The data path: write values to packs, and read them back.

The objects that represent a chunk on its way from `save` to disk and back:

    save      writer            array --> ChunkBox, Stack --> EncodedRun --> ChunkRow (one for each chunk written)
    commit    format            ChunkRow --> ChunkTable (columns) --> manifest
              writer            of long arrays: EncodedRun --> ChunkTable --> segments, named by the manifest
    open      format            manifest --> ChunkTable (for each node a part of the manifest's columns)
                                of long arrays: segments --> SortedRun --> ChunkTable, when looked up
    restore   pieces, reader    ChunkTable --> ChunkRow --> Piece, which delivers its values

1. `write_job`: what to write, and the references to it. `batches`: copy, encode, checksum. `writer`: compare with
   the previous version, write; long chunks block by block.
2. `pieces`: the byte ranges of packs to read (a chunk, some of its blocks). `runs`: those of many chunks at once;
   `point_pieces`: those from which index arrays select elements; `tile_pieces`: tiles of eXmY codes. Each piece
   delivers its values. `planning`: the pieces of a read, in batches, those of many small arrays together.
   `reader`: read these, verify, decode, store the values in the result; small reads of one loop turn together.
   `mapping`: arrays in mapped packs, without a copy.
   `destinations`: whether arrays of the caller share memory, and which of them a failed read leaves torn.
3. `changes`: what changed between two versions. `exmy_chunks`: chunks in eXmY formats, read without decoding a
   value. `joined_codes`: the codes of a region of an array. `casting`: values that a caller passes, also as
   tensors of PyTorch. `encoded_chunks`: the encoded bytes of any chunks.
"""
