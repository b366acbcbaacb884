"""The Ray cluster of a run: connecting to it, and reserving the bundles of its pools.

Imports ray, which is an extra: only `RayLauncher.acquire` imports this module.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray._private.state import available_resources_per_node  # there is no public form of these two
from ray._private.utils import read_ray_address
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group

from asyncrl.config import Config
from asyncrl.errors import ConfigError
from asyncrl.launch.resources.hosts import num_devices

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
    """The cores that each of `count` nodes has free."""
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
    """Returns the text of what the group asks for, what the nodes have, and what is missing. With `free` only what
    nobody has reserved counts."""
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
    """The number of bundles that the nodes have room for, with `free` in what nobody has reserved."""
    found = 0
    for node_id, node in alive_nodes().items():
        cpus, gpus = free_resources(node_id) if free else _total(node)
        fits = int(cpus // group.bundle["CPU"])
        if "GPU" in group.bundle:
            fits = min(fits, int(gpus // group.bundle["GPU"]))
        found += min(fits, 1) if group.spread else fits
    return found


def _total(node: dict[str, Any]) -> tuple[int, int]:
    """The cores and GPUs of a node."""
    return int(node["Resources"].get("CPU", 0)), int(node["Resources"].get("GPU", 0))
