"""Who runs on which cores and GPUs, with how many threads."""

from __future__ import annotations

import ipaddress
import os
import random
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice

import psutil

from asyncrl.config import Config
from asyncrl.errors import ConfigError
from asyncrl.generator.vllm_backend.setup import GPU_FRACTION
from asyncrl.launch.gpus import Gpu, visible_gpus

LOOPBACK = "127.0.0.1"
LAST_PORT = 65535
OWN_PORTS = range(20000, 32000)
"""Where free ports are looked for: below those that Linux gives to outgoing connections (32768 and up)."""


@dataclass(frozen=True, slots=True)
class RoleResources:
    """What one role process may use."""

    cpus: tuple[int, ...]
    threads: int
    gpus: tuple[str, ...] = ()
    """Entries of CUDA_VISIBLE_DEVICES, as this process was given them."""
    helper_cpus: tuple[int, ...] = ()
    """Cores of the role's own helper processes; those of the role itself when empty."""
    gpu_memory_utilization: float | None = None
    """Of the GPU's memory, what the engine of a generator may take."""

    def environment(self) -> dict[str, str]:
        """Variables that must be set before the process imports numpy or torch."""
        threads = str(self.threads)
        names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
        environment: dict[str, str] = dict.fromkeys(names, threads)
        environment["ASYNCRL_HELPER_CPUS"] = ",".join(map(str, self.helper_cpus or self.cpus))
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(self.gpus)
        if self.gpu_memory_utilization is not None:
            environment[GPU_FRACTION] = f"{self.gpu_memory_utilization:.4f}"
        if not self.gpus:
            environment["DS_ACCELERATOR"] = "cpu"
        return environment


@dataclass(frozen=True, slots=True)
class Placement:
    """Shares by role and index."""

    generators: tuple[RoleResources, ...]
    learners: tuple[RoleResources, ...]
    replay: RoleResources
    critics: tuple[RoleResources, ...] = ()
    reward_model: RoleResources | None = None
    gpus: tuple[Gpu, ...] = ()
    """Of the machine, as far as the run may use them."""

    @property
    def sends_between_gpus(self) -> bool:
        """Whether learner rank 0 and every generator have a GPU that none of the others has, as NCCL needs it."""
        gpus = [gpu for share in (self.learners[0], *self.generators) for gpu in share.gpus]
        return len(set(gpus)) == len(gpus) == 1 + len(self.generators)

    def of(self, role: str) -> tuple[RoleResources, ...]:
        """One share for every process of the role."""
        return {
            "replay": (self.replay,),
            "generator": self.generators,
            "learner": self.learners,
            "critic": self.critics,
            "reward_model": () if self.reward_model is None else (self.reward_model,),
        }[role]


