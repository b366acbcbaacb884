"""The files of a model folder: tokenizer and chat template, and the routers of mixture-of-experts models.

A routing is an array uint8 [tokens, layers, chosen]: the numbers of the experts that a token went to, in each layer
with experts. The routing of a token comes from the forward pass with the token as its input, by which the token after
it was sampled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, cast

from asyncrl.errors import ConfigError
from asyncrl.util.files import read_json

if TYPE_CHECKING:  # reward workers do without numpy
    import numpy as np
    from numpy.typing import NDArray

TEMPLATE_COLUMN = "chat_template_kwargs"
"""The column with a row's options of the chat template, by its name in TRL and in requests to vLLM."""


class TokenDecoder(Protocol):
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
    except Exception as error:  # faults of a folder come as any class, as do errors of its code
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
    """The tokens that end a completion, ascending: the tokenizer's end-of-sequence token and the ones of the model's
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


def load_decoder(path: str, *, trust_remote_code: bool = False) -> TokenDecoder:
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


KEY = "algorithm.routing_replay = 'engine'"
MAX_EXPERTS = 256
"""The number of an expert is one byte."""
MODELS = "mixtral", "olmoe", "qwen2_moe", "qwen3_moe"
"""Types of models whose routers weigh the chosen experts by a softmax over all."""


class Routers(NamedTuple):
    """The routers of a model."""

    layers: int
    """Layers with experts."""
    chosen: int
    """Experts that compute each token in such a layer."""
    experts: int
    normalized: bool
    """True if the weights of the chosen experts add up to 1."""

    @property
    def token_bytes(self) -> int:
        """Bytes of the routing of one token."""
        return self.layers * self.chosen


def replayed_routers(replay: Literal["off", "engine"], path: str, *, trust_remote_code: bool) -> Routers | None:
    """Returns the routers of the model at `path` if `algorithm.routing_replay` is engine. Raises ConfigError if the
    model has none, or others than are known."""
    if replay == "off":
        return None
    from transformers import AutoConfig  # takes seconds

    try:
        whole = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path = {path!r}: config.json cannot be read as a model's: {error}") from error
    return routers_of_settings(whole.get_text_config(), path)


def routers_of_settings(settings: Any, path: str) -> Routers:
    """Returns the routers of a model with these settings of transformers, as `replayed_routers` does."""
    kind = settings.model_type
    experts = cast(int, getattr(settings, "num_local_experts", None) or getattr(settings, "num_experts", None) or 0)
    if kind not in MODELS or not experts:
        what = "other routers than are known" if experts or hasattr(settings, "n_routed_experts") else "no experts"
        raise ConfigError(
            f"{KEY}: the model of type {kind} at model.path = {path!r} has {what}; use a model of type "
            f"{', '.join(MODELS)}, or algorithm.routing_replay=off"
        )
    if experts > MAX_EXPERTS:
        raise ConfigError(f"{KEY}: model.path = {path!r} has {experts} experts a layer, at most {MAX_EXPERTS} can be "
                          "recorded; use algorithm.routing_replay=off")  # fmt: skip
    dense, every = getattr(settings, "mlp_only_layers", None) or (), getattr(settings, "decoder_sparse_step", 1)
    layers = [n for n in range(settings.num_hidden_layers) if n not in dense and (n + 1) % every == 0]
    normalized = kind == "mixtral" or bool(settings.norm_topk_prob)
    return Routers(len(layers), settings.num_experts_per_tok, experts, normalized)


def keep_routing(
    routing: NDArray[np.uint8], start: int, experts: NDArray[np.uint8], *, num_prompt: int, num_tokens: int
) -> None:
    """Keeps the experts [tokens, layers, chosen] of a sequence's tokens from `start` on, which have just been computed,
    but not of tokens before which another pass sampled the next one. Of its `num_tokens` so far `num_prompt` are the
    prompt."""
    end = start + len(experts)
    before = min(end, num_prompt - 1)
    if start < before:
        routing[start:before] = experts[: before - start]
    if end == num_tokens:
        routing[end - 1] = experts[-1]


def router_modules(model: Any, routers: Routers, path: str) -> list[Any]:
    """Returns the router of each layer with experts, a module that returns logits, weights and numbers of the chosen
    experts. Raises ConfigError if the model has others."""
    found = [module for _, module in model.named_modules() if type(module).__name__.endswith("TopKRouter")]
    if len(found) != routers.layers:
        raise ConfigError(
            f"{KEY}: {len(found)} routers were found in the {routers.layers} layers with experts of the model at "
            f"model.path = {path!r}; use algorithm.routing_replay=off"
        )
    return found
