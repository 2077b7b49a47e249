"""``stagekit demo``: the whole path on real data, with a machine that is thrown away in the middle of training."""
