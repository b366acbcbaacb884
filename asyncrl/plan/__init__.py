"""Predicts the throughput of a run with other settings: a simulator of the complete system, and search over setups."""
