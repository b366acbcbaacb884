"""Metrics of the learner's steps: losses, batches, phases, operations, and traces."""
