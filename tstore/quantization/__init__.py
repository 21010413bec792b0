"""Quantization: a copy of a checkpoint with its float arrays in low-bit formats, and a report of its errors.

1. `quantize`: the public function, from the request to the commit.
2. `request`: the arguments, checked and described. `policy`: rules by path pattern, and targets.
3. `plan`: the codecs of each array, by the rules or by its data. `study`: the size and error of an array in the
   formats that may be chosen; `entropy`: in codes of any step, compressed; `studied_plan`: studies of the formats
   that are likely to be chosen first. `allocation`: the least total error within a budget; `sensitivity`: the
   weights of these errors; `rows`: whether rows differ so much that each needs a step.
4. `encoding`: fits the codecs of arrays, writes their chunks, reads them back and measures the error. `values`:
   the values of arrays, in memory or slab by slab. `work`: many arrays concurrently, in this process or on the
   workers of an executor.
5. `report`: the measured errors and sizes, as data and as pictures.
"""
