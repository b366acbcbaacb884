"""Starts roles on the nodes of a Ray cluster, as child processes of actors that hold its resources.

The launcher is the cluster's driver: Ray ends the actors, and the kernel their children, when it dies.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from asyncrl.config.config import Config
from asyncrl.errors import ConfigError
from asyncrl.launch.launcher import HOST_LOST, KILL_S, Launcher, LocalLauncher, RoleHandle
from asyncrl.launch.machine import Host, listening_address
from asyncrl.launch.placement import RoleResources, num_devices
from asyncrl.launch.worker import EXIT_CRASHED, RoleSpec

if TYPE_CHECKING:
    from asyncrl.launch.ray_cluster import RayHost, RayHosts

log = structlog.get_logger()

TICK_S = 1.0
"""Interval of the checks of the hosts."""
ANSWER_S = 2.0
"""Time for an actor to answer, in addition to a wait that it was asked for."""
JOB_COPY = "_ray_pkg_"
"""Part of the path of a job's working directory."""


class RayRole:
    """A role that an actor started."""

    def __init__(self, key: int, spec: RoleSpec, resources: RoleResources, host: RayHost) -> None:
        self.key = key
        self.spec = spec
        self.host = host
        self._resources = resources
        self._ended: tuple[int, str] | None = None
        self._result: Any = host.actor.run.remote(key, spec, resources)
        """The reference of its exit code and cause."""

    @property
    def name(self) -> str:
        return self.spec.label

    @property
    def place(self) -> str:
        return f"a process of host {self.host.host.name} ({self.host.host.address})"

    @property
    def code(self) -> int | None:
        if self._ended is None:
            self._update()
        return self._ended[0] if self._ended else None

    def cause(self) -> str:
        return self._ended[1] if self._ended else f"{self.name} runs"

    def _update(self) -> None:
        import ray
        from ray.exceptions import ActorUnavailableError, RayActorError, RayError

        if not self.host.lost and ray.wait([self._result], timeout=0)[0]:
            try:
                self._ended = ray.get(self._result)
            except ActorUnavailableError:
                self._result = self.host.actor.run.remote(self.key, self.spec, self._resources)
            except RayActorError:
                self.host.lose("its actor has died")
            except RayError as error:
                self._ended = EXIT_CRASHED, f"{self.name} could not be started: {str(error).strip().splitlines()[-1]}"
        if self._ended is None and self.host.lost:
            self._ended = HOST_LOST, f"{self.name}: its host is lost ({self.host.lost})"


