"""From blocks in a store to samples in order. Torch-free."""
