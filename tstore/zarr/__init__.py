"""Snapshots and transactions as stores of zarr-python, for zarr, xarray and Dask as they are.

    root = zarr.open_group(tstore.zarr.ZarrStore(snapshot), mode="r")

    with tstore.sync.open("ckpts").transaction() as transaction:
        root = zarr.open_group(tstore.zarr.ZarrStore(transaction))
        root.create_array("loss", shape=(1000,), chunks=(100,), dtype="f4")[:] = 0
    # one commit, once the block ends without an exception

1. `hierarchy`: the groups, arrays and encoded chunks of a snapshot; those of a transaction are
   `tstore.core.transactions.encoded`.
2. `keys`: which of them a key of Zarr names.
3. `store`: `ZarrStore`.
"""

from tstore.zarr.store import ZarrStore

__all__ = ["ZarrStore"]
