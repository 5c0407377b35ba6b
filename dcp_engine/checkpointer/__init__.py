"""Checkpoints of a training run: when they are consistent, how a run comes back from them, and what that is worth."""
