"""Metrics of a run, its running statistics, and the trace."""
