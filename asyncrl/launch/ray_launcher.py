"""Starts roles on the nodes of a Ray cluster, as child processes of actors that hold its resources.

The launcher is the cluster's driver: Ray ends the actors, and the kernel their children, when it dies.
"""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import os
import shlex
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog
from rich.console import Console

from asyncrl.config import Config
from asyncrl.errors import ConfigError, RunError
from asyncrl.launch.console import EXIT_FAILED, EXIT_INTERRUPTED
from asyncrl.launch.launcher import HOST_LOST, KILL_S, Launcher, LocalLauncher, RoleHandle
from asyncrl.launch.machine import listening_address
from asyncrl.launch.placement import Host, RoleResources, num_devices
from asyncrl.launch.ray_actor import RoleFile
from asyncrl.launch.worker import EXIT_CRASHED, RoleSpec

if TYPE_CHECKING:
    from asyncrl.launch.ray_cluster import RayHost, RayHosts

log = structlog.get_logger()

EVERY_S = 2.0
MAX_BYTES = 1 << 20
"""Maximum size of a read: a role that writes more is copied later."""
POLL_S = 0.05
FILES: tuple[RoleFile, ...] = ("jsonl", "out")


@dataclass(slots=True, eq=False)
class _Followed:
    actor: Any
    logs: str
    name: str
    file: RoleFile
    offset: int = 0
    size: Any = None
    """The reference of the file's size before the role started: what an earlier run left."""
    read: Any = None


class RemoteLogs:
    """The files of the roles that `follow` was called for, copied to the folder `logs`."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._followed: dict[tuple[Any, str, RoleFile], _Followed] = {}
        self._next_s = 0.0

    def follow(self, actor: Any, spec: RoleSpec) -> None:
        """Copies the files of a role from now on; called before it starts."""
        for file in FILES:
            if (key := (actor, spec.name, file)) not in self._followed:
                size = actor.size.remote(str(spec.logs), spec.name, file)
                self._followed[key] = _Followed(actor, str(spec.logs), spec.name, file, size=size)

    def tick(self) -> None:
        """Asks for what is new every EVERY_S, and writes what has come. Returns at once."""
        ask = time.monotonic() >= self._next_s
        if ask:
            self._next_s = time.monotonic() + EVERY_S
        for one in list(self._followed.values()):
            self._advance(one, ask=ask)

    def drain(self, *, timeout_s: float) -> None:
        """Copies what is left, as far as the actors answer in time."""
        deadline_s = time.monotonic() + timeout_s
        quiet: set[int] = set()
        while len(quiet) < len(self._followed) and time.monotonic() < deadline_s:
            for one in list(self._followed.values()):
                if self._advance(one, ask=True, last=True) == 0:
                    quiet.add(id(one))
            time.sleep(POLL_S)

    def _advance(self, one: _Followed, *, ask: bool, last: bool = False) -> int | None:
        """Returns the number of bytes that were read; None if none came."""
        import ray
        from ray.exceptions import RayError

        try:
            if one.size is not None and ray.wait([one.size], timeout=0)[0]:
                one.offset, one.size = ray.get(one.size), None
            data: bytes | None = None
            if one.read is not None and ray.wait([one.read], timeout=0)[0]:
                data, one.read = bytes(ray.get(one.read)), None
        except RayError as error:
            log.warning("the log of a role is not copied any more", name=one.name, error=type(error).__name__)
            self._followed = {key: other for key, other in self._followed.items() if other is not one}
            return 0
        if data is not None:
            self._append(one, data, last=last)
        if ask and one.size is None and one.read is None:
            one.read = one.actor.read.remote(one.logs, one.name, one.file, one.offset, MAX_BYTES)
        return None if data is None else len(data)

    def _append(self, one: _Followed, data: bytes, *, last: bool) -> None:
        complete = data[: data.rfind(b"\n") + 1]
        if last or (not complete and len(data) == MAX_BYTES):
            complete = data
        if complete:
            self._logs.mkdir(parents=True, exist_ok=True)
            with (self._logs / f"{one.name}.{one.file}").open("ab") as stream:
                stream.write(complete)
            one.offset += len(complete)


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
        from asyncrl.launch.ray_cluster import RayHosts, await_group, connect, reserve

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


SCHEME = "ray://"
PORT = 8265
"""Default port of the cluster's dashboard, which takes jobs."""
LEFT_OUT = ["/.git", "/.venv", "/build", "/runs", "/sweeps"]
"""The parts of the working directory that are not sent along; Ray sends 100 MB at most."""


def submit_job(address: str, arguments: Sequence[str], console: Console) -> int:
    """Submits `asyncrl launch` with these arguments to the cluster at `ray://HOST[:PORT]` and prints the job's log
    until it ends. Returns its exit code.

    Ctrl-C asks whether to stop the job; otherwise it continues. Raises ConfigError if Ray is not installed, and if the
    cluster cannot be reached or does not take the job.
    """
    try:
        from ray.job_submission import JobSubmissionClient
    except ModuleNotFoundError:
        raise ConfigError(f"--cluster {address}: Ray is not installed; pip install 'asyncrl[ray]'") from None
    url = url_of(address)
    try:
        client = JobSubmissionClient(url)
        job = client.submit_job(
            entrypoint=shlex.join(["python", "-P", "-m", "asyncrl.cli", "launch", "--cluster", "ray", *arguments]),
            runtime_env={"working_dir": str(Path.cwd()), "excludes": LEFT_OUT},
        )
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(f"--cluster {address}: {error}") from None
    console.print(f"job        {job} at {url}", highlight=False, soft_wrap=True)
    try:
        asyncio.run(_follow(client, job, console))
    except KeyboardInterrupt:
        if console.input("stop the job, too? [y/N] ").strip().lower() != "y":
            console.print(f"it goes on: ray job logs --follow --address {url} {job}", highlight=False, soft_wrap=True)
            return EXIT_INTERRUPTED
        client.stop_job(job)
        asyncio.run(_follow(client, job, console))
    info = client.get_job_info(job)
    if info.driver_exit_code is None:
        raise RunError(f"job {job} ended as {info.status}: {info.message}")
    return info.driver_exit_code if info.driver_exit_code >= 0 else EXIT_FAILED


def url_of(address: str) -> str:
    """Returns the URL of the dashboard of `ray://HOST[:PORT]`. Raises ConfigError for another form."""
    host, _, port = address.removeprefix(SCHEME).partition(":")
    if not host or "/" in address.removeprefix(SCHEME) or not (port or str(PORT)).isdecimal():
        raise ConfigError(f"--cluster {address}: must be ray://HOST or ray://HOST:PORT, the port of Ray's dashboard")
    return f"http://{host}:{port or PORT}"


async def _follow(client: Any, job: str, console: Console) -> None:
    async for text in client.tail_job_logs(job):
        console.print(text, end="", highlight=False, markup=False, soft_wrap=True)
