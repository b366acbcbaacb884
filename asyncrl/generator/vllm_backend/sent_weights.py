"""The weights of a model as a learner sends them, and their conversion to the checkpoint's names and shapes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import groupby

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion

from asyncrl.config import Config

Weights = Sequence[tuple[str, Tensor]]


class SentWeights:
    """Names and shapes of the parameters of the transformers model; holds no weights."""

    def __init__(self, config: Config) -> None:
        trust = config.model.trust_remote_code
        with torch.device("meta"):
            self._model = AutoModelForCausalLM.from_config(
                AutoConfig.from_pretrained(config.model.path, trust_remote_code=trust), trust_remote_code=trust
            )
        parameters = dict(self._model.named_parameters())
        self.model_type: str = self._model.config.model_type
        self.shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
        """Shapes of the tensors that a learner sends; tied weights once."""
        self._differs = revert_weight_conversion(self._model, parameters).keys() != parameters.keys()

    def to_checkpoint(self, tensors: Weights) -> Iterator[tuple[str, Tensor]]:
        """The weights in the names and shapes of a checkpoint, which engines load. Mixture-of-experts models have one
        tensor for all experts of a layer, their checkpoints one for each: those are copied, one layer at a time."""
        if not self._differs:
            yield from tensors
            return
        for _, layer in groupby(tensors, key=lambda named: _layer(named[0])):
            yield from revert_weight_conversion(self._model, dict(layer)).items()


def _layer(name: str) -> str:
    """The name up to its first number."""
    found = re.match(r".*?\.\d+\.", name)
    return found.group() if found else ""
