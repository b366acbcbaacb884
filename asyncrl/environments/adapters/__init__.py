"""Environments of other projects, played unchanged: one file for each scheme of `environment.name`."""
