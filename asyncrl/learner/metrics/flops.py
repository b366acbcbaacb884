"""Floating-point operations of a step, and the fraction of the devices' peak that they are (MFU, arXiv:2204.02311 B).

The operations are those that the mathematics of the step needs. A multiplication and an addition are two. For N weights
in the layers, V * H in the output layer, L layers, A heads of size D, and token t of a sequence (from 1):

    forward    2 N for each token + 2 V H for each action token + 4 L A D t for each token
    backward   twice the forward pass

With all tokens trained that is the usual 6 N for each token, and the causal half of attention. A prefix that a packed
row computes once for a group counts once. What gradient checkpointing computes again does not count, nor does the
critic; a reference policy counts as a pass of the policy. With adapters an update counts as two passes, since the
frozen weights need no gradient.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from asyncrl.learner.batch import Batch, MicroBatch

PEAKS: tuple[tuple[str, float], ...] = (
    ("GB200", 2500e12),
    ("B200", 2250e12),
    ("H200 NVL", 835e12),
    ("H200", 989e12),
    ("GH200", 989e12),
    ("H100 NVL", 835e12),
    ("H100 PCIe", 756e12),
    ("H100", 989e12),
    ("H800", 989e12),
    ("H20", 148e12),
    ("A100", 312e12),
    ("A800", 312e12),
    ("A30", 165e12),
    ("A40", 149.7e12),
    ("A10", 125e12),
    ("L40S", 362e12),
    ("L40", 181e12),
    ("L20", 119.5e12),
    ("L4", 121e12),
    ("RTX 6000 Ada", 364e12),
    ("RTX A6000", 154.8e12),
    ("RTX 4090", 165.2e12),
    ("RTX 3090", 71e12),
)
"""Words of a device's name, and its peak in FLOP/s for dense matrices in bfloat16, from the vendor's data sheets. The
first row whose words are all in the name counts."""
OTHER_DEVICES = frozenset({"MIG", "Laptop"})
"""Words of names of devices with another peak than the rest of the name says."""


def peak_flops(device_name: str) -> float | None:
    """Returns the peak of a device with this name (`torch.cuda.get_device_name`) in FLOP/s; None if it is unknown."""
    words = set(device_name.replace("-", " ").split())
    if words & OTHER_DEVICES:
        return None
    return next((peak for name, peak in PEAKS if words.issuperset(name.split())), None)


def device_peak(device: torch.device) -> float | None:
    """Returns the peak of a GPU in FLOP/s; None if it is unknown, and for a CPU."""
    return peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


@dataclass(frozen=True, slots=True)
class ModelFlops:
    """The sizes of a model that determine its operations."""

    layers: int
    """Weights by which a token is multiplied in the layers; of a mixture of experts, those of the token's experts."""
    head: int
    """Weights of the output layer."""
    attention: int
    """Layers * heads * head size."""

    @classmethod
    def of(cls, model: PreTrainedModel) -> ModelFlops:
        """Returns the sizes of a causal language model."""
        config: Any = model.config.get_text_config()
        experts = next(
            (n for name in ("num_experts", "num_local_experts", "n_routed_experts") if (n := getattr(config, name, 0))),
            0,
        )
        chosen = (getattr(config, "num_experts_per_tok", 0) or 0) / experts if experts else 1.0
        modules: list[Any] = [model.get_input_embeddings(), model.get_output_embeddings()]
        embedding, head = (module.weight for module in modules)
        layers = 0.0
        for name, parameter in model.named_parameters():
            shape: torch.Size = getattr(parameter, "ds_shape", parameter.shape)
            if len(shape) > 1 and parameter is not embedding and parameter is not head:
                layers += math.prod(shape) * (chosen if ".experts." in name else 1.0)
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return cls(
            layers=round(layers),
            head=math.prod(getattr(head, "ds_shape", head.shape)),
            attention=config.num_hidden_layers * config.num_attention_heads * size,
        )

    def forward(self, micro: MicroBatch) -> int:
        """Returns the operations of one forward pass of a packed row."""
        computed = micro.layout.computed
        attended = int(micro.position_ids[computed].sum()) + len(computed)
        return 2 * self.layers * len(computed) + 2 * self.head * len(micro.targets) + 4 * self.attention * attended

    def step(self, batch: Batch, *, passes: int) -> float:
        """Returns the operations of this rank's batch in `passes` forward passes; an update counts as
        three, or as two with adapters."""
        return float(passes * sum(self.forward(micro) for micro in batch.micro_batches))


def utilization(metrics: Mapping[str, float], *, ranks: int, peak: float | None) -> dict[str, float]:
    """Returns `learner/mfu`: the operations of the step, as a fraction of what the ranks' devices could do at their
    peak in its seconds. Empty without a peak."""
    possible = (peak or 0.0) * ranks * metrics["learner/step_s"]
    return {"learner/mfu": metrics["learner/flops"] / possible} if possible else {}
