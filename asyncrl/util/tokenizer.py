"""A model folder's tokenizer and chat template, and a decoder that needs no transformers where possible."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from asyncrl.errors import ConfigError
from asyncrl.util.files import read_json

TEMPLATE_COLUMN = "chat_template_kwargs"
"""The column with a row's options of the chat template, by its name in TRL and in requests to vLLM."""


class Decoder(Protocol):
    """Decodes sequences of tokens to texts, with special tokens or without."""

    def __call__(self, sequences: Sequence[Sequence[int]], *, special_tokens: bool = False) -> list[str]: ...


def load_tokenizer(path: str, *, trust_remote_code: bool = False) -> Any:
    """The Hugging Face tokenizer at `path`.

    A tokenizer that is only a tokenizer.json is loaded as such: AutoTokenizer would use the class of the model type,
    which may split text differently. Raises ConfigError if it cannot be loaded.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    settings = Path(path) / "tokenizer_config.json"
    kind = read_json(settings, "model.path").get("tokenizer_class") if settings.is_file() else None
    try:
        if kind in ("TokenizersBackend", "PreTrainedTokenizerFast"):
            return PreTrainedTokenizerFast.from_pretrained(path)
        return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:  # what is missing or wrong in a folder comes as any class, as do errors of its own code
        raise ConfigError(f"{path}: its tokenizer cannot be loaded: {' '.join(str(error).split())}") from error


def start_tokens(tokenizer: Any) -> list[int]:
    """The special tokens that the tokenizer puts before a text."""
    bare: list[int] = tokenizer.encode("0", add_special_tokens=False)
    complete: list[int] = tokenizer.encode("0")
    starts = range(len(complete) - len(bare) + 1)
    return next((complete[:start] for start in starts if complete[start : start + len(bare)] == bare), [])


def render_chat(
    tokenizer: Any,
    messages: Sequence[dict[str, Any]],
    options: Mapping[str, Any],
    *,
    generate: bool = True,
    tokenize: bool = True,
    tools: Sequence[dict[str, Any]] = (),
) -> Any:
    """The text, or the tokens, that the chat template makes of messages; with `generate` up to the assistant's next
    words, which continue a last message of the assistant. A template is a program, which may raise anything."""
    continues = generate and messages[-1].get("role") == "assistant"
    return tokenizer.apply_chat_template(
        list(messages),
        tools=list(tools) or None,
        add_generation_prompt=generate and not continues,
        continue_final_message=continues,
        tokenize=tokenize,
        return_dict=False,
        **options,
    )


def num_embeddings(path: str) -> int | None:
    """The rows of a model's embedding by its config.json, or None if it does not say. A token id beyond them has no
    embedding: the engine may compute with any memory in its place, and the learner fails."""
    file = Path(path) / "config.json"
    settings = read_json(file, "model.path") if file.is_file() else {}
    text = settings.get("text_config")
    rows = (text if isinstance(text, dict) else settings).get("vocab_size")
    return rows if isinstance(rows, int) else None


def no_embedding(token: int, num_embeddings: int, text: str = "") -> str:
    """The error text for a token, with its text if it is known, without an embedding."""
    return (
        f"has the token {token}{text and f' ({text!r})'}, but the model's embedding has {num_embeddings} rows "
        "(vocab_size in config.json); leave it out, or take the tokenizer that the model was trained with"
    )


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
