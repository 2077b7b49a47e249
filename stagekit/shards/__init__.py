"""The shard format: samples, tar archives, block tables, manifests and plans. It does not know where bytes come from."""
