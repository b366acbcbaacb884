"""The weights of a model as a learner sends them, and their conversion to the checkpoint's names and shapes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import groupby

from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from asyncrl.config import Config
from asyncrl.weights.checkpoint import checkpoint_tensors, meta_model

Weights = Sequence[tuple[str, Tensor]]


class SentWeights:
    """Names and shapes of the parameters of the transformers model; holds no weights."""

    def __init__(self, config: Config) -> None:
        self._model = meta_model(config.model.path, trust_remote_code=config.model.trust_remote_code)
        self.model_type: str = self._model.config.model_type
        self.shapes = {name: tuple(parameter.shape) for name, parameter in self._model.named_parameters()}
        """Shapes of the tensors that a learner sends; tied weights once."""
        self._tensors = checkpoint_tensors(self._model)

    @property
    def is_computed(self) -> bool:
        """True if the library computes tensors of the checkpoint from several parameters of a layer."""
        return self._tensors is None

    def to_checkpoint(self, tensors: Weights) -> Iterator[tuple[str, Tensor]]:
        """The weights in the names and shapes of a checkpoint, which engines load, in the order of the checkpoint.
        Mixture-of-experts models have one tensor for all experts of a layer, their checkpoints one for each: views.
        What the library computes is copied, one layer at a time; otherwise some of the weights are enough."""
        if self._tensors is None:
            for _, layer in groupby(tensors, key=lambda named: _layer(named[0])):
                yield from revert_weight_conversion(self._model, dict(layer)).items()
            return
        parameters = dict(tensors)
        for one in self._tensors:
            if one.parameter in parameters:
                yield one.name, one.of(parameters[one.parameter])


def _layer(name: str) -> str:
    """The name up to its first number."""
    found = re.match(r".*?\.\d+\.", name)
    return found.group() if found else ""
