"""Conversion of checkpoints from and to other file formats.

`safetensors` imports and exports safetensors files; `safetensors_header` is their header.
"""