def place_roles(config: Config, *, reward_model: bool = False) -> Placement:
    """Splits this machine between the roles: GPUs one each as far as they go, cores by number of processes.

    Critics and the reward model count with the learners: they share their cores. Raises ConfigError when the ranks of
    the learner, or of the critic, have no GPU each.
    """
    if gpus := visible_gpus():
        return _plan_gpus(config, gpus, reward_model=reward_model)
    num_generators, num_critics = config.launch.generators, config.critic.ranks
    num_trained = config.launch.learners + num_critics + int(reward_model)
    cpus = sorted(os.sched_getaffinity(0))
    replay = RoleResources(tuple(cpus), threads=1)
    if config.launch.pin_cores and len(cpus) >= 2:
        wanted = round(len(cpus) * num_generators / (num_generators + num_trained))
        cut = min(max(wanted, 1), len(cpus) - 1)
        # The replay queue and the reward workers run beside the learners: an engine keeps its core to itself.
        beside = tuple(cpus[cut:])
        replay = RoleResources(beside, threads=1)
        generators = [replace(share, helper_cpus=beside) for share in _deal(cpus[:cut], num_generators)]
        trained = _deal(cpus[cut:], num_trained)
    else:
        threads = max(1, len(cpus) // (num_generators + num_trained))
        generators = [RoleResources(tuple(cpus), threads)] * num_generators
        trained = [RoleResources(tuple(cpus), threads)] * num_trained
    learners = trained[: config.launch.learners]
    critics = trained[config.launch.learners : config.launch.learners + num_critics]
    scores = trained[-1] if reward_model else None
    return Placement(tuple(generators), tuple(learners), replay, tuple(critics), scores)


def _plan_gpus(config: Config, gpus: Sequence[Gpu], *, reward_model: bool) -> Placement:
    """Learner and critic ranks take the first GPUs, generators and the reward model the others.

    Where GPUs are fewer than roles, generators share among themselves before they share with what is trained.
    """
    num_generators, num_learners, num_critics = config.launch.generators, config.launch.learners, config.critic.ranks
    for key, ranks in (("launch.learners", num_learners), ("critic.ranks", num_critics)):
        if ranks > len(gpus):
            raise ConfigError(
                f"{key} = {ranks}: the ranks exchange gradients by NCCL, which takes one rank for each GPU, and "
                f"{ranks} ranks are more than the {len(gpus)} GPUs there are ({_names(gpus)}); use {key}={len(gpus)} "
                "or fewer, or set CUDA_VISIBLE_DEVICES= to run on the CPU"
            )
    trained = [index % len(gpus) for index in range(num_learners + num_critics)]
    left = list(range(len(gpus)))[len(trained) :]
    if not left:
        load = [trained.count(card) for card in range(len(gpus))]
        left = [card for card in reversed(range(len(gpus))) if load[card] == min(load)]
    # The reward model keeps a GPU to itself where there is one over.
    places = left[:-1] if reward_model and len(left) > num_generators else left
    cpus = tuple(sorted(os.sched_getaffinity(0)))
    threads = max(1, len(cpus) // (num_generators + len(trained) + int(reward_model)))
    shares = [RoleResources(cpus, threads, (gpu.name,)) for gpu in gpus]
    return Placement(
        generators=tuple(shares[places[index % len(places)]] for index in range(num_generators)),
        learners=tuple(shares[card] for card in trained[:num_learners]),
        replay=RoleResources(cpus, threads=1),
        critics=tuple(shares[card] for card in trained[num_learners:]),
        reward_model=shares[left[-1]] if reward_model else None,
        gpus=tuple(gpus),
    )


def refuse_joiner(config: Config, running: Placement, wanted: Placement, index: int) -> str:
    """Why generator `index` cannot join a run that began with the plan `running`; empty when it can.

    A transport between GPUs takes one process for each, and engines have taken the memory of theirs, unless
    `generator.kv_cache_bytes` bounds it.
    """
    gpus = wanted.generators[index].gpus
    if not gpus or index < len(running.generators):
        return ""
    owners = {"learner rank 0": wanted.learners[0].gpus}
    owners |= {f"generator-{other}": share.gpus for other, share in enumerate(wanted.generators[:index])}
    owner = next((name for name, theirs in owners.items() if theirs == gpus), "")
    if not owner:
        return ""
    shared = f"generator-{index} would share GPU {gpus[0]} with {owner}"
    if running.sends_between_gpus and _needs_own_gpus(config):
        return f"{shared}, and weights travel from GPU to GPU, which takes one process for each GPU"
    if owner != "learner rank 0" and config.generator.kv_cache_bytes is None:
        return f"{shared}, whose engine has taken the memory; generator.kv_cache_bytes bounds it for the next run"
    return ""


def check_transport(config: Config, plan: Placement) -> None:
    """Raises ConfigError when the weight transport needs a GPU of its own for each process, and there are fewer."""
    name = config.weights.transport
    if name != "auto" and not plan.sends_between_gpus and _needs_own_gpus(config):
        raise ConfigError(
            f"weights.transport = {name!r}: needs a GPU of its own for learner rank 0 and for each of "
            f"{len(plan.generators)} generators, besides those of {len(plan.learners)} learner ranks and "
            f"{len(plan.critics)} critic ranks in all; this machine has {len(plan.gpus)}; use weights.transport=gloo, "
            "or auto"
        )


def _needs_own_gpus(config: Config) -> bool:
    """True if weights travel between GPUs, given that every process has its own."""
    from asyncrl.weights.transports import AUTO_ON_GPUS, find_transport, transport_of  # imports torch

    name = transport_of(config)
    return find_transport(AUTO_ON_GPUS if name == "auto" else name).on_device


def _names(gpus: Sequence[Gpu]) -> str:
    return f"CUDA_VISIBLE_DEVICES={','.join(gpu.name for gpu in gpus)}"


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
        if first + count - 1 > LAST_PORT:
            raise ConfigError(
                f"launch.port = {first}: the run needs {count} ports from there on, and the last one there is is "
                f"{LAST_PORT}; use at most {LAST_PORT + 1 - count}, or 0 for free ones"
            )
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


def _deal(cpus: Sequence[int], count: int) -> list[RoleResources]:
    """Cores of `count` equal processes: cores of their own while there are enough, else all share all."""
    each = len(cpus) // count
    if each == 0:
        return [RoleResources(tuple(cpus), threads=1)] * count
    return [RoleResources(tuple(cpus[index * each : (index + 1) * each]), threads=each) for index in range(count)]
