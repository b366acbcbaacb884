"""The peak of a process's memory."""

from __future__ import annotations

import resource
import sys
from typing import Any


def peak_memory_bytes() -> int:
    """The most memory that this process has used since its start: of tensors on its GPU if it uses one, otherwise its
    resident set."""
    torch: Any = sys.modules.get("torch")  # the replay queue does not import torch
    if torch is not None and torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
