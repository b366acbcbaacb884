"""The machines of a simulated run, which roles each has, and how often they fail."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from itertools import pairwise

from asyncrl.errors import ConfigError
from asyncrl.plan.hardware import Gpu
from asyncrl.plan.workload import Setup


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFailures:
    """Failures of machines, and what they cost. Raises ConfigError for a number out of range."""

    machines: int
    mtbf_s: float
    """Mean seconds that a machine runs until it fails; exponentially distributed."""
    restart_s: float
    """Seconds until the roles of a failed machine run again, on it or on another one."""
    checkpoint_steps: int
    """Steps between two checkpoints. Those since the last one are trained again when a machine of the learner fails."""
    checkpoint_s: float = 0.0
    """Seconds that training waits for a checkpoint."""

    def __post_init__(self) -> None:
        for name in (field.name for field in fields(self)):
            value, positive = getattr(self, name), name in ("machines", "mtbf_s", "checkpoint_steps")
            if not (math.isfinite(value) and value >= 0 and (value or not positive)):
                raise ConfigError(f"simulate: {name} = {value:g}, must be {'above' if positive else 'at least'} 0")


@dataclass(frozen=True, slots=True)
class Machine:
    """The generators and learner ranks on a machine."""

    generators: tuple[int, ...]
    learners: int
    """Number of learner ranks."""


def devices_of(setup: Setup) -> int:
    """Devices of a run: one of each learner rank, then those of the generators."""
    return setup.learners + math.ceil(setup.generators / setup.generators_per_device)


def usual_machines(setup: Setup, gpu: Gpu | None = None) -> int:
    """Machines of a run whose machines have the usual number of GPUs."""
    return math.ceil(devices_of(setup) / (gpu or Gpu()).per_host)


def place(setup: Setup, machines: int) -> list[Machine]:
    """Returns the machines, whose devices differ by one at most: learner ranks take the first ones. Raises
    ConfigError if there are more machines than devices."""
    devices = devices_of(setup)
    if machines > devices:
        raise ConfigError(f"simulate: {machines} machines for {devices} devices; each needs one at least")
    bounds = [devices * number // machines for number in range(machines + 1)]
    each, found = setup.generators_per_device, list[Machine]()
    for first, end in pairwise(bounds):
        learners = max(0, min(end, setup.learners) - first)
        first, end = (max(0, device - setup.learners) * each for device in (first, end))
        found.append(Machine(tuple(range(first, min(end, setup.generators))), learners))
    return found
