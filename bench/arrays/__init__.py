"""A volume in chunks, written and read beside tensorstore, zarr-python and icechunk: `python -m bench.arrays`."""
