"""Objects in a bucket of S3, or of a server that speaks its protocol.

1. `store`: the objects. 2. `session`: the client of aiobotocore. 3. `responses`: refusals as errors.
"""
