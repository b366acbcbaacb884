"""Prepares a vLLM engine to return the experts of its tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from asyncrl.errors import ConfigError
from asyncrl.util.model_files import KEY

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.engine.llm_engine import LLMEngine

_REFUSAL = "outed-experts capture"
"""In every message of vLLM about a router that does not tell its choice."""
_WITHOUT = "use generator.engine=transformers, or algorithm.routing_replay=off"


def record_routing(config: VllmConfig, *, on_gpu: bool) -> None:
    """Makes vLLM's routers write down their choices. Raises ConfigError if the model runner cannot return them."""
    if on_gpu and not config.use_v2_model_runner:
        raise ConfigError(f"{KEY}: vLLM returns experts by its model runner V2 only, and uses V1 here; {_WITHOUT}")
    # After vLLM's own check, which demands a cache of prompts and, on a CPU, a model runner that is not there.
    config.aux_output_config.enable_return_routed_experts = True
    if config.model_config.get_sliding_window() is not None:
        # A cached prompt has no blocks outside of the window, but its tokens there have experts.
        config.cache_config.enable_prefix_caching = False


def return_by_worker(engine: LLMEngine) -> None:
    """Makes workers with vLLM's first model runner return the experts of every step."""
    from asyncrl.generator.vllm_backend.routing_worker import return_routing

    engine.collective_rpc(return_routing)


@contextmanager
def explaining_routing(path: str) -> Iterator[None]:
    """Turns errors of vLLM about the routers of the model at `path` into a ConfigError."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        if _REFUSAL not in str(error):
            raise
        raise ConfigError(
            f"{KEY}: the routers of model.path = {path!r} do not tell vLLM their choice ({error}); {_WITHOUT}"
        ) from error
