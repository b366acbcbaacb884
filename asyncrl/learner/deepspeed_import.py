"""DeepSpeed as the learner uses it: imported for the accelerator that is there, and quiet.

The other modules import it from here, so that this comes first.
"""

from __future__ import annotations

import logging
import os
import warnings

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer

__all__ = ["BF16_Optimizer", "ZeROOptimizer", "deepspeed", "enable_determinism"]

# cuDNN builds a plan for every new shape of attention, and packed rows have new shapes nearly every time. Read from
# torch's sources, not measured on a GPU yet.
torch.backends.cuda.enable_cudnn_sdp(False)
deepspeed.utils.logger.setLevel(logging.WARNING)
# Serves tensor-parallel inference only; without this every first start on CPUs would compile it.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
# DeepSpeed calls collectives by their older names, several times a step.
warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)


def enable_determinism() -> None:
    """From now on this process computes the same from the same; call it before it uses a GPU."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # Filling new tensors would only make memory that nobody reads the same.
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
