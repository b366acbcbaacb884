"""The demo's dataset: sums of two numbers, two digits each."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from random import Random
from typing import Any

from asyncrl.data.parquet import write_rows

LARGEST = 19
"""Operands are 0 to LARGEST."""
DATA_SOURCE = "arithmetic"


def sums() -> list[tuple[str, str, int, int]]:
    """(prompt, answer, first operand, second operand) of every sum."""
    pairs = product(range(LARGEST + 1), repeat=2)
    return [(f"{a:02d}+{b:02d}=", f"{a + b:02d}", a, b) for a, b in pairs]


def make_arithmetic(path: Path, *, seed: int = 0, rows: int | None = None) -> None:
    """Writes all sums, or the first `rows`, shuffled by the seed, in verl's schema."""
    table: list[dict[str, Any]] = [
        {
            "data_source": DATA_SOURCE,
            "prompt": prompt,
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": answer},
            "extra_info": {"operands": [a, b]},
        }
        for prompt, answer, a, b in sums()
    ]
    Random(seed).shuffle(table)
    write_rows(path, table[:rows])
