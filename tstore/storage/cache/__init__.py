"""A local cache in front of any storage. `store`: the storage; `folder`: the cached files."""
