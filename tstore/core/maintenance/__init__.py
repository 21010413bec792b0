"""Maintenance of a store: verification, repair, garbage collection, listing and comparing versions.

1. `damage` finds the damaged versions; `replay`, those that do not follow from the versions before them; `gaps`,
   records far above all others. `verify` checks every record (`transaction_ids`) and manifest, lists each chunk
   once (`distinct_chunks`), and reads it (`read_back`). `repair` voids a commit whose record cannot be read:
   `lost_records` finds the roots that have its changes, `void_records` puts others in its place, and `repair_plan`
   decides what else expires. `past_repairs` finds earlier repairs that have not ended.
2. `gc` removes the versions that no retention rule keeps, and the data of transactions that never committed; it
   returns a `collect_report`. `archiving` moves the records of old versions into archives.
3. `contents` lists the arrays of a version; `diff` compares two versions.
"""
