"""What a process settles for itself when it starts."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
NEW_OBJECTS = 50_000


def end_with_parent(parent: int) -> None:
    """The kernel kills this process when the thread that started it ends, however hard `parent` was killed.

    On systems other than Linux only a parent that is gone already is noticed.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def collect_seldom() -> None:
    """Looks for unreachable cycles once in NEW_OBJECTS, and not among what is there already: for a process that makes
    many objects and hardly any cycles."""
    gc.freeze()
    gc.set_threshold(NEW_OBJECTS)


def use_helper_cpus() -> None:
    """Moves this process to the cores that the launcher names for the helpers of its role, where it names some."""
    cpus = os.environ.get("ASYNCRL_HELPER_CPUS")
    if cpus:
        os.sched_setaffinity(0, {int(cpu) for cpu in cpus.split(",")})
