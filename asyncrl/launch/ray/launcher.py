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

from asyncrl.config import Config
from asyncrl.errors import ConfigError
from asyncrl.launch.launcher import HOST_LOST, Launcher, RoleHandle
from asyncrl.launch.local import KILL_S, LocalLauncher
from asyncrl.launch.ray.logs import RemoteLogs
from asyncrl.launch.resources.hosts import Host, RoleResources, num_devices
from asyncrl.launch.resources.network import listening_address
from asyncrl.launch.worker import EXIT_CRASHED, RoleSpec

if TYPE_CHECKING:
    from asyncrl.launch.ray.hosts import RayHost, RayHosts

log = structlog.get_logger()

TICK_S = 1.0
"""Time between two looks at the hosts."""
ANSWER_S = 2.0
"""Time for an actor to answer, in addition to a wait that it was asked for."""
JOB_COPY = "_ray_pkg_"
"""Part of the path of a job's working directory."""
TRAINED = ("learner", "critic")
"""Roles that are not started elsewhere before their host is lost for certain: one such group writes a checkpoint."""


class RayRole:
    """A role that an actor started."""

    def __init__(self, key: int, spec: RoleSpec, resources: RoleResources, host: RayHost) -> None:
        self.key = key
        self.spec = spec
        self.host = host
        self._resources = resources
        self._ended: tuple[int, str] | None = None
        self._result: Any = host.actor.run.remote(key, spec, resources)
        """The reference of its exit code and cause; None while its host may be lost."""

    @property
    def name(self) -> str:
        return self.spec.label

    @property
    def place(self) -> str:
        return f"a process of host {self.host.host.name} ({self.host.host.address})"

    @property
    def code(self) -> int | None:
        """As `RoleHandle.code`. A host that may be lost is taken for lost, but for roles that are TRAINED."""
        if self._ended is None:
            self._look()
        return self._ended[0] if self._ended else None

    def cause(self) -> str:
        """As `RoleHandle.cause`."""
        return self._ended[1] if self._ended else f"{self.name} runs"

    def _look(self) -> None:
        import ray
        from ray.exceptions import ActorUnavailableError, RayActorError, RayError

        if self._result is not None and ray.wait([self._result], timeout=0)[0]:
            try:
                self._ended = ray.get(self._result)
            except ActorUnavailableError:
                self._result = None
                self.host.suspects("its actor cannot be reached")
            except RayActorError:
                self._result = None
                self.host.loses("its actor has died")
            except RayError as error:
                self._ended = EXIT_CRASHED, f"{self.name} could not be started: {str(error).strip().splitlines()[-1]}"
        if self._ended is None and (self.host.lost or (self.host.suspect and self.spec.role not in TRAINED)):
            self.host.given_up.add(self.key)
            self._ended = HOST_LOST, f"{self.name}: its host is lost ({self.host.lost or self.host.suspect})"
        elif self._result is None and not self.host.suspect:
            self._result = self.host.actor.run.remote(self.key, self.spec, self._resources)


