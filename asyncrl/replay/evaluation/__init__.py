"""Evaluations during training: leases, completions, and scores."""
