"""The peak of a process's memory."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any


def peak_memory_bytes() -> int:
    """The most memory that this process has used since its start: of tensors on its GPU if it uses one, otherwise its
    resident set."""
    torch: Any = sys.modules.get("torch")  # the replay queue does not import torch
    if torch is not None and torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    # getrusage has that of the process before it executed another program, too.
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split(maxsplit=1)[0]) << 10
