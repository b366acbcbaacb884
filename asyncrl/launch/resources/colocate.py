"""Placement and memory of generators and learner ranks that share cards (`launch.colocate`).

Card r, a GPU or a part of a host's cores, belongs to learner rank r and to one of the cards of generator
r // `generator.tensor_parallel`. One of the two computes at a time; what the other needs on the card is in host memory
meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence

from asyncrl.config.config import Config
from asyncrl.errors import ConfigError
from asyncrl.launch.machine import Host
from asyncrl.launch.placement import Member, RoleResources

_PROVEN_ENGINES = ("transformers",)
"""Engines that `make gpu-check` has shown to share a GPU."""


def on_shared_cards(config: Config, host: Host, members: Sequence[Member]) -> dict[Member, RoleResources]:
    """Returns the resources of roles that share the cards of a host. A generator that joined later has GPUs of its own,
    or on a CPU all cores. Raises ConfigError if there is no GPU left for it."""
    cards, parallel = config.launch.learners, config.generator.tensor_parallel
    placed: dict[Member, RoleResources] = {}
    for role, index in members:
        if role == "learner":
            own = range(index, index + 1)
        elif role == "generator":
            own = range(index * parallel, (index + 1) * parallel)
        else:  # the reward model
            own = (
                range(min(cards, len(host.gpus) - 1), min(cards, len(host.gpus) - 1) + 1) if host.gpus else range(cards)
            )
        placed[role, index] = _of_cards(host, own, cards)
    return placed


def _of_cards(host: Host, own: range, cards: int) -> RoleResources:
    if host.gpus:
        if own.stop > len(host.gpus):
            raise ConfigError(f"no GPU of {host.name or 'this machine'} is free: it has {len(host.gpus)}")
        return RoleResources(host.cpus, max(1, len(host.cpus) // cards), tuple(host.gpus[card].name for card in own))
    each = len(host.cpus) // cards
    if not each or own.stop > cards:
        return RoleResources(host.cpus, max(1, each * len(own)))
    return RoleResources(tuple(host.cpus[own.start * each : own.stop * each]), each * len(own))


def check_colocate(config: Config, hosts: Sequence[Host]) -> None:
    """Raises ConfigError if roles cannot share the cards of these hosts."""
    key = f"launch.colocate = {config.launch.colocate!r}"
    if len(hosts) > 1:
        raise ConfigError(
            f"{key} on {len(hosts)} hosts: the locks of the cards are files that processes of one machine lock; use "
            "one host, or launch.colocate=off"
        )
    engine = config.generator.engine
    if hosts[0].gpus and config.launch.colocate != "force" and engine not in _PROVEN_ENGINES:
        raise ConfigError(
            f"{key} on GPUs with generator.engine = {engine!r}: its sleep is not proven on a GPU by a stage of "
            "`make gpu-check`; launch.colocate=force uses it all the same, generator.engine=transformers is proven, "
            "launch.colocate=off takes separate GPUs"
        )
