"""Statistics of stored arrays: numbers, histograms and heat maps from samples, and what quantization cost.

1. `summary`: the statistics of one array. `heat_map`: the values of a matrix as a small grid. `loss`: the error of
   a quantized array against its source. `baseline`: the version with which to compare another. `nonfinite`: a
   search for NaN and infinity in all arrays of a version.
2. `reading`: reads a sample of an array in batches, whose tiles a function in a thread adds up. `results`: results
   by the checksums of the chunks from which they were computed.
3. `numbers`: values of any number type as floats. `moments`: counts, sums and extremes; `strips`: of rows and
   columns. `histograms`: of values. `number_range`: what a dtype or format can represent.
"""
