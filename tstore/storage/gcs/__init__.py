"""Objects in a bucket of Google Cloud Storage.

1. `store`: the storage, over the JSON API.
2. `credentials`: finding and renewing credentials. `responses`: JSON resources, and refusals as errors.
"""
