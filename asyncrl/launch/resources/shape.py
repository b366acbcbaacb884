"""The sizes of a model, from its `config.json` alone."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from asyncrl.config.mappings import Lora

NAMES = {
    "layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head"),
    "vocabulary": ("vocab_size",),
}

EXPERTS = ".experts."
"""In the names of parameters of which a token uses those of a few experts."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a decoder model."""

    folder: str
    """The folder with its `config.json`."""
    parameters: int
    """Parameters of the complete model, tied ones once."""
    active: int
    """Parameters that one token uses."""
    layer: int
    """Parameters of the largest layer."""
    layers: int
    hidden: int
    intermediate: int
    """Feed-forward size for one token; in a mixture of experts, the sum over the experts of the token."""
    query: int
    """Heads times head size."""
    key_value: int
    """Key-value heads times head size."""
    heads: int
    key_value_heads: int
    vocabulary: int
    window: int | None
    adapters: int = 0
    """Parameters of the adapters that are trained in place of the model; 0 if the model is trained."""

    @property
    def trained(self) -> int:
        """Parameters that are trained."""
        return self.adapters or self.parameters

    def divides_among(self, ranks: int) -> bool:
        """True if this many learner ranks can share sequences: each has as many of the attention heads."""
        heads = self.key_value_heads
        return self.heads % ranks == 0 and (heads % ranks == 0 or ranks % heads == 0)

    @classmethod
    def of(cls, settings: dict[str, Any], folder: str, sizes: dict[str, int], layer: int) -> Shape | None:
        """Returns the shape of a model with this `config.json` and these numbers of elements by parameter; None if
        sizes are missing in the former."""
        settings = settings.get("text_config") or settings
        found = {
            key: number
            for key, names in NAMES.items()
            if isinstance(number := next((settings[n] for n in names if n in settings), None), int)
        }
        if found.keys() != NAMES.keys():
            return None
        head = settings.get("head_dim") or found["hidden"] // found["heads"]
        dense = settings.get("intermediate_size") or settings.get("ffn_dim") or settings.get("n_inner")
        each = settings.get("moe_intermediate_size") or dense or 4 * found["hidden"]
        experts = settings.get("num_experts_per_tok")
        share = (
            experts / (settings.get("num_experts") or settings.get("num_local_experts") or experts) if experts else 1
        )
        key_value_heads = settings.get("num_key_value_heads") or found["heads"]
        return cls(
            folder=folder,
            parameters=sum(sizes.values()),
            active=round(sum(n * share if EXPERTS in name else n for name, n in sizes.items())),
            layer=layer,
            layers=found["layers"],
            hidden=found["hidden"],
            intermediate=experts * each if experts else dense or 4 * found["hidden"],
            query=found["heads"] * head,
            key_value=key_value_heads * head,
            heads=found["heads"],
            key_value_heads=key_value_heads,
            vocabulary=found["vocabulary"],
            window=settings.get("max_position_embeddings"),
        )

    @classmethod
    def read(
        cls, folder: str, *, trust_remote_code: bool = False, values: bool = False, lora: Lora | None = None
    ) -> Shape | None:
        """Returns the shape of the model in a folder, from its `config.json` alone; with `values`, of a critic with its
        layers; with `lora`, of a policy with these adapters. Raises ConfigError if transformers cannot build the
        model."""
        settings = json.loads((Path(folder) / "config.json").read_text())
        from asyncrl.learner.model.loading import largest_layer

        model = empty_model_of(folder, trust_remote_code, values=values)
        sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
        shape = cls.of(settings, folder, sizes, largest_layer(model))
        if shape is None or lora is None or not lora.rank:
            return shape
        from asyncrl.weights.adapters import adapter_shapes

        return replace(shape, adapters=sum(math.prod(sizes) for sizes in adapter_shapes(model, lora).values()))


def empty_model_of(folder: str, trust_remote_code: bool, *, values: bool, **options: Any) -> Any:
    """Returns the model in a folder without its weights; `options` are those of `empty_model`."""
    from asyncrl.learner.model.memory_trace import empty_model, read_model_config  # imports torch

    model_config = read_model_config(folder, trust_remote_code=trust_remote_code)
    return empty_model(model_config, values=values, trust_remote_code=trust_remote_code, **options)
