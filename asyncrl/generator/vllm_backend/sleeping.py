"""Frees the device of a vLLM engine between two steps, and takes it back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from asyncrl.generator.engine import Waking

if TYPE_CHECKING:
    from vllm.v1.engine.llm_engine import LLMEngine

_PAUSE = 0
"""vLLM's level of sleep at which only the scheduler sleeps."""
_TAGS: dict[Waking, str] = {"weights": "weights", "cache": "kv_cache"}


def sleep(engine: LLMEngine, level: int) -> None:
    """Pauses the engine and frees its memory, also in its worker processes: the levels are vLLM's own. Running requests
    are preempted and computed again later. Without vLLM's sleep mode, which a CPU does not have, memory stays."""
    engine.sleep(level if _frees(engine) else _PAUSE, mode="keep")
    if not _frees(engine):
        engine.reset_prefix_cache(reset_running_requests=True)


def wake(engine: LLMEngine, what: Waking) -> None:
    """Takes a part of the memory back; with the cache the engine continues."""
    if _frees(engine):
        engine.wake_up([_TAGS[what]])
    elif what == "cache":
        engine.wake_up(["scheduling"])


def _frees(engine: LLMEngine) -> bool:
    model: Any = engine.model_config
    return model.enable_sleep_mode
