"""Process set-up: garbage collection, cores, end with the parent; stopwatch of activities; memory peak."""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import signal
import sys
import time
from collections.abc import Sequence
from multiprocessing.context import SpawnContext, SpawnProcess
from multiprocessing.process import BaseProcess
from types import ModuleType
from typing import Any, Literal

from asyncrl.util.files import open_file

PYTHON = (sys.executable, "-P")
"""The interpreter of processes of asyncrl. -P keeps files in the working folder from shadowing modules of the standard
library; `user_code` finds the user's modules."""
SAFE_PATH = ("PYTHONSAFEPATH", "asyncrl")
"""The variable that is -P for helpers, with a value by which they know that the user has not set it."""
MAX_OPEN_FILES = 1 << 20
"""More than any run needs. Containers allow up to a billion, and there are programs that close every possible file."""
Activity = Literal["waiting", "working", "syncing", "writing"]
ACTIVITIES: tuple[Activity, ...] = ("waiting", "working", "syncing", "writing")
"""Waiting for other roles; its own work; weight transfer or disk sync; passing on and storing results."""
GENERATOR_ACTIVITIES = (*ACTIVITIES, "environments")
"""The activities of a generator. Environments: nothing runs in its engine, since all its episodes wait for theirs."""
IDLE_ACTIVITIES = ("waiting", "environments")
"""The activities in which a generator has nothing to generate."""
GENERATOR_PHASES = ("engine", "requests", "rewards", "messages")
"""The phases of a generator's work: decoding steps; adding requests to the engine; handing completions to the reward
workers and collecting rewards; the exchange with the replay queue."""
LEARNER_PHASES = (
    "values", "proximal", "reference", "advantage", "forward", "backward", "optimizer", "critic",
)  # fmt: skip
"""The phases of a learner's work in their order; a step has those that the algorithm needs."""


class Stopwatch:
    """Divides time among activities: exactly one is active at any time, so that they add up to the total."""

    def __init__(self, names: Sequence[str] = ACTIVITIES) -> None:
        """`names` are the activities; the first one is active at the start."""
        self._seconds: dict[str, float] = dict.fromkeys(names, 0.0)
        self._last_lap = dict(self._seconds)
        self._activity = names[0]
        self._since_s = time.monotonic()

    def switch(self, activity: str) -> None:
        """Switches to another activity."""
        self._count()
        self._activity = activity

    def seconds(self) -> dict[str, float]:
        """Seconds of every activity since the start."""
        self._count()
        return dict(self._seconds)

    def lap(self) -> dict[str, float]:
        """Seconds of every activity since the last lap."""
        before, self._last_lap = self._last_lap, self.seconds()
        return {name: seconds - before[name] for name, seconds in self._last_lap.items()}

    def _count(self) -> None:
        now_s = time.monotonic()
        self._seconds[self._activity] += now_s - self._since_s
        self._since_s = now_s


def fractions(seconds: dict[str, float]) -> dict[str, float]:
    """The fraction of each activity, and the total as "seconds"."""
    total = sum(seconds.values())
    return {name: part / total if total else 0.0 for name, part in seconds.items()} | {"seconds": total}


PR_SET_PDEATHSIG = 1
NEW_OBJECTS = 50_000


def end_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Makes the kernel send this process the signal when the thread that started it ends, even if `parent` is killed.

    On systems other than Linux it only detects a parent that has already ended.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os._exit(1)


def raise_file_limit() -> int:
    """Raises this process's limit of open files, often 1,024, to what the system allows; returns it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return limit


def tune_gc() -> None:
    """Freezes existing objects and raises the GC threshold to NEW_OBJECTS allocations, for processes that allocate a
    lot but rarely create cycles."""
    gc.freeze()
    gc.set_threshold(NEW_OBJECTS)


class _Helper(SpawnProcess):
    @staticmethod
    def _Popen(process_obj: BaseProcess) -> Any:
        name, value = SAFE_PATH
        adds_flag, main = not sys.flags.safe_path, sys.modules["__main__"]
        if adds_flag:
            os.environ[name] = value
        # A helper imports the main module of its parent, which may be a script of the user that would run again.
        sys.modules["__main__"] = ModuleType("__main__")
        try:
            return SpawnProcess._Popen(process_obj)
        finally:
            sys.modules["__main__"] = main
            if adds_flag:
                del os.environ[name]


class HelperContext(SpawnContext):
    """The context that starts helpers, which call `become_helper`. Their interpreters have -P, even if this process
    does not, such as `asyncrl eval`, and do not import its main module. They are spawned: a fork of a process with an
    engine shares its locks and device state."""

    Process = _Helper


def become_helper(parent: int) -> None:
    """Makes this process a helper of a role: it ends with `parent`, uses the helpers' cores, and one thread. The
    user's programs that it starts have no -P from `HelperContext`."""
    end_with_parent(parent)
    pin_helper_cpus()
    name, value = SAFE_PATH
    if os.environ.get(name) == value:
        del os.environ[name]
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS"):
        os.environ[name] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def pin_helper_cpus() -> None:
    """Moves this process to the cores that the launcher assigns to the helpers of its role, if any."""
    cpus = os.environ.get("ASYNCRL_HELPER_CPUS")
    if cpus:
        os.sched_setaffinity(0, {int(cpu) for cpu in cpus.split(",")})


def peak_memory_bytes() -> int:
    """The most memory that this process has used since its start: of tensors on its GPU if it uses one, otherwise its
    resident set."""
    torch: Any = sys.modules.get("torch")  # the replay queue does not import torch
    if torch is not None and torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    # getrusage includes the peak before the process executed another program.
    with open("/proc/self/status", opener=open_file) as file:  # peers without keys may hold all descriptors
        status = file.read()
    return int(status.partition("VmHWM:")[2].split(maxsplit=1)[0]) << 10
