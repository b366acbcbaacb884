"""The sizes of an engine: its window, the tokens of a step and the pages of its cache."""

from __future__ import annotations

import os
from collections.abc import Mapping

import structlog
import torch
from transformers import PreTrainedModel

from asyncrl.config.config import Config
from asyncrl.errors import ConfigError
from asyncrl.generator.engine import GPU_FRACTION
from asyncrl.generator.transformers_backend.cache import HeadShape, token_bytes
from asyncrl.generator.transformers_backend.setup import CPU_KV_CACHE_BYTES, STEP_TOKENS

log = structlog.get_logger()

CONTEXT_BYTES = 1 << 30
"""CUDA's context and the workspaces of its libraries."""
SAMPLER_COPIES = 5
"""Arrays in float32 of the size of the logits that sampling holds at the same time."""


def window_of(config: Config, model: PreTrainedModel) -> int:
    """Returns the longest sequence, of prompt and completion."""
    window = config.generator.max_model_tokens or model.config.get_text_config().max_position_embeddings
    assert isinstance(window, int)
    return window


def step_tokens(config: Config, device: torch.device, window: int) -> int:
    """Returns the most tokens that a step computes."""
    given = config.generator.engine_settings.get("max_num_batched_tokens")
    tokens = int(given or STEP_TOKENS[device.type])
    return max(tokens, window) if config.deterministic else tokens  # prompts are not split


def cache_pages(
    config: Config,
    shapes: Mapping[int, HeadShape],
    *,
    page_tokens: int,
    window: int,
    vocabulary: int,
    dtype: torch.dtype,
    device: torch.device,
) -> int:
    """Returns the number of pages of the cache, by `generator.kv_cache_bytes` or what is left of the GPU, but no more
    than all sequences can fill. Raises ConfigError if one sequence of the window does not fit."""
    sequences = config.generator.max_running_groups * config.generator.group_size
    page_bytes = page_tokens * token_bytes(shapes, dtype)
    given = config.generator.kv_cache_bytes
    if given is None:
        given = _left_bytes(config, sequences * vocabulary) if device.type == "cuda" else CPU_KV_CACHE_BYTES
    least = -(-window // page_tokens)
    pages = min(given // page_bytes, sequences * least)
    if pages < least:
        raise ConfigError(
            f"generator.kv_cache_bytes: a sequence of {window:,} tokens needs {least * page_bytes:,} bytes of keys and "
            f"values, but there are {max(given, 0):,}; raise it, or lower generator.engine_options.max_model_len"
        )
    log.info("key-value cache", tokens=pages * page_tokens, bytes=pages * page_bytes, page_tokens=page_tokens)
    return pages


def _left_bytes(config: Config, logits: int) -> int:
    """Returns the bytes of this process's share of the GPU that weights and steps leave. The peak is that of a step
    without logits."""
    fraction = float(os.environ.get(GPU_FRACTION, config.generator.gpu_memory_utilization))
    free, total = torch.cuda.mem_get_info()
    used = torch.cuda.max_memory_reserved() + SAMPLER_COPIES * 4 * logits + CONTEXT_BYTES
    held = torch.cuda.max_memory_reserved() - torch.cuda.memory_reserved()
    return min(int(fraction * total) - used, free - held - SAMPLER_COPIES * 4 * logits)
