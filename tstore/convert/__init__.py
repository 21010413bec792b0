"""Other formats of tensors and checkpoints, in and out; one module for each, named after the format."""
