"""Conversion of checkpoints from and to other file formats.

1. `files`: memory maps, and names that stay within a folder. `names`: a checkpoint's arrays by flat names.
   `nesting`: nested containers from leaves with their keys. `file_parts`: arrays that lie in several files.
   `skipping`: values that are left out by name. `dense_bits`: elements of 4 and 6 bits; `narrow`: quantized arrays
   in narrow types of other formats. `tree_export`: trees for the writers of DCP and Orbax.
2. The formats. `safetensors` and its `safetensors_header`; `huggingface`, models in several such files. `pickled`:
   pickles read as data; `torch_archive`: archives of torch.save; `dcp` and `dcp_export`: folders of
   torch.distributed.checkpoint; `torch_file`: files of torch.save. `orbax` and `orbax_export`:
   Orbax checkpoints.
3. `importing`: checkpoints of all these formats. `layouts` and `low_bits`: quantized arrays in safetensors files
   that keep their low bits. `exporting`: safetensors files and Hugging Face folders. `gguf_export`: GGUF files.
4. Plain Zarr folders. `folder`: the files of one; `redirects`: servers that lead to others, and may not learn
   credentials; `zarr_v2`: v2 metadata as that of v3; `zarr_folder`: folders read in place; `zarr_import` and
   `zarr_export`: whole folders; `references`: kerchunk files that refer to chunks in packs; `tensorstore_spec`:
   plain arrays opened by the specs of TensorStore.
"""
