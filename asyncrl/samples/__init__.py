"""Trajectories as a table, and the record that a run keeps of some of them."""

from asyncrl.samples.table import ARRAYS, SCHEMA, Samples

__all__ = ["ARRAYS", "SCHEMA", "Samples"]
