"""Hooks for trainers, each loading its framework on first use."""
