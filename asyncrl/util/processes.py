"""What a process settles for itself when it starts."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import struct
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

Activity = Literal["waiting", "working", "syncing", "writing"]
ACTIVITIES: tuple[Activity, ...] = ("waiting", "working", "syncing", "writing")
"""For others, at its own task, on weights or the disk's answer, on handing on and keeping what was made."""


class Stopwatch:
    """Divides time among activities: at every moment it is in one of them, so that they add up to all of it."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = dict.fromkeys(ACTIVITIES, 0.0)
        self._told = dict(self._seconds)
        self._activity: Activity = "waiting"
        self._since_s = time.monotonic()

    def switch(self, activity: Activity) -> None:
        """Goes over to another activity."""
        self._count()
        self._activity = activity

    def seconds(self) -> dict[str, float]:
        """Of every activity since the start."""
        self._count()
        return dict(self._seconds)

    def lap(self) -> dict[str, float]:
        """Seconds of every activity since the last lap."""
        before, self._told = self._told, self.seconds()
        return {name: seconds - before[name] for name, seconds in self._told.items()}

    def _count(self) -> None:
        now_s = time.monotonic()
        self._seconds[self._activity] += now_s - self._since_s
        self._since_s = now_s


def fractions(seconds: dict[str, float]) -> dict[str, float]:
    """The part of each activity, and how long it was altogether."""
    total = sum(seconds.values())
    return {name: part / total if total else 0.0 for name, part in seconds.items()} | {"seconds": total}


PR_SET_PDEATHSIG = 1
NEW_OBJECTS = 50_000
TURN_S = 0.03
SYS_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}


def end_with_parent(parent: int) -> None:
    """The kernel kills this process when the thread that started it ends, however hard `parent` was killed.

    On systems other than Linux only a parent that is gone already is noticed.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def tune_gc() -> None:
    """Looks for unreachable cycles once in NEW_OBJECTS, and not among what is there already: for a process that makes
    many objects and hardly any cycles."""
    gc.freeze()
    gc.set_threshold(NEW_OBJECTS)


def pin_helper_cpus() -> None:
    """Moves this process to the cores that the launcher names for the helpers of its role, where it names some."""
    cpus = os.environ.get("ASYNCRL_HELPER_CPUS")
    if cpus:
        os.sched_setaffinity(0, {int(cpu) for cpu in cpus.split(",")})


def use_batch_scheduling() -> None:
    """From here on the calling thread, and those that it starts, wait for the end of a turn when they wake up while
    another process computes on their core. Raises OSError where the system forbids that."""
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def set_time_slice() -> None:
    """`leave_the_core`, and the calling thread keeps the core for TURN_S when it has it: processes that compute on one
    core otherwise change places every two or three ms, and find the caches filled by another each time.

    Raises OSError where the system forbids that. Linux before 6.12 and other processors leave the turns as they are.
    """
    use_batch_scheduling()
    number = SYS_SCHED_SETATTR.get(os.uname().machine)
    if number is None:
        return
    # struct sched_attr: size, policy, flags, nice, priority, runtime (the turn, in ns), deadline, period
    attributes = struct.pack("IIQiIQQQ", 48, os.SCHED_BATCH, 0, 0, 0, int(TURN_S * 1e9), 0, 0)
    if ctypes.CDLL(None, use_errno=True).syscall(number, 0, attributes, 0):
        error = ctypes.get_errno()
        raise OSError(error, f"sched_setattr: {os.strerror(error)}")


@contextmanager
def normal_priority() -> Iterator[None]:
    """In it a thread that was told to `leave_the_core` takes it as soon as it wakes up, and so do threads that it
    starts."""
    policy = os.sched_getscheduler(0)
    if policy != os.SCHED_BATCH:
        yield
        return
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    try:
        yield
    finally:
        os.sched_setscheduler(0, policy, os.sched_param(0))
