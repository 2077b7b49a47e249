"""``stagekit run`` around any command: a checkpoint before it, saves and logs while it runs, a drain after it."""
