"""A model folder's tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from asyncrl.util.files import read_json


def load_tokenizer(path: str, *, trust_remote_code: bool = False) -> Any:
    """The Hugging Face tokenizer at `path`.

    For one that is a tokenizer.json and no more, AutoTokenizer would take the class of the model's kind, and that
    class may split text in its own way.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    settings = Path(path) / "tokenizer_config.json"
    kind = read_json(settings, "model.path").get("tokenizer_class") if settings.is_file() else None
    if kind in ("TokenizersBackend", "PreTrainedTokenizerFast"):
        return PreTrainedTokenizerFast.from_pretrained(path)
    return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