class RayLauncher(Launcher):
    """Starts roles on the nodes of a Ray cluster: that of RAY_ADDRESS, else the one that this machine belongs to, else
    one that is started here. The replay queue runs on the launcher's machine."""

    def __init__(self) -> None:
        self._local = LocalLauncher()
        self._address = ""
        self._roles: list[RayRole] = []
        self._keys = itertools.count()
        self._hosts: RayHosts | None = None
        self._facts: dict[str, str] = {}
        self._config: Config | None = None
        self._connected = False
        self._closing = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="ray-hosts", daemon=True)

    def acquire(self, config: Config) -> None:
        """Waits up to `launch.start_timeout_s` for resources that others use."""
        if importlib.util.find_spec("ray") is None:
            raise ConfigError("launch.cluster = 'ray': Ray is not installed; pip install 'asyncrl[ray]'")
        from asyncrl.launch.ray_cluster import RayHosts, connect, reserve

        if JOB_COPY in str(Path.cwd()) and not Path(config.runs_dir).expanduser().is_absolute():
            raise ConfigError(
                f"runs_dir = {config.runs_dir!r}: a job of Ray works in a copy of the folder that is deleted after it; "
                "set runs_dir to the complete path of a folder of all nodes"
            )
        self._config = config
        self._facts = connect()
        self._connected = True
        hosts = self._hosts = RayHosts(config)
        self._address = listening_address(hosts.own_address)
        limit_s, pools = config.launch.start_timeout_s, config.placement.pools
        deadline_s = time.monotonic() + limit_s
        # Learners first: two runs that each hold a part of what they need would wait for each other.
        for name in sorted(pools, key=lambda name: name != config.placement.pool_of("learner")):
            group = reserve(config, name)
            hosts.add(group)
            group.wait(timeout_s=limit_s, say=lambda text: print(text, flush=True))
        hosts.open(timeout_s=max(1.0, deadline_s - time.monotonic()))
        self._facts["hosts"] = ", ".join(_describe(host.host) for host in hosts.all)
        self._watcher.start()

    def hosts(self) -> list[Host]:
        """The launcher's own has the replay queue only: the cluster's node on this machine is a host like the
        others."""
        own = Host("", tuple(sorted(os.sched_getaffinity(0))), (), self._address, replay_only=True)
        return [own, *(host.host for host in self._cluster.here)]

    def start(self, spec: RoleSpec, resources: RoleResources) -> RoleHandle:
        if not spec.host:
            return self._local.start(spec, resources)
        role = RayRole(next(self._keys), spec, resources, self._cluster.find(spec.host))
        self._roles.append(role)
        log.info("role started", name=role.name, start=spec.start, cpus=resources.cpus, gpus=resources.gpus)
        return role

    def wait(self, roles: Sequence[RoleHandle], timeout_s: float) -> list[RoleHandle]:
        return self._local.wait(roles, timeout_s)

    def kill(self, roles: Sequence[RoleHandle], *, show_stacks: bool = False) -> list[RoleHandle]:
        """Roles of a silent host are killed when it answers again."""
        import ray
        from ray.exceptions import RayActorError

        by_host: dict[int, list[RayRole]] = {}
        for role in self._roles:
            if role in roles:
                by_host.setdefault(id(role.host), []).append(role)
        calls: list[tuple[Any, list[RayRole]]] = []
        for killed in by_host.values():
            host, keys = killed[0].host, [role.key for role in killed]
            if not host.answers():
                host.unkilled.update(keys)
            else:
                calls.append((host.actor.kill.remote(keys, show_stacks=show_stacks), killed))
        immortal = self._local.kill(roles, show_stacks=show_stacks)
        deadline_s = time.monotonic() + KILL_S + ANSWER_S
        for ref, killed in calls:
            left = [role.key for role in killed]
            try:
                if ray.wait([ref], timeout=max(0.0, deadline_s - time.monotonic()))[0]:
                    left = ray.get(ref)
            except RayActorError as error:
                log.warning("roles were not killed", roles=left, error=str(error).strip().splitlines()[0])
                killed[0].host.unkilled.update(left)
                continue
            immortal += [role for role in killed if role.key in left]
        self._roles = [role for role in self._roles if role not in roles]
        return immortal

    def end(self, *, grace_s: float) -> list[RoleHandle]:
        running, deadline_s = [role for role in self._roles if role.code is None], time.monotonic() + grace_s
        for role in running:
            role.host.actor.terminate.remote([role.key])
        immortal = self._local.end(grace_s=grace_s)
        late = self.wait([role for role in running if role.host.answers()], max(0.0, deadline_s - time.monotonic()))
        for role in late:
            log.warning("role did not stop in time and was killed", name=role.name, grace_s=grace_s)
        return immortal + self.kill(list(self._roles), show_stacks=bool(late))

    def resize(self, generators: int) -> str:
        """Adds bundles to the generators' pool if it has fewer GPUs."""
        config = self._config
        assert config is not None
        pool = config.placement.pool_of("generator")
        return self._cluster.grow(pool, generators * num_devices(config, "generator")) if pool else ""

    def describe(self) -> dict[str, str]:
        """The cluster, its dashboard, the id of Ray's job, and the hosts."""
        return self._facts

    def close(self) -> None:
        """A cluster that was started for the run ends as well."""
        if not self._connected:
            return
        import ray

        self._closing.set()
        if self._watcher.is_alive():
            self._watcher.join(5 * TICK_S)
        if self._hosts is not None:
            self._hosts.close()
        ray.shutdown()
        self._connected = False

    @property
    def _cluster(self) -> RayHosts:
        assert self._hosts is not None, "acquire comes first"
        return self._hosts

    def _watch(self) -> None:
        known = len(self._cluster.all)
        while not self._closing.wait(TICK_S):
            try:
                for failure in self._cluster.tick():
                    log.error("no host there", reason=failure)
                for host in self._cluster.all[known:]:
                    log.info("host joined", host=_describe(host.host))
                known = len(self._cluster.all)
            except Exception as error:  # a tick later the cluster may answer again; roles are watched apart from this
                log.error("the cluster does not answer", error=f"{type(error).__name__}: {error}")


def _describe(host: Host) -> str:
    what = f"{len(host.gpus)} GPUs" if host.gpus else f"{len(host.cpus)} cores"
    return f"{host.name} ({host.pool + ': ' if host.pool else ''}{what} at {host.address})"
