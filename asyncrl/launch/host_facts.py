"""Prints what a launcher must know of a host: `python -m asyncrl.launch.host_facts HEAD TOKEN`.

It runs once on each host. HEAD is the address of the launcher's host, empty for the one that SLURM names, or the
interface or network of `launch.address`; TOKEN is a file in the folder of the runs.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from asyncrl.errors import ConfigError
from asyncrl.launch.packages import package_versions
from asyncrl.launch.resources.gpus import Gpu, visible_gpus
from asyncrl.launch.resources.network import address_beside

LAUNCH_ADDRESS = "SLURM_LAUNCH_NODE_IPADDR"
NODE_NAME = "SLURMD_NODENAME"


@dataclass(frozen=True, slots=True)
class HostFacts:
    """The facts of a host, as it reports them."""

    name: str
    head: str
    """HEAD, or the address of the launcher's host that SLURM names."""
    address: str
    """Its own address on the interface that leads to the launcher's host, or that `launch.address` names."""
    cpus: tuple[int, ...]
    gpus: tuple[Gpu, ...]
    shares_run_dir: bool
    versions: dict[str, str]
    problem: str = ""
    """Why it has no address; empty if it has one."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        values: dict[str, Any] = json.loads(text)
        lists = {"cpus": tuple(values["cpus"]), "gpus": tuple(Gpu(**gpu) for gpu in values["gpus"])}
        return cls(**values | lists)


def facts_of_this_host(head: str, token: Path) -> HostFacts:
    """Returns the facts of the host that this process runs on."""
    head, name, address, problem = head or os.environ[LAUNCH_ADDRESS], own_name(), "", ""
    try:
        address = address_beside(head, machine=name)
    except ConfigError as error:
        problem = str(error)
    return HostFacts(
        name,
        head,
        address,
        tuple(sorted(os.sched_getaffinity(0))),
        tuple(visible_gpus()),
        token.is_file(),
        package_versions(),
        problem,
    )


def own_name() -> str:
    """Returns the name that SLURM has for this host."""
    return os.environ.get(NODE_NAME) or socket.gethostname().partition(".")[0]


if __name__ == "__main__":
    print(facts_of_this_host(sys.argv[1], Path(sys.argv[2])).to_json(), flush=True)
