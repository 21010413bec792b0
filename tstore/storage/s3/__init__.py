"""Objects in a bucket of S3. `store`: the storage. `address`: its URLs. `responses`: limits and errors."""
