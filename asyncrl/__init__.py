"""Asynchronous, off-policy, streaming RL training for language models."""

__version__ = "0.1.0"
