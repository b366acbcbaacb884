"""The weights of a model as a learner sends them, and their conversion to the checkpoint's names and shapes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import groupby

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from asyncrl.config.config import Config
from asyncrl.weights.model_tensors import checkpoint_tensors, meta_model

Weights = Sequence[tuple[str, Tensor]]


class SentWeights:
    """Names and shapes of the parameters of the transformers model; with adapters that are merged, also the weights."""

    def __init__(self, config: Config) -> None:
        self.model = meta_model(config.model.path, trust_remote_code=config.model.trust_remote_code)
        """The model, without weights."""
        self.base: dict[str, Tensor] = {}
        """The weights that adapters are merged into."""
        if config.learner.lora.rank and config.learner.lora.load == "merged":
            self.base = _weights_of(config)
        self.model_type: str = self.model.config.model_type
        self.shapes = {name: tuple(parameter.shape) for name, parameter in self.model.named_parameters()}
        """Shapes of the tensors that a learner sends; tied weights once."""
        self._tensors = checkpoint_tensors(self.model)

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
                yield from revert_weight_conversion(self.model, dict(layer)).items()
            return
        parameters = dict(tensors)
        for one in self._tensors:
            if one.parameter in parameters:
                yield one.name, one.of(parameters[one.parameter])


def _weights_of(config: Config) -> dict[str, Tensor]:
    """Returns the weights in `model.path`, in host memory."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        config.model.path,
        dtype=getattr(torch, config.model.dtype),
        trust_remote_code=config.model.trust_remote_code,
        use_safetensors=True,  # other formats are pickles
    )
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def _layer(name: str) -> str:
    """The name up to its first number."""
    found = re.match(r".*?\.\d+\.", name)
    return found.group() if found else ""
