"""A launcher for hosts that are network namespaces: `launch.cluster=.../namespaces.py:Namespaces`.

`HOSTS` in the environment names a JSON file: a list of objects with name, pid (a process of the namespace), address,
cpus and lost, which a test changes while the run continues. The launcher runs in the first one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.errors import ConfigError
from asyncrl.launch.launcher import HOST_LOST, LocalLauncher, RoleHandle, RoleProcess
from asyncrl.launch.machine import Host, HostFacts, listening_address
from asyncrl.launch.placement import RoleResources
from asyncrl.launch.worker import RoleSpec
from asyncrl.wire.endpoints import LOOPBACK

FACTS_S = 60.0


class OnHost(RoleProcess):
    """A role in a namespace. Its host may be lost while the process lives."""

    @property
    def code(self) -> int | None:
        lost = any(one["name"] == self.spec.host and one["lost"] for one in read_hosts())
        return HOST_LOST if lost else super().code

    def cause(self) -> str:
        return f"{self.name}: its host is lost" if self.code == HOST_LOST else super().cause()


class Namespaces(LocalLauncher):
    """Role processes of this machine, in other network namespaces."""

    def acquire(self, config: Any) -> None:
        """`launch.address` names an interface or a network of all hosts; otherwise they have the file's."""
        head, *others = read_hosts()
        self.address = head["address"]
        self.addresses = {one["name"]: one["address"] for one in others}
        if config.launch.host != LOOPBACK:
            self.address = listening_address(config.launch.host)
            self.addresses = {one["name"]: address_of(one, config.launch.host) for one in others}

    def hosts(self) -> list[Host]:
        head, *others = read_hosts()
        found = [Host("", tuple(head["cpus"]), address=self.address)]
        for one in others:
            if not one["lost"]:
                found.append(Host(one["name"], tuple(one["cpus"]), address=self.addresses[one["name"]], pool="a"))
        return found

    def start(self, spec: RoleSpec, resources: RoleResources) -> RoleProcess:
        role = super().start(spec, resources)
        if spec.host:
            self.roles.remove(role)
            role = OnHost(role.spec, role.process, role.output, role.log_start_bytes, role.output_start_bytes)
            self.roles.append(role)
        return role

    def command(self, spec: RoleSpec) -> list[str]:
        pid = next((one["pid"] for one in read_hosts() if one["name"] == spec.host), None)
        enter = ["nsenter", "--target", str(pid), "--net"] if spec.host else []
        return [*enter, *super().command(spec)]

    def kill(self, roles: Any, *, show_stacks: bool = False) -> list[RoleHandle]:
        """Processes on lost hosts cannot be reached."""
        lost = {one["name"] for one in read_hosts() if one["lost"]}
        for role in [role for role in self.roles if role in roles and role.spec.host in lost]:
            self.roles.remove(role)
        return super().kill(roles, show_stacks=show_stacks)


def address_of(host: dict[str, Any], named: str) -> str:
    """The address of a host on the interface or network `named`, as the host reports it."""
    command = ["nsenter", "--target", str(host["pid"]), "--net", "env", f"SLURMD_NODENAME={host['name']}"]
    command += [sys.executable, "-m", "asyncrl.launch.machine", named, __file__]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=FACTS_S, check=True)
    facts = msgspec.json.decode(done.stdout, type=HostFacts)
    if facts.problem:
        raise ConfigError(facts.problem)
    return facts.host.address


def read_hosts() -> list[dict[str, Any]]:
    """The hosts of the test."""
    return json.loads(Path(os.environ["HOSTS"]).read_text())
