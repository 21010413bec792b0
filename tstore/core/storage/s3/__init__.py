"""Objects in a bucket of S3. `store`: the storage. `address`: its URLs. `checksums`: what was stored. `responses`:
limits and errors."""
