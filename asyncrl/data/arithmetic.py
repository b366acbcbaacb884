"""The demo's dataset: sums like `12+07=`, in the schema of verl."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import structlog

log = structlog.get_logger()

LARGEST_OPERAND = 19


def make_arithmetic(path: Path, *, seed: int = 0, largest: int = LARGEST_OPERAND) -> None:
    """Writes every sum of two numbers from 0 to `largest` (at most 49), in an order given by `seed`, as Parquet.

    Numbers have two digits: prompt "12+07=", ground truth "19". The file appears only when it is whole.
    """
    pairs = [(a, b) for a in range(largest + 1) for b in range(largest + 1)]
    order = np.random.default_rng(seed).permutation(len(pairs))
    rows = [
        {
            "data_source": "arithmetic",
            "prompt": sum_prompt(*pairs[i]),
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": two_digits(sum(pairs[i]))},
            "extra_info": {"index": index},
        }
        for index, i in enumerate(order)
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    pq.write_table(pa.Table.from_pylist(rows), unfinished)
    unfinished.rename(path)
    log.info("dataset written", path=str(path), rows=len(rows))


def sum_prompt(a: int, b: int) -> str:
    return f"{two_digits(a)}+{two_digits(b)}="


def two_digits(number: int) -> str:
    return f"{number:02d}"
