"""Loads the weights of a version into a vLLM engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from torch import Tensor

from asyncrl.config.config import Config
from asyncrl.errors import AsyncrlError, ConfigError
from asyncrl.generator.vllm_backend.sent_weights import SentWeights
from asyncrl.generator.vllm_backend.shared_weights import SharedWeights
from asyncrl.generator.vllm_backend.workers import Workers
from asyncrl.generator.weight_fit import Shapes, check_fit
from asyncrl.weights.layout import WeightPart


class WeightLoader:
    """Shows the weights to vLLM's weight transfer engines, one in each process that computes a part of the model.

    An update is `begin`, `load` once or more, `finish`. In between the model has weights of two versions: it is torn
    until an update is finished; one that is not finished is followed by another `begin`.
    """

    def __init__(self, config: Config, sent: SentWeights, workers: Workers) -> None:
        """Raises ConfigError if the model cannot be loaded bucket by bucket, but `weights.staging` says so."""
        self._config = config
        self._sent = sent
        self._workers = workers
        self._shared = SharedWeights()
        self.torn = False
        """True if some weights may be of another version than others."""
        self._has_begun = False
        """True while vLLM expects parts of an update."""
        self._by_rows: frozenset[str] = frozenset()
        if config.weights.staging == "buckets":
            self._by_rows = self._vocabulary()

    def begin(self, version: int, shapes: Shapes) -> None:
        """Begins an update with weights of these shapes. Raises RunError, and changes nothing, when they do not match
        the model."""
        check_fit(version, shapes, self._sent.shapes, self._config.model.path)
        if not self._has_begun:
            self._workers.rpc("start_weight_update")
            self._has_begun = True
        self.torn = True

    def load(self, parts: Sequence[WeightPart], *, is_first: bool) -> None:
        """Loads weights. Raises ConfigError when the first ones of the engine cannot be loaded."""
        whole = [(part.name, part.tensor) for part in parts if part.first_row is None]
        self._has_begun = False  # vLLM ends an update at an error
        with self._explaining(is_first):
            for update in self._updates(self._sent.to_checkpoint(whole)):
                self._workers.rpc("update_weights", update)
            for part in parts:
                if part.first_row is not None:
                    for update in self._updates(iter([(part.name, part.tensor)])):
                        self._workers.rpc("update_weights", update | {"first_row": part.first_row})
        self._has_begun = True

    def finish(self, *, is_first: bool) -> None:
        """Ends the update. Raises ConfigError when the first one leaves a parameter unset."""
        with self._explaining(is_first):
            self._workers.rpc("finish_weight_update")
        self.torn = self._has_begun = False

    def takes_rows(self, name: str) -> bool:
        """True if some rows of this parameter can be loaded at a time."""
        return name in self._by_rows

    def bucket_memory(self, num_bytes: int) -> Tensor | None:
        """Returns memory that worker processes have, too; None if there are none."""
        return self._shared.memory(num_bytes) if self._workers else None

    def close(self) -> None:
        """Frees the memory that is shared with worker processes."""
        self._shared.close()

    def _vocabulary(self) -> frozenset[str]:
        from asyncrl.generator.vllm_backend.weight_transfer import loading_of

        found = self._workers.rpc(loading_of)
        if self._sent.is_computed or not all(in_place for in_place, _ in found):
            raise ConfigError(
                f"weights.staging = 'buckets': vLLM reloads a model of type {self._sent.model_type} layer by layer, "
                "not in place; use weights.staging=whole, and another weights.transport than ipc"
            )
        return frozenset(self._sent.shapes).intersection(*(names for _, names in found))

    @contextmanager
    def _explaining(self, is_first: bool) -> Iterator[None]:
        """Turns errors of the first weights into a ConfigError: the model is of a family that vLLM cannot update."""
        try:
            yield
        except (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            is_other = isinstance(error, RuntimeError) and not self._workers  # worker processes report all as this one
            if isinstance(error, AsyncrlError) or not is_first or is_other:
                raise
            raise ConfigError(
                f"model.path = {self._config.model.path!r}: the engine cannot load new weights of a model of type "
                f"{self._sent.model_type} ({type(error).__name__}: {error}); use a family of the table in "
                "docs/models.md"
            ) from error

    def _updates(self, tensors: Iterator[tuple[str, Tensor]]) -> Iterator[dict[str, Any]]:
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
