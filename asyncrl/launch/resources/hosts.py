"""The hosts of a run, and which roles each one gets."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from asyncrl.config import Config
from asyncrl.errors import ConfigError
from asyncrl.launch.resources.gpus import Gpu, visible_gpus
from asyncrl.wire.endpoints import LOOPBACK

Member = tuple[str, int]
"""A role and its index."""


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
        own = [place for place, host in enumerate(hosts) if not pool or host.pool == pool]
        if not own:
            raise ConfigError(
                f"placement.roles: pool {pool!r} of {', '.join(dict.fromkeys(role for role, _ in members))} has no host"
            )
        sizes = _sizes([hosts[place] for place in own], members)
        for place, first, end in zip(own, [0, *accumulate(sizes)], accumulate(sizes), strict=False):
            dealt[place] += members[first:end]
    return dealt


def _sizes(hosts: Sequence[Host], members: Sequence[Member]) -> list[int]:
    """The number of members for each host. With enough GPUs for all members, each gets its own."""
    gpus = [len(host.gpus) for host in hosts]
    if sum(gpus) >= len(members):
        left, sizes = len(members), list[int]()
        for count in gpus:
            sizes.append(min(count, left))
            left -= sizes[-1]
        return sizes
    capacity = gpus if any(gpus) else [len(host.cpus) for host in hosts]
    ends = [round(end * len(members) / sum(capacity)) for end in accumulate(capacity)]
    return [end - before for before, end in zip([0, *ends], ends, strict=False)]
