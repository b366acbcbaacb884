"""Measures the memory of the own process."""

from __future__ import annotations

import ctypes
import threading
import time

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
LIBC = ctypes.CDLL("libc.so.6")


def keep_freed_memory_away() -> None:
    """Makes the C library return freed memory to the system at once."""
    for option, value in ((M_MMAP_THRESHOLD, 65536), (M_TRIM_THRESHOLD, 65536), (M_ARENA_MAX, 1)):
        LIBC.mallopt(option, value)
    LIBC.malloc_trim(0)


def anonymous_bytes() -> int:
    """Returns the anonymous memory of this process."""
    with open("/proc/self/status") as lines:
        line = next(line for line in lines if line.startswith("RssAnon"))
    return int(line.split()[1]) << 10


class Peak:
    """The largest anonymous memory of this process since `reset`, sampled every millisecond."""

    def __init__(self) -> None:
        self.num_bytes = 0
        threading.Thread(target=self._run, daemon=True).start()

    def reset(self) -> None:
        self.num_bytes = anonymous_bytes()

    def _run(self) -> None:
        while True:
            self.num_bytes = max(self.num_bytes, anonymous_bytes())
            time.sleep(1e-3)