class RayLauncher(Launcher):
    """Starts roles on the nodes of a Ray cluster: that of RAY_ADDRESS, else the one that this machine belongs to, else
    one that is started here. The replay queue runs on the launcher's machine."""

    def __init__(self) -> None:
        self._local = LocalLauncher()
        self._address = ""
        self._roles: list[RayRole] = []
        self._keys = itertools.count()
        self._hosts: RayHosts | None = None
        self._logs = RemoteLogs(Path())
        self._facts: dict[str, str] = {}
        self._config: Config | None = None
        self._connected = False
        self._closing = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="ray-hosts", daemon=True)

    def acquire(self, config: Config) -> None:
        """As `Launcher.acquire`. Waits up to `launch.start_timeout_s` for resources that others use."""
        if importlib.util.find_spec("ray") is None:
            raise ConfigError("launch.cluster = 'ray': Ray is not installed; pip install 'asyncrl[ray]'")
        from asyncrl.launch.ray.cluster import await_group, connect, reserve
        from asyncrl.launch.ray.hosts import RayHosts

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
        limit_s, deadline_s = config.launch.start_timeout_s, time.monotonic() + config.launch.start_timeout_s
        pools = config.placement.pools
        # Learners first: two runs that each hold a part of what they need would wait for each other.
        for name in sorted(pools, key=lambda name: name != config.placement.pool_of("learner")):
            group = reserve(config, name)
            hosts.add(group)
            await_group(group, timeout_s=limit_s, say=lambda text: print(text, flush=True))
        hosts.open(timeout_s=max(1.0, deadline_s - time.monotonic()))
        self._facts["hosts"] = ", ".join(_describe(one.host) for one in hosts.all)
        self._logs = RemoteLogs(config.run_dir / "logs")
        self._watcher.start()

    def hosts(self) -> list[Host]:
        """As `Launcher.hosts`. The launcher's own has the replay queue only: the cluster's node on this machine is a
        host like the others."""
        own = Host("", tuple(sorted(os.sched_getaffinity(0))), (), self._address, replay_only=True)
        return [own, *(one.host for one in self._cluster.here)]

    def start(self, spec: RoleSpec, resources: RoleResources) -> RoleHandle:
        """As `Launcher.start`."""
        if not spec.host:
            return self._local.start(spec, resources)
        host = self._cluster.find(spec.host)
        if not host.host.shares_run_dir:
            self._logs.follow(host.actor, spec)
        role = RayRole(next(self._keys), spec, resources, host)
        self._roles.append(role)
        log.info("role started", name=role.name, start=spec.start, cpus=resources.cpus, gpus=resources.gpus)
        return role

    def wait(self, roles: Sequence[RoleHandle], timeout_s: float) -> list[RoleHandle]:
        """As `Launcher.wait`."""
        return self._local.wait(roles, timeout_s)

    def kill(self, roles: Sequence[RoleHandle], *, show_stacks: bool = False) -> list[RoleHandle]:
        """As `Launcher.kill`. Roles of a host that may be lost are killed when it answers again."""
        import ray
        from ray.exceptions import RayActorError

        killed = [role for role in self._roles if role in roles]
        asked: list[tuple[Any, RayHost]] = []
        for host in {id(role.host): role.host for role in killed}.values():
            keys = [role.key for role in killed if role.host is host]
            if host.suspect:
                host.given_up.update(keys)
            elif not host.lost:
                asked.append((host.actor.kill.remote(keys, show_stacks=show_stacks), host))
        immortal = self._local.kill(roles, show_stacks=show_stacks)
        refs = [ref for ref, _ in asked]
        ready = ray.wait(refs, num_returns=len(refs), timeout=KILL_S + ANSWER_S)[0] if refs else []
        for ref, host in asked:
            mine = [role for role in killed if role.host is host]
            try:
                left = ray.get(ref) if ref in ready else [role.key for role in mine]
            except RayActorError as error:
                host.suspects(str(error).strip().splitlines()[0])
                host.given_up.update(role.key for role in mine)
                continue
            immortal += [role for role in mine if role.key in left]
        self._roles = [role for role in self._roles if role not in killed]
        return immortal

    def end(self, *, grace_s: float) -> list[RoleHandle]:
        """As `Launcher.end`."""
        running, deadline_s = [role for role in self._roles if role.code is None], time.monotonic() + grace_s
        for host in {id(role.host): role.host for role in running}.values():
            host.actor.terminate.remote([role.key for role in running if role.host is host])
        immortal = self._local.end(grace_s=grace_s)
        late = self.wait([role for role in running if not role.host.suspect], max(0.0, deadline_s - time.monotonic()))
        for role in late:
            log.warning("role did not stop in time and was killed", name=role.name, grace_s=grace_s)
        return immortal + self.kill(list(self._roles), show_stacks=bool(late))

    def resize(self, generators: int) -> str:
        """As `Launcher.resize`: adds bundles to the generators' pool if it has fewer GPUs."""
        config = self._config
        assert config is not None
        pool = config.placement.pool_of("generator")
        return self._cluster.grow(pool, generators * num_devices(config, "generator")) if pool else ""

    def describe(self) -> dict[str, str]:
        """As `Launcher.describe`: the cluster, its dashboard, the id of Ray's job, and the hosts."""
        return self._facts

    def close(self) -> None:
        """As `Launcher.close`. A cluster that was started for the run ends, too."""
        if not self._connected:
            return
        import ray

        self._closing.set()
        if self._watcher.is_alive():
            self._watcher.join(5 * TICK_S)
            self._logs.drain(timeout_s=ANSWER_S)
        if self._hosts is not None:
            self._hosts.close()
        ray.shutdown()
        self._connected = False

    @property
    def _cluster(self) -> RayHosts:
        assert self._hosts is not None, "acquire comes first"
        return self._hosts

    def _watch(self) -> None:
        """Watches the hosts and copies logs until the launcher closes."""
        known = len(self._cluster.all)
        while not self._closing.wait(TICK_S):
            try:
                for failure in self._cluster.tick():
                    log.error("no host there", reason=failure)
                for one in self._cluster.all[known:]:
                    log.info("host joined", host=_describe(one.host))
                known = len(self._cluster.all)
                self._logs.tick()
            except Exception as error:  # a tick later the cluster may answer again; roles are watched apart from this
                log.error("the cluster does not answer", error=f"{type(error).__name__}: {error}")


def _describe(host: Host) -> str:
    what = f"{len(host.gpus)} GPUs" if host.gpus else f"{len(host.cpus)} cores"
    apart = "" if host.shares_run_dir else ", without the run folder"
    return f"{host.name} ({host.pool + ': ' if host.pool else ''}{what} at {host.address}{apart})"
