"""Objects in a bucket of S3. `store`: the storage. `responses`: bounded in memory; refusals as errors."""
