"""What trainers write to disk, and when it is finished: rules by format, decided from outside. Needs no torch and runs nothing of it."""
