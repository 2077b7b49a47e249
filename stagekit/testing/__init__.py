"""What ships for testing: an embedded S3 server, a fault proxy before any server, stores that fail on purpose, and kill points."""
