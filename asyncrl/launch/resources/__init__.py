"""Devices, cores and memory for the roles of a run."""
