"""The numbers of inputs that hypothesis generates for a test."""

from __future__ import annotations

import os

RANDOM = os.environ.get("ASYNCRL_HYPOTHESIS") == "all"
"""Random inputs instead of the same ones in every run, and many more of them (`make test-all`)."""
FEW, MANY = 25, 500
"""Inputs of a test that does not set its own number."""


def examples(few: int, many: int | None = None) -> int:
    """Number of inputs for `settings(max_examples=...)`: `few` in `make test`, `many` (default: 10 times as many) in
    `make test-all`."""
    return (10 * few if many is None else many) if RANDOM else few
