"""A model folder and a data file that pass the checks of a launch; no weights are ever loaded from them."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split

SETTINGS = {"model_type": "llama", "vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
SETTINGS |= {"num_attention_heads": 1, "max_position_embeddings": 32}
"""config.json of the model."""
TOKENS = ["<eos>", "<unk>", "1", "+", "="]


def make_inputs(folder: Path) -> tuple[Path, list[dict[str, Any]]]:
    """Writes `model` and `data.parquet` into the folder; returns the model's folder and the rows of the data."""
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(SETTINGS))
    tokenizer = Tokenizer(WordLevel({token: number for number, token in enumerate(TOKENS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Split(Regex("."), behavior="isolated")  # type: ignore[assignment]
    tokenizer.save(str(model / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "unk_token": "<unk>"}
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    (model / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
    rows = [{"data_source": "a", "prompt": "1+1=", "reward_model": {"style": "rule", "ground_truth": "2"}}]
    pq.write_table(pa.Table.from_pylist(rows), folder / "data.parquet")
    return model, rows
