"""Other formats of tensors and checkpoints, in and out.

1. `safetensors_header`, `safetensors`: files of that format.
2. `checkpoint`: checkpoints from such files, and back.
"""
