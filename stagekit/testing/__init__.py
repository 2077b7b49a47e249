"""What ships for testing: a fault proxy and an embedded S3 server."""
