"""Hosts for tests: network namespaces joined by a bridge, which has a separate namespace, and processes on them.

Nothing of them outlives the process that made them, even when it is killed: a namespace and its devices end with their
last process, and each process ends with its parent.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

from tests.network.link import Link

ROOT = Path(__file__).parents[2]
USER = (["--user", "--map-root-user"], ["--user", "--preserve-credentials"])
"""Options of unshare and nsenter for a user namespace, which need no root."""
ADDRESS = "10.77.0.{}"
READY_S = 10.0
END_S = 5.0
DIE_WITH_PARENT = ["setpriv", "--pdeathsig", "KILL"]


@cache
def hosts_fault() -> str:
    """Why this machine cannot have hosts; empty if it can."""
    return _fault(USER[0]) and _fault([])


@cache
def _in_user_namespace() -> bool:
    """True if namespaces are made in a user namespace; otherwise root makes them without."""
    return not _fault(USER[0])


def _fault(options: list[str]) -> str:
    script = (
        "ip link add bridge0 type bridge && ip link add port0 type veth peer name port1 && ip tuntap add tap0 mode tap"
    )
    probe = ["unshare", *options, "--net", *DIE_WITH_PARENT, "sh", "-c", script]
    try:
        done = subprocess.run(probe, capture_output=True, text=True, timeout=READY_S, check=False)
    except (FileNotFoundError, subprocess.TimeoutExpired) as error:
        return str(error)
    return done.stderr.strip() or f"unshare ended with {done.returncode}" if done.returncode else ""


class Namespace:
    """A network namespace with a loopback interface, held by a process that waits for its standard input to end."""

    def __init__(self, name: str, *, beside: Namespace | None = None) -> None:
        """`beside` is another namespace of the same user namespace."""
        self.name = name
        user = USER[0] if beside is None and _in_user_namespace() else []
        inside = beside.entry(net=False) if beside else []
        command = [*inside, "unshare", *user, "--net", "sh", "-c", "ip link set lo up && echo up && exec cat"]
        self._holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._holder.stdout and self._holder.stdout.readline() == b"up\n", f"{name}: no namespace"

    @property
    def pid(self) -> int:
        return self._holder.pid

    def entry(self, *, net: bool = True) -> list[str]:
        """The command that runs another one in the namespace; without `net` in its user namespace only."""
        options = [*(USER[1] if _in_user_namespace() else []), *(["--net"] if net else [])]
        return ["nsenter", "--target", str(self.pid), *options] if options else []

    def ip(self, arguments: str) -> None:
        """Runs `ip` in the namespace."""
        self.run("ip", *shlex.split(arguments))

    def run(self, *command: str) -> str:
        """Runs a command in the namespace and returns what it prints."""
        done = subprocess.run([*self.entry(), *command], capture_output=True, text=True, timeout=READY_S, check=False)
        assert done.returncode == 0, f"{self.name}: {shlex.join(command)}: {done.stderr}"
        return done.stdout

    def end(self) -> None:
        """Ends the holder: the namespace ends with the last process in it."""
        self._holder.kill()
        self._holder.wait(END_S)
        for stream in (self._holder.stdin, self._holder.stdout):
            if stream:
                stream.close()


class Host(Namespace):
    """A namespace with an address on the bridge, and the processes that were started in it."""

    def __init__(self, name: str, address: str, switch: Namespace) -> None:
        super().__init__(name, beside=switch)
        self.address = address
        self.link: Link | None = None
        """The link to the bridge, if it is one that can be made bad."""
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, module: str, *arguments: str, **options: Any) -> subprocess.Popen[str]:
        """Starts `python -m module arguments` on the host, with its standard streams as pipes."""
        command = [*self.entry(), *DIE_WITH_PARENT, sys.executable, "-m", module, *arguments]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
        streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        process = subprocess.Popen(command, cwd=ROOT, env=environment, text=True, **streams, **options)
        self.processes.append(process)
        return process

    def end(self) -> None:
        """Ends its processes, by their ids, and the host."""
        for process in self.processes:
            process.kill()
            process.wait(END_S)
            for stream in (process.stdin, process.stdout):
                if stream:
                    stream.close()
        super().end()


class Network:
    """A bridge, and the hosts on it."""

    def __init__(self, folder: Path) -> None:
        """The folder is for the files that control links."""
        self.hosts: list[Host] = []
        self._folder = folder
        self._links: list[subprocess.Popen[bytes]] = []
        self._ports = 0
        self._switch = Namespace("switch")
        self._switch.ip("link add bridge type bridge")
        self._switch.ip("link set bridge up")

    def add(self, name: str, *, linked: bool = False) -> Host:
        """Returns a new host; with `linked` it is joined by a `Link`, which can be made bad."""
        host = Host(name, ADDRESS.format(len(self.hosts) + 1), self._switch)
        self.hosts.append(host)
        host.link = Link(self._folder / f"{name}.json") if linked else None
        self.attach(host, "eth0", f"{host.address}/24", host.link)
        return host

    def attach(self, host: Host, device: str, address: str, link: Link | None = None) -> None:
        """Gives a host an interface on the bridge, with an address such as 10.78.0.1/24."""
        self._ports += 1
        port = f"port{self._ports}"
        if link:
            self._connect(host, port, link)
        else:
            self._switch.ip(f"link add {port} type veth peer name {device} netns {host.pid}")
        self._switch.ip(f"link set {port} master bridge up")
        host.ip(f"address add {address} dev {device}")
        host.ip(f"link set {device} up")

    def _connect(self, host: Host, port: str, link: Link) -> None:
        command = [sys.executable, "-m", "tests.network.link", str(link.file), f"{host.pid}:eth0"]
        command = [*self._switch.entry(net=False), *DIE_WITH_PARENT, *command, f"{self._switch.pid}:{port}"]
        process = subprocess.Popen(
            command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE
        )
        self._links.append(process)
        assert process.stdout and process.stdout.readline() == b"up\n", f"{host.name}: no link"

    def close(self) -> None:
        """Ends all hosts with their processes, and the links."""
        for host in self.hosts:
            host.end()
        for link in self._links:
            link.kill()
            link.wait(END_S)
            if link.stdout:
                link.stdout.close()
        self._switch.end()
