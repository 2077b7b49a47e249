"""Training runs: checkpoints pinned, sent, verified, restored and kept."""
