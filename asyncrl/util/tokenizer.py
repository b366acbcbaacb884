"""A model folder's tokenizer, and a decoder that needs no transformers where possible."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from asyncrl.util.files import read_json


class Decoder(Protocol):
    """Decodes sequences of tokens to texts, with special tokens or without."""

    def __call__(self, sequences: Sequence[Sequence[int]], *, special_tokens: bool = False) -> list[str]: ...


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


def end_tokens(path: str, *, trust_remote_code: bool = False) -> list[int]:
    """The tokens that end a completion, ascending: the tokenizer's end-of-sequence token and those of the model's
    generation config, as vLLM finds them."""
    from transformers import AutoConfig, GenerationConfig

    try:
        generation = GenerationConfig.from_pretrained(path)
    except OSError:  # the folder has none
        model = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        generation = GenerationConfig.from_model_config(model)
    own = load_tokenizer(path, trust_remote_code=trust_remote_code).eos_token_id
    given = generation.eos_token_id
    ends = {own, *(given if isinstance(given, list) else [given])}
    return sorted(token for token in ends if token is not None)


def load_decoder(path: str, *, trust_remote_code: bool = False) -> Decoder:
    """Returns the decoder of the tokenizer at `path`. It loads transformers, which takes seconds and memory, only where
    there is no tokenizer.json."""
    file = Path(path) / "tokenizer.json"
    if file.is_file():
        from tokenizers import Tokenizer

        fast = Tokenizer.from_file(str(file))

        def decode(sequences: Sequence[Sequence[int]], *, special_tokens: bool = False) -> list[str]:
            return fast.decode_batch(sequences, skip_special_tokens=not special_tokens)

        return decode
    slow = load_tokenizer(path, trust_remote_code=trust_remote_code)

    def decode_slowly(sequences: Sequence[Sequence[int]], *, special_tokens: bool = False) -> list[str]:
        return [slow.decode(sequence, skip_special_tokens=not special_tokens) for sequence in sequences]

    return decode_slowly
