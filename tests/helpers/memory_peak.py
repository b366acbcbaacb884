"""Measures the memory of the own process."""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
LIBC = ctypes.CDLL("libc.so.6")


def keep_freed_memory_away() -> None:
    """Makes the C library return freed memory to the system at once."""
    for option, value in ((M_MMAP_THRESHOLD, 65536), (M_TRIM_THRESHOLD, 65536), (M_ARENA_MAX, 1)):
        LIBC.mallopt(option, value)
    LIBC.malloc_trim(0)


def anonymous_bytes() -> int:
    """Returns the anonymous memory of this process."""
    return _status_bytes("RssAnon")


class Peak:
    """The largest anonymous memory of this process since `reset`, as the kernel counts it: samples miss peaks of
    milliseconds on a busy machine. Files that are mapped at the peak must be so when it is read."""

    def reset(self) -> None:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")

    @property
    def num_bytes(self) -> int:
        return _status_bytes("VmHWM") - _status_bytes("RssFile") - _status_bytes("RssShmem")


def _status_bytes(name: str) -> int:
    with open("/proc/self/status") as lines:
        line = next(line for line in lines if line.startswith(name))
    return int(line.split()[1]) << 10
