"""Training: the loop, steps, checkpoints, several processes."""
