"""Loads the policy for decoding, and checks that decoding computes what the model's own forward pass does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from asyncrl.config.config import Config
from asyncrl.errors import AsyncrlError, ConfigError
from asyncrl.generator.transformers_backend.attention import PAGED

UNFIT = (AttributeError, IndexError, KeyError, NotImplementedError, TypeError)
"""Errors raised by a model that does not support a custom attention or the keyword arguments of a batch."""
HOW_TO_FIX = (
    "decoding needs a model whose layers mix tokens by plain attention alone, such as Llama, Qwen3 or Gemma 3 "
    "(docs/models.md has a table)"
)
TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""Upper limit of the distance between logits of paged decoding and of the model's own attention, relative to the norm
of the latter. Rounding causes 1e-6 in float32 and up to 0.03 in bfloat16."""
LENGTHS = (12, 9)
"""Tokens of the sequences by which decoding is checked."""
CHECKED = ((5, 0), (3, 4), (1, 3), (1, 1), (1, 1), (1, 0))
"""Tokens of each that a step of the check computes."""


def load_model(config: Config, device: torch.device) -> tuple[PreTrainedModel, nn.Module]:
    """Returns the causal language model at `model.path`, and its output layer. Raises ConfigError if it cannot be
    decoded."""
    disable_progress_bar()
    key = f"model.path = {config.model.path!r}"
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            config.model.path,
            dtype=getattr(torch, config.model.dtype),
            attn_implementation=PAGED,
            trust_remote_code=config.model.trust_remote_code,
            use_safetensors=True,  # other formats are pickles
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"{key}: the model cannot be loaded: {error}") from error
    except UNFIT as error:
        raise ConfigError(
            f"{key}: the model cannot be loaded for paged decoding ({type(error).__name__}: {error}); {HOW_TO_FIX}"
        ) from error
    output = model.get_output_embeddings()
    if not isinstance(output, nn.Module):
        raise ConfigError(f"{key}: {type(model).__name__} has no output layer; use a causal language model")
    return model.to(device).eval().requires_grad_(False), output  # type: ignore[arg-type]


def fits(model: PreTrainedModel, forward: Callable[[], Tensor]) -> Tensor:
    """Returns what a forward pass of the model returns. Raises ConfigError for an error that shows that the model
    cannot be decoded."""
    try:
        return forward()
    except (AsyncrlError, torch.OutOfMemoryError):
        raise
    except (*UNFIT, RuntimeError, ValueError) as error:
        raise misfit(model, f"{type(error).__name__}: {error}") from error


def misfit(model: PreTrainedModel, why: str) -> ConfigError:
    """Returns the error for a model that cannot be decoded."""
    return ConfigError(
        f"model.path = {model.name_or_path!r}: a model of type {model.config.model_type} cannot be decoded ({why}); "
        f"{HOW_TO_FIX}"
    )


def sequences(vocabulary: int) -> list[list[int]]:
    """Returns sequences whose tokens are spread over the vocabulary."""
    return [[(7919 * i * i + 104729 * i + 11 + 31 * n) % vocabulary for i in range(n)] for n in LENGTHS]


def own_logits(model: PreTrainedModel, tokens: list[int], device: torch.device) -> Tensor:
    """Returns the logits [tokens, vocabulary] of the model's own attention."""
    model.set_attn_implementation("eager")
    try:
        call: Any = model
        return call(torch.tensor([tokens], device=device), use_cache=False).logits[0].float()
    finally:
        model.set_attn_implementation(PAGED)


def check_logits(model: PreTrainedModel, found: Tensor, expected: Tensor) -> None:
    """Raises ConfigError unless the logits of paged decoding are those of the model's own attention."""
    difference = float((found - expected).norm() / expected.norm())
    tolerance = TOLERANCES[model.dtype]
    if not difference <= tolerance:
        raise misfit(
            model,
            f"its logits differ by {difference:.2g} of their norm from those of its own forward pass, but rounding "
            f"explains at most {tolerance:g}: it has a state beside keys and values, or changes its logits",
        )
