"""Snapshots and transactions as stores of zarr-python, for unmodified zarr, xarray and Dask.

>>> import tstore.sync as tstore, zarr
>>> store = tstore.open("memory://of-zarr")
>>> with store.transaction() as tx:  # one commit, once the block ends without an exception
...     root = zarr.open_group(tstore.zarr.ZarrStore(tx))
...     root.create_array("loss", shape=(1000,), chunks=(100,), dtype="f4")[:] = 0
>>> zarr.open_group(tstore.zarr.ZarrStore(store.snapshot()), mode="r")["loss"].shape
(1000,)

1. `hierarchy`: the groups, arrays and encoded chunks of a snapshot; those of a transaction are
   `tstore.core.transactions.encoded`.
2. `keys`: which of them a key of Zarr names.
3. `store`: `ZarrStore`.
"""

from tstore.zarr.store import ZarrStore

__all__ = ["ZarrStore"]
