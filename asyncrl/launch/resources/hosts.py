"""The hosts of a run, which roles each one gets, and the resources of a role process."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from asyncrl.config import Config
from asyncrl.errors import ConfigError
from asyncrl.generator.engine import GPU_FRACTION
from asyncrl.launch.resources.gpus import Gpu, visible_gpus
from asyncrl.wire.endpoints import LOOPBACK

Member = tuple[str, int]
"""A role and its index."""


def num_devices(config: Config, role: str) -> int:
    """Returns how many GPUs, or on a CPU cores, one process of the role needs."""
    return config.generator.tensor_parallel if role == "generator" else 1


@dataclass(frozen=True, slots=True)
class Host:
    """A machine, or the part of one, on which roles run."""

    name: str
    """Unique in the run; empty for the launcher's own."""
    cpus: tuple[int, ...]
    gpus: tuple[Gpu, ...] = ()
    address: str = LOOPBACK
    """IPv4 address at which the other hosts reach it."""
    pool: str = ""
    """The pool of `placement.pools` that it belongs to; empty without pools."""
    shares_run_dir: bool = True
    """True if the run folder is at the same path as for the launcher."""
    replay_only: bool = False
    """True if no role but the replay queue runs on it."""

    def takes(self, pool: str) -> bool:
        """True if roles of this pool may run on it; an empty pool is that of roles that may run on all hosts."""
        return not self.replay_only and pool in ("", self.pool)


def this_machine(address: str = LOOPBACK) -> Host:
    """Returns the launcher's own host, with the cores and GPUs that this process may use."""
    return Host("", tuple(sorted(os.sched_getaffinity(0))), tuple(visible_gpus()), address)


def deal_roles(config: Config, hosts: Sequence[Host], *, reward_model: bool) -> list[list[Member]]:
    """Returns the roles of each host, apart from the replay queue, which is on the launcher's.

    The roles of a pool, or without pools all roles, are dealt to its hosts in the order learners, critics, reward
    model, generators: learner ranks are numbered host by host. A host gets roles in proportion to its GPUs; where there
    are none, to its cores. Raises ConfigError if a pool has no host.
    """
    counts = {
        "learner": config.launch.learners,
        "critic": config.critic.ranks,
        "reward_model": int(reward_model),
        "generator": config.launch.generators,
    }
    order = [(role, index) for role, count in counts.items() for index in range(count)]
    dealt: list[list[Member]] = [[] for _ in hosts]
    for pool in dict.fromkeys(config.placement.pool_of(role) for role, _ in order):
        members = [member for member in order if config.placement.pool_of(member[0]) == pool]
        own = [place for place, host in enumerate(hosts) if host.takes(pool)]
        if not own:
            raise ConfigError(
                f"placement.roles: pool {pool!r} of {', '.join(dict.fromkeys(role for role, _ in members))} has no host"
            )
        sizes = _sizes([hosts[place] for place in own], [num_devices(config, role) for role, _ in members])
        for place, first, end in zip(own, [0, *accumulate(sizes)], accumulate(sizes), strict=False):
            dealt[place] += members[first:end]
    return dealt


def _sizes(hosts: Sequence[Host], devices: Sequence[int]) -> list[int]:
    """The number of members for each host; `devices` are the GPUs that each needs. With enough GPUs for all members,
    each gets its own."""
    gpus = [len(host.gpus) for host in hosts]
    if sum(sizes := _separate(gpus, devices)) == len(devices):
        return sizes
    capacity = gpus if any(gpus) else [len(host.cpus) for host in hosts]
    ends = [round(end * len(devices) / sum(capacity)) for end in accumulate(capacity)]
    return [end - before for before, end in zip([0, *ends], ends, strict=False)]


def _separate(gpus: Sequence[int], devices: Sequence[int]) -> list[int]:
    """The numbers of members for which each host has separate GPUs, in their order."""
    sizes = [0] * len(gpus)
    place, left = 0, gpus[0]
    for wanted in devices:
        while left < wanted:
            place += 1
            if place == len(gpus):
                return sizes
            left = gpus[place]
        left -= wanted
        sizes[place] += 1
    return sizes


@dataclass(frozen=True, slots=True)
class RoleResources:
    """The cores, threads and GPUs of one role process."""

    cpus: tuple[int, ...]
    threads: int
    gpus: tuple[str, ...] = ()
    """Its GPUs: entries of CUDA_VISIBLE_DEVICES, with the names in this process's environment."""
    visible_gpus: tuple[str, ...] = ()
    """The GPUs that it sees, among them its own; empty for its own alone."""
    helper_cpus: tuple[int, ...] = ()
    """Cores of the role's helper processes; empty for the cores of the role itself."""
    gpu_memory_utilization: float | None = None
    """Fraction of the GPU's memory for the engine of a generator."""
    host: str = ""
    """Name of the host; empty for the launcher's own."""

    @property
    def devices(self) -> tuple[tuple[str, str], ...]:
        """Its GPUs, by host and name."""
        return tuple((self.host, gpu) for gpu in self.gpus)

    def environment(self) -> dict[str, str]:
        """Returns the variables that must be set before the process imports numpy or torch."""
        threads = str(self.threads)
        names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
        environment: dict[str, str] = dict.fromkeys(names, threads)
        environment["ASYNCRL_HELPER_CPUS"] = ",".join(map(str, self.helper_cpus or self.cpus))
        visible = self.visible_gpus or self.gpus
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(visible)
        environment["LOCAL_RANK"] = str(visible.index(self.gpus[0])) if self.gpus else "0"
        if self.gpu_memory_utilization is not None:
            environment[GPU_FRACTION] = f"{self.gpu_memory_utilization:.4f}"
        if self.gpus:
            # torch counts GPUs without starting the driver, which a forked child of the process could not use.
            environment["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
        else:
            environment["DS_ACCELERATOR"] = "cpu"
        return environment
