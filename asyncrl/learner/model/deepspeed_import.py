"""Imports DeepSpeed for the available accelerator and silences its logs.

The other modules import DeepSpeed from here, so that these settings apply before its import.
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

# cuDNN builds a plan for every new attention shape, which takes some 100 ms where the kernel takes less than one, and
# almost every packed row has a new shape.
torch.backends.cuda.enable_cudnn_sdp(False)
deepspeed.utils.logger.setLevel(logging.WARNING)
# This op serves tensor-parallel inference only; without this line the first start on a CPU would compile it.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
# DeepSpeed calls deprecated names of collectives several times per step.
warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)


def enable_determinism() -> None:
    """Makes this process compute identical results from identical inputs. Call it before the process uses a GPU."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # Filling new tensors would only make memory deterministic that nothing reads.
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
