"""What a learner sends for a model, and the same weights as the model's checkpoint has them."""

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
    """Names and shapes of the parameters of transformers' model, without its weights."""

    def __init__(self, config: Config) -> None:
        trust = config.model.trust_remote_code
        with torch.device("meta"):
            self._model = AutoModelForCausalLM.from_config(
                AutoConfig.from_pretrained(config.model.path, trust_remote_code=trust), trust_remote_code=trust
            )
        parameters = dict(self._model.named_parameters())
        self.model_type: str = self._model.config.model_type
        self.shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
        """Of what a learner sends; tied weights once."""
        self._differs = revert_weight_conversion(self._model, parameters).keys() != parameters.keys()

    def to_checkpoint(self, tensors: Weights) -> Iterator[tuple[str, Tensor]]:
        """The weights by the names and in the shapes of a checkpoint, which engines load. Models of experts have one
        tensor for all experts of a layer, their checkpoints one for each: copies, of a layer at a time."""
        if not self._differs:
            yield from tensors
            return
        for _, layer in groupby(tensors, key=lambda named: _layer(named[0])):
            yield from revert_weight_conversion(self._model, dict(layer)).items()


def _layer(name: str) -> str:
    """The name up to its first number."""
    found = re.match(r".*?\.\d+\.", name)
    return found.group() if found else ""
