"""The routers of mixture-of-experts models: which experts compute a token, as generator and learner record and replay
it.

A routing is an array uint8 [tokens, layers, chosen]: the numbers of the experts that a token went to, in each layer
with experts. The routing of a token is that of the forward pass with the token as its input, by which the token after
it was sampled.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import ConfigError

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
