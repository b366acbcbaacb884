"""Loads the weights of a version into a vLLM engine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from asyncrl.config import Config
from asyncrl.errors import AsyncrlError, ConfigError
from asyncrl.generator.vllm_backend.sent_weights import SentWeights, Weights
from asyncrl.generator.vllm_backend.shared_weights import SharedWeights
from asyncrl.generator.vllm_backend.workers import Workers
from asyncrl.generator.weight_fit import check_fit

if TYPE_CHECKING:
    from vllm.v1.engine.llm_engine import LLMEngine


class WeightLoader:
    """Shows the weights to vLLM's weight transfer engines, one in each process that computes a part of the model."""

    def __init__(self, config: Config, engine: LLMEngine, sent: SentWeights, workers: Workers) -> None:
        self._config = config
        self._engine = engine
        self._sent = sent
        self._workers = workers
        self._shared = SharedWeights()

    def load(self, version: int, tensors: Weights, *, is_first: bool) -> None:
        """Loads the weights. Raises RunError, and loads nothing, when they do not match the model, and ConfigError when
        the first ones cannot be loaded."""
        given = {name: tuple(tensor.shape) for name, tensor in tensors}
        check_fit(version, given, self._sent.shapes, self._config.model.path)
        self.load_checkpoint(self._sent.to_checkpoint(tensors), is_first=is_first)

    def load_checkpoint(self, tensors: Iterator[tuple[str, Tensor]], *, is_first: bool) -> None:
        """Loads weights with the names and shapes of a checkpoint. Raises ConfigError when the first ones cannot be
        loaded."""
        try:
            self._call("start_weight_update")
            for part in self._parts(tensors):
                self._call("update_weights", part)
            self._call("finish_weight_update")
        except (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            is_other = isinstance(error, RuntimeError) and not self._workers  # worker processes report all as this one
            if isinstance(error, AsyncrlError) or not is_first or is_other:
                raise
            raise ConfigError(
                f"model.path = {self._config.model.path!r}: the engine cannot load new weights of a model of type "
                f"{self._sent.model_type} ({type(error).__name__}: {error}); use a family of the table in "
                "docs/models.md"
            ) from error

    def close(self) -> None:
        """Frees the memory that is shared with worker processes."""
        self._shared.close()

    def _parts(self, tensors: Iterator[tuple[str, Tensor]]) -> Iterator[dict[str, Any]]:
        """Yields the descriptions of parts of an update; what they describe is there until the next."""
        from asyncrl.generator.vllm_backend.weight_transfer import STAGING

        if self._workers:
            yield from map(asdict, self._shared.buckets(tensors))
            return
        STAGING["weights"] = tensors
        try:
            yield {"key": "weights"}
        finally:
            del STAGING["weights"]

    def _call(self, method: str, *args: object) -> None:
        """Calls a method of the object of vLLM that computes, in all processes."""
        timeout_s = self._config.launch.heartbeat_timeout_s
        self._workers.call(partial(self._engine.collective_rpc, method, timeout=timeout_s, args=args))
