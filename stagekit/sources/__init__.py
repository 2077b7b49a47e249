"""Raw data: what can be made into shards."""
