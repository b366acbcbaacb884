"""Who runs on which cores and GPUs, with how many threads."""

from __future__ import annotations

import ipaddress
import os
import random
import shutil
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice

import psutil

from asyncrl.config import Config
from asyncrl.errors import ConfigError
from asyncrl.types import Endpoints

LOOPBACK = "127.0.0.1"
OWN_PORTS = range(20000, 32000)
"""Where free ports are looked for: below those that Linux gives to outgoing connections (32768 and up)."""
"""Replay queue, weight store, learners' rendezvous."""


@dataclass(frozen=True, slots=True)
class Share:
    """What one role process may use."""

    cpus: tuple[int, ...]
    threads: int
    gpus: tuple[int, ...] = ()
    helper_cpus: tuple[int, ...] = ()
    """Cores of the role's own helper processes; those of the role itself when empty."""

    def environment(self) -> dict[str, str]:
        """Variables that must be set before the process imports numpy or torch."""
        threads = str(self.threads)
        names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
        environment: dict[str, str] = dict.fromkeys(names, threads)
        environment["ASYNCRL_HELPER_CPUS"] = ",".join(map(str, self.helper_cpus or self.cpus))
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, self.gpus))
        if not self.gpus:
            environment["DS_ACCELERATOR"] = "cpu"
        return environment


@dataclass(frozen=True, slots=True)
class Plan:
    """Shares by role and index."""

    generators: tuple[Share, ...]
    learners: tuple[Share, ...]
    replay: Share
    critics: tuple[Share, ...] = ()
    reward_model: Share | None = None

    def of(self, role: str) -> tuple[Share, ...]:
        """One share for every process of the role."""
        return {
            "replay": (self.replay,),
            "generator": self.generators,
            "learner": self.learners,
            "critic": self.critics,
            "reward_model": () if self.reward_model is None else (self.reward_model,),
        }[role]


