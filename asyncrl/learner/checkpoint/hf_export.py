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
    """Writes the model, and the tokenizer of the model at `tokenizer`, to `folder`, which is replaced only when the new
    files are complete. All ranks call it."""
    weights = trained.collect_weights()
    if trained.ranks.rank:
        return
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    write_model(partial, trained.model, weights, tokenizer=tokenizer)
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
