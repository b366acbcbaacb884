"""The Ray cluster of a run: the bundles of its pools, and the hosts that actors make in them.

Imports ray, which is an extra: only `RayLauncher.acquire` imports this module.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ray
import structlog
from ray._private.state import available_resources_per_node  # there is no public form of these two
from ray._private.utils import read_ray_address
from ray.exceptions import ActorUnavailableError, RayActorError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from asyncrl.config.config import Config
from asyncrl.errors import ConfigError
from asyncrl.launch.machine import Host, HostFacts, resolve_host
from asyncrl.launch.placement import num_devices
from asyncrl.launch.ray_actor import PASSED, PoolActor
from asyncrl.wire.sockets import is_loopback

log = structlog.get_logger()

OBJECT_STORE_BYTES = 78 << 20
"""Ray's minimum: nothing of a run is in the object store."""
CONNECT_S = 3.0
"""Deadline for a connection to a cluster."""
POLL_S = 0.1
INFEASIBLE_S = 2.0
"""Time that Ray calls a group infeasible before it is refused: the nodes of a cluster may still be connecting."""
WAITING_S = 3.0
"""Time without resources after which a message is printed."""
SILENT_S = 15.0
"""A host that is silent for this time gets no roles."""
LOST_S = 60.0
"""A host that is silent for this time is lost, whatever Ray reports."""
RETRY_S = 30.0
"""Pause before another actor is started where one could not."""


def connect() -> dict[str, str]:
    """Connects this process to the cluster of RAY_ADDRESS, or to one with a node on this machine; if there is none,
    starts one here. Returns facts about it for the user. Raises ConfigError if RAY_ADDRESS cannot be reached."""
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR", "namespace": "asyncrl"}
    if address := find_cluster():
        context = ray.init(address=address, **options)
        what = f"Ray at {ray.get_runtime_context().gcs_address}, {len(alive_nodes())} nodes"
    else:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        context = ray.init(address="local", object_store_memory=OBJECT_STORE_BYTES, **options)
        what = "Ray on this machine alone, started for this run: no node runs here, and RAY_ADDRESS is not set"
    dashboard = {"dashboard": f"http://{context.dashboard_url}"} if context.dashboard_url else {}
    return {"cluster": what, "job": ray.get_runtime_context().get_job_id()} | dashboard


def find_cluster() -> str:
    """Returns the address of RAY_ADDRESS, or of the cluster that was started last with a node on this machine, if it
    answers; otherwise an empty text. Ray itself would wait for minutes for a cluster that was killed. Raises
    ConfigError if RAY_ADDRESS does not answer."""
    named = os.environ.get("RAY_ADDRESS", "")
    address = read_ray_address() if named in ("", "auto", "local") else named
    host, _, port = (address or "").rpartition(":")
    if not host or not port.isdigit():
        return named if "://" in named else ""
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_S).close()
    except OSError as error:
        if address == named:
            raise ConfigError(f"launch.cluster = 'ray': no cluster at RAY_ADDRESS={named}: {error}") from None
        return ""
    return address


def alive_nodes() -> dict[str, dict[str, Any]]:
    """Returns the nodes that the cluster considers alive, by id."""
    return {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}


def free_resources(node_id: str) -> tuple[int, int]:
    """Returns the cores and GPUs of a node that nobody has reserved."""
    return _cpus_and_gpus(available_resources_per_node().get(node_id, {}))


def _cpus_and_gpus(resources: Mapping[str, float]) -> tuple[int, int]:
    return int(resources.get("CPU", 0)), int(resources.get("GPU", 0))


