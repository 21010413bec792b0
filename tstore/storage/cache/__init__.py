"""A local folder that keeps what was read from other storage.

1. `folder`: the folder and its limit of bytes. 2. `store`: a backend in front of which that folder lies.
"""
