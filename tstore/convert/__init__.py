"""Conversion of checkpoints from and to other file formats.

1. `safetensors_header`, `safetensors`: safetensors files.
2. `checkpoint`: a checkpoint from such a file, and a file from a checkpoint.
"""
