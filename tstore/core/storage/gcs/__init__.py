"""Objects in a bucket of Google Cloud Storage.

1. `store`: the storage, over the JSON API.
2. `credentials`: finding and renewing credentials. `responses`: JSON resources, and the errors to
   which responses are mapped.
"""
