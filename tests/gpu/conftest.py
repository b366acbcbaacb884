"""Tests of what only a GPU can show; `make gpu-check` runs them, and nothing else does."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

for area in ("learner", "weights", "generator"):
    sys.path.append(str(Path(__file__).parents[1] / area))


@pytest.fixture(autouse=True)
def gpu() -> torch.device:
    """The first GPU."""
    if not torch.cuda.is_available():
        pytest.fail("torch finds no GPU; run this on a machine with one, with `make gpu-check`")
    return torch.device("cuda", 0)
