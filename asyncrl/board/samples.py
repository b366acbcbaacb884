"""Complete samples of a run: all completions of a group, with the versions that sampled their tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from asyncrl.config.load import load_config
from asyncrl.data.rows import Split
from asyncrl.errors import ConfigError
from asyncrl.launch.samples import conversations, run_decoder, stored_group, with_texts
from asyncrl.observe.document import SAMPLE_FIELDS
from asyncrl.samples import Samples
from asyncrl.samples.book import evaluated_versions, read_evaluated


def trained_group(run_dir: Path, ticket: int) -> list[dict[str, Any]]:
    """The completions of a ticket: all if the journal has them, otherwise those that are recorded. Raises ConfigError
    if there are none, JournalError or DataError for a damaged file."""
    return _rows(stored_group(run_dir, ticket), run_dir, "train")


def evaluated_group(run_dir: Path, *, version: int, row: int) -> list[dict[str, Any]]:
    """The completions of a row of the evaluation data by a version. Raises ConfigError if there are none, DataError for
    a damaged file."""
    if version not in evaluated_versions(run_dir):
        raise ConfigError(f"version {version}: its evaluation is not stored")
    samples = read_evaluated(run_dir, version, rows=[row])
    if not len(samples):
        raise ConfigError(f"version {version}: row {row} was not evaluated")
    return _rows(samples.with_column("step", [version] * len(samples)), run_dir, "eval")


def _rows(samples: Samples, run_dir: Path, split: Split) -> list[dict[str, Any]]:
    config = load_config(run_dir / "config.yaml")
    decoder = run_decoder(run_dir, config)
    samples = with_texts(samples, decoder, conversations(run_dir, config, decoder), config, split)
    names = [name for name in (*SAMPLE_FIELDS, "raw") if name in samples.columns]
    rows = samples.table.select(names).to_pylist(maps_as_pydicts="strict")
    return [row | {"versions": own} for row, own in zip(rows, _versions(samples), strict=True)]


def _versions(samples: Samples) -> list[list[tuple[int, int]]]:
    """By completion the versions that sampled its action tokens, in their order, with the number of tokens of each;
    empty where the versions of tokens are not stored."""
    if not {"versions", "action_mask"} <= set(samples.columns):
        return [[] for _ in range(len(samples))]
    found: list[list[tuple[int, int]]] = []
    for versions, mask in zip(samples["versions"], samples["action_mask"], strict=True):
        sampled = versions[mask] if len(mask) else versions
        numbers, counts = np.unique(sampled, return_counts=True)
        found.append(list(zip(numbers.tolist(), counts.tolist(), strict=True)))
    return found
