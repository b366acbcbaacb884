"""Constants of the engine on transformers that the launcher needs, too; imports no torch."""

from __future__ import annotations

CPU_KV_CACHE_BYTES = 1 << 30
"""Key-value cache on a CPU when `generator.kv_cache_bytes` is not set."""
STEP_TOKENS = {"cpu": 2048, "cuda": 8192}
"""Most tokens of a step, by kind of device, without `max_num_batched_tokens` in `generator.engine_options`."""