@dataclass(slots=True, eq=False)
class PoolGroup:
    """A placement group of a pool, and the resources of each of its bundles."""

    pool: str
    bundle: dict[str, float]
    group: PlacementGroup
    count: int
    spread: bool
    """True if each bundle is on a separate node."""
    asked_s: float

    def nodes(self) -> dict[int, str]:
        """Returns the node of each bundle; none while the group is not complete."""
        table = placement_group_table(self.group)
        return dict(table["bundles_to_node_id"]) if table["state"] == "CREATED" else {}

    def infeasible(self) -> bool:
        """True if the cluster can never have it as it is. Ray's own answer counts nodes that have too little for a
        bundle."""
        state = placement_group_table(self.group)["stats"]["scheduling_state"]
        return state == "INFEASIBLE" or self.room(free=False) < self.count

    def room(self, *, free: bool) -> int:
        """Returns the number of bundles that the nodes have room for, with `free` in what nobody has reserved."""
        total = 0
        for node_id, node in alive_nodes().items():
            cpus, gpus = free_resources(node_id) if free else _cpus_and_gpus(node["Resources"])
            fits = int(cpus // self.bundle["CPU"])
            if "GPU" in self.bundle:
                fits = min(fits, int(gpus // self.bundle["GPU"]))
            total += min(fits, 1) if self.spread else fits
        return total

    def lack(self, *, free: bool) -> str:
        """Returns the resources that the group requests, the nodes' and the missing ones. With `free` only what
        nobody has reserved counts."""
        cpus, gpus = _cpus_and_gpus(self.bundle)
        nodes: list[str] = []
        for node_id, node in alive_nodes().items():
            (total_cpus, total_gpus), (free_cpus, free_gpus) = (
                _cpus_and_gpus(node["Resources"]),
                free_resources(node_id),
            )
            devices = f"{free_gpus} of {total_gpus} GPUs and " if gpus else ""
            nodes.append(f"{node['NodeManagerHostname']} has {devices}{free_cpus} of {total_cpus} cores free")
        missing = self.count - self.room(free=free)
        if self.spread:
            each = f"{gpus} GPUs and {cpus} cores" if gpus else f"{cpus} cores"
            asked, unit = f"{self.count} nodes with {each} each", "nodes"
        else:
            asked, unit = f"{self.count} GPUs with {cpus} cores each", "GPUs"
        return (
            f"placement.pools.{self.pool}: {asked} are asked for; {', '.join(nodes)}: {missing} {unit} are missing; "
            "ask for less, or see `ray status`"
        )

    def wait(self, *, timeout_s: float, say: Callable[[str], None]) -> None:
        """Waits until the group has its resources. Raises ConfigError if the cluster can never have them, and if it
        does not within `timeout_s`."""
        feasible_s = started_s = time.monotonic()
        told = False
        while not self.nodes():
            now_s = time.monotonic()
            if not (infeasible := self.infeasible()):
                feasible_s = now_s
            if now_s - feasible_s > INFEASIBLE_S:
                raise ConfigError(self.lack(free=False))
            if now_s - started_s > timeout_s:
                raise ConfigError(f"{self.lack(free=True)} (waited launch.start_timeout_s = {timeout_s:g} s)")
            if now_s - started_s > WAITING_S and not told and not infeasible:
                say(f"waiting for resources: {self.lack(free=True)}")
                told = True
            time.sleep(POLL_S)

    def remove(self) -> None:
        """Gives its resources back; actors in it end."""
        remove_placement_group(self.group)


def reserve(config: Config, name: str, *, count: int | None = None) -> PoolGroup:
    """Asks for a pool's bundles: one for each node, without `nodes` one for each GPU, in the pool of the generators for
    those of one generator. `count` is the number of bundles, by default all of the pool. Returns at once."""
    pool = config.placement.pools[name]
    each = num_devices(config, "generator") if config.placement.pool_of("generator") == name and pool.gpus else 1
    count = count or pool.nodes or pool.gpus // each
    gpus = pool.gpus if pool.nodes else each
    bundle: dict[str, float] = {"CPU": pool.cpus or (gpus if gpus else _free_cpus(count))}
    if gpus:
        bundle["GPU"] = gpus
    strategy = "STRICT_SPREAD" if pool.nodes else "PACK"
    group = placement_group([bundle] * count, strategy=strategy, name=f"asyncrl/{config.run}/{name}")
    return PoolGroup(name, bundle, group, count, pool.nodes is not None, time.monotonic())


def _free_cpus(count: int) -> int:
    """The cores that each of `count` nodes has free."""
    free = sorted((free_resources(node_id)[0] for node_id in alive_nodes()), reverse=True)
    return max(1, free[count - 1]) if len(free) >= count else 1


@dataclass(frozen=True, slots=True)
class Place:
    """The place of an actor: a bundle of a pool, or without pools a node."""

    node_id: str
    group: PoolGroup | None = None
    bundle: int = 0


@dataclass(slots=True, eq=False)
class RayHost:
    """A host, and the actor that starts roles there."""

    host: Host
    place: Place
    actor: Any
    heard_s: float
    lost: str = ""
    """Why it is lost, for good; empty while it is not."""
    ping: Any = None
    """The pending call that shows that it is alive."""
    unkilled: set[int] = field(default_factory=set[int])
    """Keys of roles to kill when it answers again."""

    def answers(self) -> bool:
        """True unless it is lost or silent."""
        return not self.lost and time.monotonic() - self.heard_s <= SILENT_S

    def lose(self, reason: str) -> None:
        """Marks it as lost."""
        if not self.lost:
            log.error("host is lost", host=self.host.name, reason=reason)
            self.lost = reason
            ray.kill(self.actor)

    def check(self, alive: bool, now_s: float) -> None:
        """Updates its state. Returns at once."""
        if self.lost:
            return
        if not alive:
            self.lose("Ray has declared its node dead")
            return
        if self.ping is not None and ray.wait([self.ping], timeout=0)[0]:
            ping, self.ping = self.ping, None
            try:
                ray.get(ping)
                self.heard_s = now_s
                if keys := list(self.unkilled):
                    self.actor.kill.remote(keys, show_stacks=False)
                    self.unkilled.difference_update(keys)  # the launcher's thread adds to it
            except ActorUnavailableError as error:
                log.warning("host cannot be reached", host=self.host.name, error=_first_line(error))
            except RayActorError as error:
                self.lose(_first_line(error))
        if self.ping is None:
            self.ping = self.actor.ping.remote()
        if now_s - self.heard_s > LOST_S:
            self.lose(f"it was silent for {LOST_S:g} s")


@dataclass(slots=True)
class _Starting:
    place: Place
    actor: Any
    facts: Any
    """The reference of the facts of its node."""
    cpus: int


class RayHosts:
    """The hosts of a run. `tick` is called about every second, by one thread at a time."""

    def __init__(self, config: Config) -> None:
        named, own = config.launch.host, resolve_host(config.launch.host)
        self.own_address = ray.util.get_node_ip_address() if is_loopback(own) else own
        """The address at which the other hosts reach the launcher's machine."""
        self.head = self.own_address if is_loopback(own) else named
        """The address, or the interface or network of `launch.address`, by which nodes choose their own addresses."""
        self.all: list[RayHost] = []
        """Every host that there was; those that are lost stay in it."""
        self._groups: list[PoolGroup] = []
        self._config = config
        self._starting: list[_Starting] = []
        self._numbers: Counter[str] = Counter()
        self._dealt: Counter[str] = Counter()
        """Number of cores that hosts without GPUs have at each address."""
        self._retry_s: dict[str, float] = {}
        self._token = config.run_dir.absolute().parent / f".asyncrl-{secrets.token_hex(8)}"
        """A file next to the run folder, by which actors see whether they share it."""
        self._token.parent.mkdir(parents=True, exist_ok=True)
        self._token.touch(mode=0o600)

    @property
    def here(self) -> list[RayHost]:
        """The hosts on which roles can start."""
        return [host for host in self.all if host.answers()]

    def find(self, name: str) -> RayHost:
        """Returns the host of this name, lost or not."""
        return next(host for host in self.all if host.host.name == name)

    def add(self, group: PoolGroup) -> None:
        """Adds the bundles of a pool. Without pools, every node of the cluster is a place for an actor."""
        self._groups.append(group)

    def grow(self, pool: str, gpus: int) -> str:
        """Asks for as many bundles as the pool needs to have this number of GPUs, and cancels those that did not come
        within `launch.start_timeout_s`. Returns what it waits for. Does nothing for a pool without GPUs, whose hosts
        hold any number of roles."""
        groups = [group for group in self._groups if group.pool == pool]
        each, limit_s = int(groups[0].bundle.get("GPU", 0)), self._config.launch.start_timeout_s
        missing = gpus - each * sum(group.count for group in groups)
        if each and missing > 0:
            groups.append(reserve(self._config, pool, count=-(-missing // each)))
            self.add(groups[-1])
        waiting = [group for group in groups if sum(host.place.group is group for host in self.all) < group.count]
        late = [group for group in waiting if time.monotonic() - group.asked_s > limit_s]
        for group in late:
            self._groups.remove(group)
            group.remove()
        count = each * sum(group.count for group in waiting)
        return f"{count} GPUs in pool {pool}" if waiting and not late else ""

    def open(self, *, timeout_s: float) -> None:
        """Starts the actors of all places and waits for them. Raises ConfigError if one cannot start or differs from
        this process in a version, and if it takes longer than `timeout_s`."""
        deadline_s = time.monotonic() + timeout_s
        while not (places := self._places(alive_nodes())):
            self._pause(deadline_s, "no node of the cluster had a free core")
        while len(self.here) < len(places):
            if failures := self.tick():
                raise ConfigError("launch.cluster = 'ray': " + "; ".join(failures))
            self._pause(deadline_s, f"{len(places) - len(self.here)} of {len(places)} actors did not start")

    def _pause(self, deadline_s: float, what: str) -> None:
        if time.monotonic() > deadline_s:
            limit_s = self._config.launch.start_timeout_s
            raise ConfigError(
                f"launch.cluster = 'ray': {what} within launch.start_timeout_s = {limit_s:g} s; see `ray status` and "
                "`ray list actors`"
            )
        time.sleep(POLL_S)

    def tick(self) -> list[str]:
        """Updates the states of the hosts, and starts actors where there is none. Returns why actors could not
        start."""
        failures: list[str] = []
        alive, now_s = alive_nodes(), time.monotonic()
        for host in self.all:
            host.check(host.place.node_id in alive, now_s)
        taken = [host.place for host in self.all if not host.lost] + [starting.place for starting in self._starting]
        for place in self._places(alive):
            if place not in taken and self._retry_s.get(place.node_id, 0.0) < now_s:
                self._starting.append(self._start(place))
        for starting in list(self._starting):
            if starting.place.node_id not in alive:
                self._starting.remove(starting)
            elif ray.wait([starting.facts], timeout=0)[0]:
                self._starting.remove(starting)
                if failure := self._join(starting, now_s):
                    self._retry_s[starting.place.node_id] = now_s + RETRY_S
                    failures.append(failure)
        return failures

    def close(self) -> None:
        """Ends all actors with their children, and returns the bundles."""
        for actor in [host.actor for host in self.all] + [starting.actor for starting in self._starting]:
            ray.kill(actor)
        for group in self._groups:
            group.remove()
        self._token.unlink(missing_ok=True)

    def _places(self, alive: dict[str, dict[str, Any]]) -> list[Place]:
        """The places for actors on nodes that are alive. Without pools, nodes without cores and GPUs have none, and
        those that others use have none until they are free."""
        if self._config.placement.pools:
            places = [Place(node, group, bundle) for group in self._groups for bundle, node in group.nodes().items()]
            return [place for place in places if place.node_id in alive]
        used = {host.place.node_id for host in self.all if not host.lost}
        used |= {starting.place.node_id for starting in self._starting}
        return [Place(node) for node in alive if node in used or free_resources(node)[0] > 0]

    def _start(self, place: Place) -> _Starting:
        pool, group = "node", place.group
        if group is None:
            cpus, gpus = free_resources(place.node_id)
            strategy: Any = NodeAffinitySchedulingStrategy(place.node_id, soft=False)
        else:
            (cpus, gpus), pool = _cpus_and_gpus(group.bundle), group.pool
            strategy = PlacementGroupSchedulingStrategy(group.group, placement_group_bundle_index=place.bundle)
        number = self._numbers[f"actor {pool}"]
        self._numbers[f"actor {pool}"] += 1
        passed = {name: value for name, value in os.environ.items() if name.startswith(PASSED)}
        actor = (
            ray.remote(PoolActor)
            .options(
                name=f"asyncrl/{self._config.run}/{pool}-{number}",
                num_cpus=cpus,
                num_gpus=gpus,  # the bundle alone does not make its GPUs visible
                scheduling_strategy=strategy,
                max_restarts=0,
                max_task_retries=0,
            )
            .remote(str(Path.cwd()), passed)
        )
        return _Starting(place, actor, actor.describe.remote(self.head, str(self._token)), cpus)

    def _join(self, starting: _Starting, now_s: float) -> str:
        """Makes the host of an actor that has started. Returns why it cannot."""
        node = starting.place.node_id[:6]
        try:
            facts: HostFacts = ray.get(starting.facts)
        except RayError as error:
            return f"no actor could start on node {node}: {_first_line(error)}"
        name, cpus = facts.host.name, facts.host.cpus
        if refusal := facts.refusal:
            ray.kill(starting.actor)
            return f"{refusal} (node {node})"
        self._numbers[name] += 1
        if (number := self._numbers[name]) > 1:
            name = f"{name}-{number}"  # one that no host of the run has had
        if not facts.host.gpus and starting.cpus < len(cpus):
            # Ray does not tell which cores it has reserved, and the machine may have other actors.
            first = self._dealt[facts.host.address]
            self._dealt[facts.host.address] += starting.cpus
            cpus = tuple(sorted({cpus[core % len(cpus)] for core in range(first, first + starting.cpus)}))
        pool = starting.place.group.pool if starting.place.group else ""
        host = replace(facts.host, name=name, cpus=cpus, pool=pool)
        self.all.append(RayHost(host, starting.place, starting.actor, now_s))
        return ""


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
