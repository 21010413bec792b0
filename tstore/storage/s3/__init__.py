"""Objects in a bucket of S3. `store`: the storage. `responses`: their size limits, and refusals as errors."""
