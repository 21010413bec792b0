"""Tools to try a store, and to test one's own storage.

`hosts/`: processes that play the hosts of a job. `demo`: the job of `tstore demo`. `conformance/`: tests of a
storage. `simulation/`: many hosts on a faulty storage in virtual time, for the tests; it is not installed.
"""
