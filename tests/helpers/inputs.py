"""A model folder and a data file that pass the checks of a launch; no weights are ever loaded from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq


def make_inputs(folder: Path) -> tuple[Path, list[dict[str, Any]]]:
    """Writes `model` and `data.parquet` into the folder; returns the model's folder and the rows of the data."""
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"max_position_embeddings": 32}))
    (model / "tokenizer_config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"")
    rows = [{"data_source": "a", "prompt": "1+1=", "reward_model": {"style": "rule", "ground_truth": "2"}}]
    pq.write_table(pa.Table.from_pylist(rows), folder / "data.parquet")
    return model, rows
