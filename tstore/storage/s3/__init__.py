"""Objects in a bucket of S3. `store`: the storage. `session`: bounded responses. `responses`: refusals."""
