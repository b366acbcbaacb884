"""Assigns hosts to roles while a run continues: roles whose host is lost move, and joining generators get a place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from asyncrl.config import Config
from asyncrl.errors import ConfigError, RunError
from asyncrl.launch.launcher import Launcher
from asyncrl.launch.resources.fit import fit_memory
from asyncrl.launch.resources.hosts import Host, RoleResources
from asyncrl.launch.resources.placement import Placement, find_room, place_roles, refuse_joiner, why_no_room
from asyncrl.launch.role_group import RoleGroup
from asyncrl.launch.worker import RoleSpec

LOCAL_RUNS = "~/.asyncrl/runs"
"""Folder for the logs of roles on hosts that do not share the run folder."""


class Placer:
    """The places of a run's roles on the hosts of its launcher. `say` tells the user of moves."""

    def __init__(
        self,
        config: Config,
        placement: Placement,
        spec: RoleSpec,
        launcher: Launcher,
        *,
        say: Callable[[str], None],
    ) -> None:
        """`spec` holds the fields that all roles have in common, as on the launcher's own host."""
        self.placement = placement
        """The resources of all roles at the start of the run."""
        self._config = config
        self._own = spec
        self._launcher = launcher
        self._say = say

    def spec(self, spec: RoleSpec, resources: RoleResources, hosts: Sequence[Host]) -> RoleSpec:
        """Returns the spec of a role with these resources on one of these hosts."""
        address, run_dir, config = self._own.endpoints.host, self._own.run_dir, ""
        if resources.host:
            # One that is lost by now has no address: before the role starts, `has_hosts` looks again.
            host = next((host for host in hosts if host.name == resources.host), Host(resources.host, ()))
            address = host.address
            if not host.shares_run_dir:
                run_dir, config = f"{LOCAL_RUNS}/{self._config.run}", self._config.to_yaml()
        endpoints = replace(spec.endpoints, host=address)
        return replace(
            spec, cpus=resources.cpus, host=resources.host, endpoints=endpoints, run_dir=run_dir, config=config
        )

    def has_hosts(self, group: RoleGroup, groups: Sequence[RoleGroup], now_s: float) -> bool:
        """True if the host of each member of the group is there. A member whose host is lost is placed again, with the
        members of all `groups`; False while no host has room for it. Raises RunError when that lasts longer than
        `launch.start_timeout_s`."""
        if not any(resources.host for _, resources in group.members):
            return True
        hosts = self._launcher.hosts()
        names = {host.name for host in hosts}
        for place, (spec, resources) in enumerate(group.members):
            room = resources if resources.host in names else None
            if room is None:
                taken = [own for other in groups for _, own in other.members if own.host in names]
                room = find_room(self._config, spec.role, hosts, taken)
                if room is None:
                    why = why_no_room(self._config, spec.role, hosts, taken)
                    self._wait_for_room(group, f"{spec.name}, whose host {resources.host} is lost", why, now_s)
                    return False
                self._say(f"{spec.name} moves from {resources.host} to {room.host or 'the host of the launcher'}")
            group.members[place] = self.spec(spec, room, hosts), room
        group.homeless_since_s = None
        return True

    def joiners(
        self, indices: Sequence[int], wanted: int, groups: Sequence[RoleGroup], hosts: Sequence[Host]
    ) -> tuple[list[RoleResources], str]:
        """Returns the resources on these hosts of the generators that can join to make it `wanted` generators, in the
        order of their indices, and why the next one cannot; empty if all can. The other roles keep theirs."""
        if len(hosts) > 1:
            return self._rooms(len(indices), groups, hosts)
        launch = self._config.launch.model_copy(update={"generators": wanted})
        config = self._config.model_copy(update={"launch": launch})
        reward_model = self.placement.reward_model is not None
        try:
            placement = place_roles(config, reward_model=reward_model, hosts=hosts)
            placement = fit_memory(config, placement, reward_model=reward_model)
        except ConfigError as error:
            return [], str(error)
        found: list[RoleResources] = []
        for index in indices:
            if reason := refuse_joiner(self._config, self.placement, placement, index):
                return found, reason
            found.append(placement.generators[index])
        return found, ""

    def _rooms(self, count: int, groups: Sequence[RoleGroup], hosts: Sequence[Host]) -> tuple[list[RoleResources], str]:
        taken = [own for group in groups for _, own in group.members]
        found: list[RoleResources] = []
        for _ in range(count):
            room = find_room(self._config, "generator", hosts, [*taken, *found])
            if room is None:
                why = why_no_room(self._config, "generator", hosts, [*taken, *found])
                return found, why or "no host has a free GPU for a generator"
            found.append(room)
        return found, ""

    def _wait_for_room(self, group: RoleGroup, what: str, why: str, now_s: float) -> None:
        why = f" ({why})" if why else ""
        if group.homeless_since_s is None:
            group.homeless_since_s = now_s
            self._say(f"no host has room for {what}{why}; waiting for one")
        limit_s = self._config.launch.start_timeout_s
        if now_s - group.homeless_since_s > limit_s:
            raise RunError(f"no host had room for {what}, within launch.start_timeout_s = {limit_s:g} s{why}")
