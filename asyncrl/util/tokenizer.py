"""A model folder's tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from asyncrl.util.files import read_json


def load_tokenizer(path: str, *, trust_remote_code: bool = False) -> Any:
    """The Hugging Face tokenizer at `path`.

    A tokenizer that is only a tokenizer.json is loaded as such: AutoTokenizer would use the class of the model type,
    which may split text differently.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    settings = Path(path) / "tokenizer_config.json"
    kind = read_json(settings, "model.path").get("tokenizer_class") if settings.is_file() else None
    if kind in ("TokenizersBackend", "PreTrainedTokenizerFast"):
        return PreTrainedTokenizerFast.from_pretrained(path)
    return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
