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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
import structlog
from ray._private.state import available_resources_per_node
from ray._private.utils import read_ray_address
from ray.exceptions import ActorUnavailableError, RayActorError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from asyncrl.config import Config
from asyncrl.errors import ConfigError
from asyncrl.launch.machine import other_packages, resolve_host
from asyncrl.launch.placement import Host, num_devices
from asyncrl.launch.ray_actor import NodeFacts, PoolActor, passed_environment
from asyncrl.util.files import replace_file
from asyncrl.wire.curve_keys import is_loopback

log = structlog.get_logger()

OBJECT_STORE_BYTES = 78 << 20
"""Ray's least size: nothing of a run is in the object store."""
CONNECT_S = 3.0
"""Deadline for a connection to a cluster."""
POLL_S = 0.1
INFEASIBLE_S = 2.0
"""Time that Ray calls a group infeasible before it is refused: the nodes of a cluster may still be connecting."""
WAITING_S = 3.0
"""Time without resources after which the user is told of it."""


def connect() -> dict[str, str]:
    """Connects this process to the cluster of RAY_ADDRESS, or to one with a node on this machine; if there is none,
    starts one here. Returns what the user may want to know of it. Raises ConfigError if RAY_ADDRESS cannot be
    reached."""
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
    answers; else an empty text. Ray itself would wait for minutes for a cluster that was killed. Raises ConfigError if
    that of RAY_ADDRESS does not answer."""
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
    """Returns the nodes that the cluster takes for alive, by id."""
    return {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}


def free_resources(node_id: str) -> tuple[int, int]:
    """Returns the cores and GPUs of a node that nobody has reserved."""
    free: Mapping[str, float] = available_resources_per_node().get(node_id, {})
    return int(free.get("CPU", 0)), int(free.get("GPU", 0))


@dataclass(slots=True, eq=False)
class PoolGroup:
    """A placement group of a pool, and the resources of each of its bundles."""

    pool: str
    bundle: dict[str, float]
    group: PlacementGroup
    count: int
    spread: bool
    """True if each bundle is on a node of its own."""
    asked_s: float

    @property
    def state(self) -> str:
        """CREATED, PENDING, RESCHEDULING or REMOVED."""
        return placement_group_table(self.group)["state"]

    @property
    def infeasible(self) -> bool:
        """True if the cluster can never have it as it is. Ray's own word
        counts nodes that have too little for a bundle."""
        called = placement_group_table(self.group)["stats"]["scheduling_state"] == "INFEASIBLE"
        return called or _enough(self, free=False) < self.count

    def nodes(self) -> dict[int, str]:
        """Returns the node of each bundle; none while the group is not complete."""
        table = placement_group_table(self.group)
        return dict(table["bundles_to_node_id"]) if table["state"] == "CREATED" else {}

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
    free = sorted((free_resources(node_id)[0] for node_id in alive_nodes()), reverse=True)
    return max(1, free[count - 1]) if len(free) >= count else 1


def await_group(group: PoolGroup, *, timeout_s: float, say: Callable[[str], None]) -> None:
    """Waits until the group has its resources. Raises ConfigError if the cluster can never have them, and if it does
    not within `timeout_s`: what is asked for, what there is, and what is missing."""
    started_s = time.monotonic()
    feasible_s, told = started_s, False
    while group.state != "CREATED":
        now_s = time.monotonic()
        if not group.infeasible:
            feasible_s = now_s
        if now_s - feasible_s > INFEASIBLE_S:
            raise ConfigError(_lack(group, free=False))
        if now_s - started_s > timeout_s:
            raise ConfigError(f"{_lack(group, free=True)} (waited launch.start_timeout_s = {timeout_s:g} s)")
        if now_s - started_s > WAITING_S and not told and not group.infeasible:
            say(f"waiting for resources: {_lack(group, free=True)}")
            told = True
        time.sleep(POLL_S)


def _lack(group: PoolGroup, *, free: bool) -> str:
    cpus, gpus = int(group.bundle["CPU"]), int(group.bundle.get("GPU", 0))
    there: list[str] = []
    for node_id, node in alive_nodes().items():
        total_cpus, total_gpus = _total(node)
        free_cpus, free_gpus = free_resources(node_id)
        cards = f"{free_gpus} of {total_gpus} GPUs and " if gpus else ""
        there.append(f"{node['NodeManagerHostname']} has {cards}{free_cpus} of {total_cpus} cores free")
    missing = group.count - _enough(group, free=free)
    if group.spread:
        each = f"{gpus} GPUs and {cpus} cores" if gpus else f"{cpus} cores"
        asked, lack = f"{group.count} nodes with {each} each", f"{missing} nodes are missing"
    else:
        asked, lack = f"{group.count} GPUs with {cpus} cores each", f"{missing} GPUs are missing"
    return (
        f"placement.pools.{group.pool}: {asked} are asked for; {', '.join(there)}: {lack}; ask for less, or see "
        "`ray status`"
    )


def _enough(group: PoolGroup, *, free: bool) -> int:
    found = 0
    for node_id, node in alive_nodes().items():
        cpus, gpus = free_resources(node_id) if free else _total(node)
        fits = int(cpus // group.bundle["CPU"])
        if "GPU" in group.bundle:
            fits = min(fits, int(gpus // group.bundle["GPU"]))
        found += min(fits, 1) if group.spread else fits
    return found


def _total(node: dict[str, Any]) -> tuple[int, int]:
    return int(node["Resources"].get("CPU", 0)), int(node["Resources"].get("GPU", 0))


SUSPECT_S = 15.0
"""A host that is silent for this time gets no roles, and its generators start elsewhere."""
LOST_S = 60.0
"""A host that is silent for this time is lost, whatever Ray says."""
RETRY_S = 30.0
"""Pause before another actor is started where one could not."""


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
    suspect: str = ""
    """Why it may be lost; empty while it answers."""
    lost: str = ""
    """Why it is lost; empty while it is not."""
    given_up: set[int] = field(default_factory=set[int])
    """Keys of roles that were declared dead while it was suspect, and are killed when it answers again."""
    ping: Any = None

    def suspects(self, reason: str) -> None:
        """Takes it for possibly lost."""
        if not self.suspect and not self.lost:
            log.warning("host may be lost", host=self.host.name, reason=reason)
            self.suspect = reason

    def loses(self, reason: str) -> None:
        """Takes it for lost, for good."""
        if not self.lost:
            log.error("host is lost", host=self.host.name, reason=reason)
            self.lost = reason
            ray.kill(self.actor)

    def check(self, alive: bool, now_s: float) -> None:
        """Updates what is known about it. Returns at once."""
        if self.lost:
            return
        if not alive:
            self.loses("Ray has declared its node dead")
            return
        if self.ping is not None and ray.wait([self.ping], timeout=0)[0]:
            self._hear(now_s)
        if self.ping is None:
            self.ping = self.actor.ping.remote()
        silent_s = now_s - self.heard_s
        if silent_s > LOST_S:
            self.loses(f"it was silent for {LOST_S:g} s")
        elif silent_s > SUSPECT_S:
            self.suspects(f"it is silent for {SUSPECT_S:g} s")

    def _hear(self, now_s: float) -> None:
        ping, self.ping = self.ping, None
        try:
            ray.get(ping)
        except ActorUnavailableError as error:
            self.suspects(_first_line(error))
        except RayActorError as error:
            self.loses(_first_line(error))
        else:
            self.heard_s = now_s
            if self.suspect:
                log.info("host answers again", host=self.host.name)
                self.suspect = ""
            if self.given_up:
                self.actor.kill.remote(list(self.given_up), show_stacks=False)
                self.given_up.clear()


@dataclass(slots=True)
class _Starting:
    place: Place
    actor: Any
    facts: Any
    """The reference of what it says of its node."""
    cpus: int


class RayHosts:
    """The hosts of a run. `tick` is called about every second, by one thread at a time."""

    def __init__(self, config: Config) -> None:
        named, own = config.launch.host, resolve_host(config.launch.host)
        self._own_node = ray.util.get_node_ip_address()
        self.own_address = self._own_node if is_loopback(own) else own
        """The address at which the other hosts reach the launcher's machine."""
        self._network = "" if own == named or is_loopback(own) else named
        """The interface or network of `launch.address`, on which each node has an address of its own."""
        self.all: list[RayHost] = []
        """Every host that there was; those that are lost stay in it."""
        self._groups: list[PoolGroup] = []
        self._config = config
        self._starting: list[_Starting] = []
        self._numbers: Counter[str] = Counter()
        self._dealt: Counter[str] = Counter()
        """Number of cores that hosts without GPUs have at each address."""
        self._retry_s: dict[str, float] = {}
        self._token = secrets.token_hex(16)
        self._token_file = config.run_dir.absolute().parent / f".asyncrl-{self._token[:8]}"
        """A file next to the run folder, by which actors see whether they share it."""
        self._token_file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(self._token_file, self._token, mode=0o600)

    @property
    def here(self) -> list[RayHost]:
        """The hosts on which roles can start."""
        return [one for one in self.all if not one.lost and not one.suspect]

    def find(self, name: str) -> RayHost:
        """Returns the host of this name, lost or not."""
        return next(one for one in self.all if one.host.name == name)

    def add(self, group: PoolGroup) -> None:
        """Adds the bundles of a pool. Without pools, every node of the cluster is a place for an actor."""
        self._groups.append(group)

    def grow(self, pool: str, gpus: int) -> str:
        """Asks for as many bundles as the pool needs to have this number of GPUs, and cancels those that did not come
        within `launch.start_timeout_s`. Returns what it waits for. Does nothing for a pool without GPUs, whose hosts
        hold any number of roles."""
        own = [group for group in self._groups if group.pool == pool]
        each, limit_s = int(own[0].bundle.get("GPU", 0)), self._config.launch.start_timeout_s
        missing = gpus - each * sum(group.count for group in own)
        if each and missing > 0:
            own.append(reserve(self._config, pool, count=-(-missing // each)))
            self.add(own[-1])
        waiting = [group for group in own if sum(one.place.group is group for one in self.all) < group.count]
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
            self._check_time(deadline_s, "no node of the cluster had a free core")
        while len(self.here) < len(places):
            if failures := self.tick():
                raise ConfigError("launch.cluster = 'ray': " + "; ".join(failures))
            self._check_time(deadline_s, f"{len(places) - len(self.here)} of {len(places)} actors did not start")

    def _check_time(self, deadline_s: float, what: str) -> None:
        """Waits a moment. Raises ConfigError after the deadline."""
        if time.monotonic() > deadline_s:
            limit_s = self._config.launch.start_timeout_s
            raise ConfigError(
                f"launch.cluster = 'ray': {what} within launch.start_timeout_s = {limit_s:g} s; see `ray status` and "
                "`ray list actors`"
            )
        time.sleep(POLL_S)

    def tick(self) -> list[str]:
        """Updates what is known about the hosts, and starts actors where there is none. Returns why actors could not
        start."""
        failures: list[str] = []
        alive, now_s = alive_nodes(), time.monotonic()
        for one in self.all:
            one.check(one.place.node_id in alive, now_s)
        taken = [one.place for one in self.all if not one.lost] + [one.place for one in self._starting]
        for place in self._places(alive):
            if place not in taken and self._retry_s.get(place.node_id, 0.0) < now_s:
                self._starting.append(self._start(place))
        for one in list(self._starting):
            if one.place.node_id not in alive:
                self._starting.remove(one)
            elif ray.wait([one.facts], timeout=0)[0]:
                self._starting.remove(one)
                if failure := self._join(one, now_s):
                    self._retry_s[one.place.node_id] = now_s + RETRY_S
                    failures.append(failure)
        return failures

    def close(self) -> None:
        """Ends all actors with their children, and returns the bundles."""
        for actor in [one.actor for one in self.all] + [one.actor for one in self._starting]:
            ray.kill(actor)
        for group in self._groups:
            group.remove()
        self._token_file.unlink(missing_ok=True)

    def _places(self, alive: dict[str, dict[str, Any]]) -> list[Place]:
        """The places for actors on nodes that are alive. Without pools, nodes without cores and GPUs have none, and
        those that others use have none until they are free."""
        if self._config.placement.pools:
            places = [Place(node, group, bundle) for group in self._groups for bundle, node in group.nodes().items()]
            return [place for place in places if place.node_id in alive]
        used = {one.place.node_id for one in self.all if not one.lost} | {one.place.node_id for one in self._starting}
        return [Place(node) for node in alive if node in used or free_resources(node)[0] > 0]

    def _start(self, place: Place) -> _Starting:
        pool, group = "node", place.group
        if group is None:
            cpus, gpus = free_resources(place.node_id)
            strategy: Any = NodeAffinitySchedulingStrategy(place.node_id, soft=False)
        else:
            cpus, gpus, pool = group.bundle["CPU"], group.bundle.get("GPU", 0), group.pool
            strategy = PlacementGroupSchedulingStrategy(group.group, placement_group_bundle_index=place.bundle)
        number = self._numbers[f"actor {pool}"]
        self._numbers[f"actor {pool}"] += 1
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
            .remote(str(Path.cwd()), passed_environment())
        )
        facts = actor.describe.remote(str(self._token_file), self._token, self._network)
        return _Starting(place, actor, facts, int(cpus))

    def _join(self, one: _Starting, now_s: float) -> str:
        node = one.place.node_id[:6]
        try:
            facts: NodeFacts = ray.get(one.facts)
        except RayError as error:
            return f"no actor could start on node {node}: {_first_line(error)}"
        problem = facts.problem
        if others := other_packages({f"{facts.hostname} (node {node})": facts.versions}):
            problem = f"other packages than the launcher has: {others}"
        if problem:
            ray.kill(one.actor)
            return problem
        address = self.own_address if facts.address == self._own_node else facts.address
        pool = one.place.group.pool if one.place.group else ""
        cpus = facts.cpus if facts.gpus else self._deal(facts, one.cpus)
        host = Host(self._name(facts.hostname), cpus, facts.gpus, address, pool, facts.shares_run_dir)
        self.all.append(RayHost(host, one.place, one.actor, now_s))
        return ""

    def _name(self, hostname: str) -> str:
        self._numbers[hostname] += 1
        number = self._numbers[hostname]
        return hostname if number == 1 else f"{hostname}-{number}"

    def _deal(self, facts: NodeFacts, count: int) -> tuple[int, ...]:
        """Cores for an actor that reserved `count`: Ray does not say which, and another actor may be on the machine."""
        if count >= len(facts.cpus):
            return facts.cpus
        first = self._dealt[facts.address]
        self._dealt[facts.address] += count
        return tuple(sorted({facts.cpus[core % len(facts.cpus)] for core in range(first, first + count)}))


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
