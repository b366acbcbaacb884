"""Writes models in Hugging Face format."""

from __future__ import annotations

import shutil
from pathlib import Path

import structlog
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils.hub import cached_file

from asyncrl.learner.model.engine import TrainedModel

log = structlog.get_logger()

ADAPTER_FOLDER = "adapter"
"""Folder of adapters in peft's format, next to that of the merged model."""
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
"""Copied unchanged, since loading and saving a tokenizer may change it."""


def save_model(trained: TrainedModel, folder: Path, *, tokenizer: str) -> None:
    """Writes the model, and the tokenizer of the model at `tokenizer`, to `folder`, and adapters to the folder
    `adapter` next to it. They are replaced only when the new files are complete. All ranks call it."""
    weights, factors = trained.collect_weights(), trained.factors()
    if trained.ranks.rank:
        return
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    write_model(partial, trained.model, weights, tokenizer=tokenizer)
    _replace(folder, partial)
    if trained.adapters is not None:
        trained.adapters.write(adapter := folder.with_name(f"{ADAPTER_FOLDER}.partial"), factors)
        _replace(folder.with_name(ADAPTER_FOLDER), adapter)


def _replace(folder: Path, partial: Path) -> None:
    former = folder.with_name(f"{folder.name}.former")
    shutil.rmtree(former, ignore_errors=True)
    if folder.exists():
        folder.rename(former)
    partial.rename(folder)
    shutil.rmtree(former, ignore_errors=True)
    log.info("model saved", path=str(folder))


def write_model(folder: Path, model: PreTrainedModel, weights: dict[str, Tensor], *, tokenizer: str) -> None:
    """Writes the model with these weights, and the tokenizer of the model at `tokenizer`."""
    model.save_pretrained(folder, state_dict=weights)
    for name in TOKENIZER_FILES:
        source = cached_file(tokenizer, name, _raise_exceptions_for_missing_entries=False)
        if source is not None:
            shutil.copyfile(source, folder / name)
