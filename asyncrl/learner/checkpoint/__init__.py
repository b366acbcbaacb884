"""Checkpoints of the learner, and the saved model."""
