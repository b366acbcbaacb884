"""Generated inputs are the same in every run."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("deterministic", derandomize=True, deadline=None, max_examples=60)
settings.load_profile("deterministic")
