"""Objects in a bucket of S3. `store`: the storage. `responses`: the size limits and errors of responses."""
