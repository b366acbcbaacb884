"""The settings with which DeepSpeed wraps a network."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from asyncrl.config.config import Config
from asyncrl.config.engine_options import merged

BUCKET_ELEMENTS = 50_000_000
"""Number of gradients or weights that the ranks exchange at a time."""


def deepspeed_config(config: Config, network: nn.Module) -> dict[str, Any]:
    """Returns DeepSpeed's settings for the network.

    Gradient accumulation ends at the micro-batch that `TrainedModel.backward` marks as last, and `TrainedModel.step`
    clips gradients. In bfloat16, stage 0 runs as stage 1, since DeepSpeed accumulates gradients in float32 only from
    stage 1 on. Ranks also exchange gradients in float32; by default DeepSpeed rounds them to bfloat16 first, even with
    one rank. Stage 3 keeps the weights of two layers gathered, not DeepSpeed's default of 1e9. Optimizer states in host
    memory are updated there by torch's AdamW: DeepSpeed's own would have to be compiled. The config's
    `learner.deepspeed_options` override these settings.
    """
    bfloat16 = config.model.dtype == "bfloat16"
    stage = config.learner.zero_stage
    zero: dict[str, Any] = {
        "stage": max(stage, 1) if bfloat16 else stage,
        "reduce_bucket_size": BUCKET_ELEMENTS,
        "allgather_bucket_size": BUCKET_ELEMENTS,
        # In stages 1 and 2 DeepSpeed then waits for all streams after backward, also for the weights on their way to
        # the slowest generator.
        "overlap_comm": torch.cuda.is_available() and stage == 3,
    }
    if stage == 3:
        zero["stage3_max_live_parameters"] = zero["stage3_max_reuse_distance"] = 2 * largest_layer(network)
    host = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    if config.learner.offload != "none":
        zero["offload_optimizer"] = host
    if config.learner.offload == "all":
        zero["offload_param"] = host
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero,
        "bf16": {"enabled": bfloat16},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
    }
    return merged(settings, config.learner.deepspeed_options)


def largest_layer(network: nn.Module) -> int:
    """Returns the number of parameters of the network's largest layer: of all modules in lists of modules."""
    layers = [layer for module in network.modules() if isinstance(module, nn.ModuleList) for layer in module]
    sizes = (sum(getattr(p, "ds_numel", p.numel()) for p in layer.parameters()) for layer in layers)
    return max(sizes, default=0)
