"""Object storage: one contract, several implementations."""
