"""Quantizing a checkpoint: what each array gets, how it is encoded anew, and what that cost.

1. `quantize`: the whole, from the rules to the commit and its report.
2. `policy`: rules. `plan`: which codecs each array gets by them or by its data. `study`: what an array would cost
   in every format; `allocation`: the least error of many arrays within a budget of bytes.
3. `encoding`: arrays fitted, written, read back and measured; `values`: their values, in threads; `rechunk`: their
   chunks, cut anew where they must be; `work`: many of them at once, here or on the workers of an executor.
4. `request`: what was asked, in words. `report`: what it cost, as data; `plot`: as pictures.
"""