def plan_resources(config: Config, *, reward_model: bool = False) -> Plan:
    """Splits this machine between the roles: GPUs one each as far as they go, cores by number of processes.

    Critics and the reward model count with the learners: they share their cores.
    """
    num_generators, num_critics = config.launch.generators, config.critic.ranks
    num_trained = config.launch.learners + num_critics + int(reward_model)
    cpus = sorted(os.sched_getaffinity(0))
    gpus = count_gpus()
    replay = Share(tuple(cpus), threads=1)
    if gpus:
        threads = max(1, len(cpus) // (num_generators + num_trained))
        cards = [index % gpus for index in range(num_trained + num_generators)]
        shares = [Share(tuple(cpus), threads, (card,)) for card in cards]
        trained, generators = shares[:num_trained], shares[num_trained:]
    elif config.launch.pin_cores and len(cpus) >= 2:
        wanted = round(len(cpus) * num_generators / (num_generators + num_trained))
        cut = min(max(wanted, 1), len(cpus) - 1)
        # The replay queue and the reward workers run beside the learners: an engine keeps its core to itself.
        beside = tuple(cpus[cut:])
        replay = Share(beside, threads=1)
        generators = [replace(share, helper_cpus=beside) for share in _deal(cpus[:cut], num_generators)]
        trained = _deal(cpus[cut:], num_trained)
    else:
        threads = max(1, len(cpus) // (num_generators + num_trained))
        generators = [Share(tuple(cpus), threads)] * num_generators
        trained = [Share(tuple(cpus), threads)] * num_trained
    if config.weights.transport == "nccl" and gpus < num_generators + num_trained:
        raise ConfigError(
            f"weights.transport = 'nccl': needs a GPU for each of {num_generators} generators and {num_trained} "
            f"learners, critics and reward models, this machine has {gpus}; use weights.transport=gloo, or auto"
        )
    learners = trained[: config.launch.learners]
    critics = trained[config.launch.learners : config.launch.learners + num_critics]
    return Plan(tuple(generators), tuple(learners), replay, tuple(critics), trained[-1] if reward_model else None)


def count_gpus() -> int:
    """NVIDIA GPUs of this machine that CUDA_VISIBLE_DEVICES leaves."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([part for part in visible.split(",") if part.strip()])
    if shutil.which("nvidia-smi") is None:
        return 0
    listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=False)
    return sum(line.startswith("GPU ") for line in listing.stdout.splitlines())


def make_endpoints(config: Config, run_id: str, *, reward_model: bool = False) -> Endpoints:
    """Addresses for all parts of a run at `launch.host`. Raises ConfigError when that is no address that can be
    listened on, or naming a port that is taken."""
    host = config.launch.host
    check_host(host)
    num_critics = config.critic.ranks + 1 if config.critic.ranks else 0
    ports = reserve_ports(config.launch.port, 3 + num_critics + int(reward_model), host=host)
    replay, weights, learners, *others = ports
    return Endpoints(
        run_id,
        replay=f"tcp://{host}:{replay}",
        weights=(host, weights),
        learners=(host, learners),
        reward_model=f"tcp://{host}:{others[-1]}" if reward_model else "",
        critics=tuple((host, port) for port in others[:num_critics]),
    )


def network_environment(host: str) -> dict[str, str]:
    """Variables that have torch's gloo and NCCL listen on the network interface with this address only, and not on
    whatever the machine's name stands for; none that the user's environment sets. Raises ConfigError when no
    interface has the address."""
    address = LOOPBACK if ipaddress.IPv4Address(host).is_loopback else host
    found = (name for name, own in psutil.net_if_addrs().items() if any(one.address == address for one in own))
    interface = next(found, None)
    # The sign of equality has NCCL take this one only, and not all whose names begin so.
    wanted = {"GLOO_SOCKET_IFNAME": f"{interface}", "NCCL_SOCKET_IFNAME": f"={interface}"}
    left = {name: value for name, value in wanted.items() if not os.environ.get(name)}
    if left and interface is None:
        raise ConfigError(
            f"launch.host = {host!r}: no network interface of this machine has the address, so that gloo and NCCL "
            f"would listen elsewhere; use an address of one, or set {' and '.join(left)} to the interface"
        )
    return left


def check_host(host: str) -> None:
    """Raises ConfigError unless this is an IPv4 address of this machine that others can be told."""
    key = f"launch.host = {host!r}"
    try:
        address = ipaddress.IPv4Address(host)
    except ValueError:
        raise ConfigError(f"{key}: not an IPv4 address; `hostname -I` lists those of this machine") from None
    if address.is_unspecified:
        raise ConfigError(f"{key}: means every address of this machine; name the address that the others can reach")
    if error := _taken(host, 0):
        raise ConfigError(f"{key}: cannot be listened on ({error}); `hostname -I` lists the addresses of this machine")
    network_environment(host)


def reserve_ports(first: int, count: int, *, host: str = LOOPBACK) -> list[int]:
    """The ports of a run at an address of this machine: `first` and those after it, or free ones when it is 0.

    Free ones are none that the kernel gives to outgoing connections, as it could before the roles open them.
    Raises ConfigError naming the port that is taken, or when there are not enough.
    """
    if first:
        for port in range(first, first + count):
            if error := _taken(host, port):
                raise ConfigError(
                    f"launch.port = {first}: port {port} is taken ({error}); the run needs {count} ports from there "
                    "on; choose another, or 0 for free ones"
                )
        return list(range(first, first + count))
    candidates = random.Random().sample(OWN_PORTS, len(OWN_PORTS))
    free = list(islice((port for port in candidates if not _taken(host, port)), count))
    if len(free) < count:
        raise ConfigError(f"launch.port = 0: fewer than {count} of the ports {OWN_PORTS[0]}-{OWN_PORTS[-1]} are free")
    return free


def _taken(host: str, port: int) -> str:
    """Why a port (0: any) of an address cannot be listened on; empty when it can."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((host, port))
        except OSError as error:
            return error.strerror or str(error)
    return ""


def _deal(cpus: Sequence[int], count: int) -> list[Share]:
    """Cores of `count` equal processes: cores of their own while there are enough, else all share all."""
    each = len(cpus) // count
    if each == 0:
        return [Share(tuple(cpus), threads=1)] * count
    return [Share(tuple(cpus[index * each : (index + 1) * each]), threads=each) for index in range(count)]
