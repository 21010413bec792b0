"""Objects in a bucket of S3. `store`: the storage, and its URLs. `checksums`: what was stored. `responses`:
limits and errors."""
