"""What a training does at once, through a store that misbehaves: as a test on a clock of its own, and for real by tools/soak."""
