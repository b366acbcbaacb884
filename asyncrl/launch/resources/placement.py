"""Assigns cores, threads, GPUs and ports of this machine to roles."""

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
from asyncrl.config.sections import LAST_PORT
from asyncrl.errors import ConfigError
from asyncrl.generator.vllm_backend.setup import GPU_FRACTION
from asyncrl.launch.resources.gpus import Gpu, visible_gpus
from asyncrl.wire.endpoints import LOOPBACK

OWN_PORTS = range(20000, 32000)
"""Range to search for free ports, below the ports that Linux assigns to outgoing connections (32768 and up)."""


@dataclass(frozen=True, slots=True)
class RoleResources:
    """The cores, threads and GPUs of one role process."""

    cpus: tuple[int, ...]
    threads: int
    gpus: tuple[str, ...] = ()
    """Entries of CUDA_VISIBLE_DEVICES, with the names in this process's environment."""
    helper_cpus: tuple[int, ...] = ()
    """Cores of the role's helper processes; empty for the cores of the role itself."""
    gpu_memory_utilization: float | None = None
    """Fraction of the GPU's memory for the engine of a generator."""

    def environment(self) -> dict[str, str]:
        """Returns the variables that must be set before the process imports numpy or torch."""
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
    """The resources of all roles of a run, by role and index."""

    generators: tuple[RoleResources, ...]
    learners: tuple[RoleResources, ...]
    replay: RoleResources
    critics: tuple[RoleResources, ...] = ()
    reward_model: RoleResources | None = None
    gpus: tuple[Gpu, ...] = ()
    """The GPUs of the machine that the run may use."""

    @property
    def sends_between_gpus(self) -> bool:
        """True if learner rank 0 and every generator each have a GPU that none of the others uses, as NCCL requires."""
        gpus = [gpu for resources in (self.learners[0], *self.generators) for gpu in resources.gpus]
        return len(set(gpus)) == len(gpus) == 1 + len(self.generators)

    def of(self, role: str) -> tuple[RoleResources, ...]:
        """Returns the resources of each process of the role."""
        return {
            "replay": (self.replay,),
            "generator": self.generators,
            "learner": self.learners,
            "critic": self.critics,
            "reward_model": () if self.reward_model is None else (self.reward_model,),
        }[role]


def place_roles(config: Config, *, reward_model: bool = False) -> Placement:
    """Returns the division of this machine among the roles: one GPU for each process while enough are available, and
    cores in proportion to the numbers of processes.

    Critics and the reward model use the cores of the learners. Raises ConfigError if a machine with GPUs has fewer of
    them than learner ranks or critic ranks.
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
        # The replay queue and the reward workers use the cores of the learners: nothing else runs on an engine's core.
        shared_cpus = tuple(cpus[cut:])
        replay = RoleResources(shared_cpus, threads=1)
        generators = [replace(resources, helper_cpus=shared_cpus) for resources in _deal(cpus[:cut], num_generators)]
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
    """Returns the placement on GPUs: learner and critic ranks use the first GPUs, generators and the reward model the
    others.

    With fewer GPUs than processes, generators share GPUs with one another before they share with trained models.
    """
    num_generators, num_learners, num_critics = config.launch.generators, config.launch.learners, config.critic.ranks
    for key, ranks in (("launch.learners", num_learners), ("critic.ranks", num_critics)):
        if ranks > len(gpus):
            raise ConfigError(
                f"{key} = {ranks}: the ranks exchange gradients by NCCL, which needs a separate GPU for each rank, and "
                f"{ranks} ranks are more than the {len(gpus)} visible GPUs ({_names(gpus)}); use {key}={len(gpus)} "
                "or fewer, or set CUDA_VISIBLE_DEVICES= to run on the CPU"
            )
    trained = [index % len(gpus) for index in range(num_learners + num_critics)]
    left = list(range(len(gpus)))[len(trained) :]
    if not left:
        load = [trained.count(card) for card in range(len(gpus))]
        left = [card for card in reversed(range(len(gpus))) if load[card] == min(load)]
    # The reward model gets a separate GPU if one is left.
    places = left[:-1] if reward_model and len(left) > num_generators else left
    cpus = tuple(sorted(os.sched_getaffinity(0)))
    threads = max(1, len(cpus) // (num_generators + len(trained) + int(reward_model)))
    by_gpu = [RoleResources(cpus, threads, (gpu.name,)) for gpu in gpus]
    return Placement(
        generators=tuple(by_gpu[places[index % len(places)]] for index in range(num_generators)),
        learners=tuple(by_gpu[card] for card in trained[:num_learners]),
        replay=RoleResources(cpus, threads=1),
        critics=tuple(by_gpu[card] for card in trained[num_learners:]),
        reward_model=by_gpu[left[-1]] if reward_model else None,
        gpus=tuple(gpus),
    )


def refuse_joiner(config: Config, running: Placement, wanted: Placement, index: int) -> str:
    """Returns why generator `index` cannot join a run that started with the placement `running`; empty if it can.

    A transport between GPUs needs a separate GPU for each process. Engines have allocated the memory of their GPUs,
    unless `generator.kv_cache_bytes` limits it.
    """
    gpus = wanted.generators[index].gpus
    if not gpus or index < len(running.generators):
        return ""
    owners = {"learner rank 0": wanted.learners[0].gpus}
    owners |= {f"generator-{other}": resources.gpus for other, resources in enumerate(wanted.generators[:index])}
    owner = next((name for name, theirs in owners.items() if theirs == gpus), "")
    if not owner:
        return ""
    shared = f"generator-{index} would share GPU {gpus[0]} with {owner}"
    if running.sends_between_gpus and _needs_own_gpus(config):
        return f"{shared}, and weights are sent between GPUs, which needs a separate GPU for each process"
    if owner != "learner rank 0" and config.generator.kv_cache_bytes is None:
        return f"{shared}, whose engine has allocated the memory; generator.kv_cache_bytes limits it in the next run"
    return ""


def check_transport(config: Config, placement: Placement) -> None:
    """Raises ConfigError if the weight transport needs a separate GPU for each process and the machine has fewer."""
    name = config.weights.transport
    if name != "auto" and not placement.sends_between_gpus and _needs_own_gpus(config):
        raise ConfigError(
            f"weights.transport = {name!r}: needs a separate GPU for learner rank 0 and for each of "
            f"{len(placement.generators)} generators, in addition to those of all {len(placement.learners)} learner "
            f"ranks and {len(placement.critics)} critic ranks; this machine has {len(placement.gpus)}; use "
            "weights.transport=gloo, or auto"
        )


def _needs_own_gpus(config: Config) -> bool:
    """True if the transport sends weights between GPUs when every process has a separate GPU."""
    from asyncrl.weights.transports import AUTO_ON_GPUS, find_transport, transport_of  # imports torch

    name = transport_of(config)
    return find_transport(AUTO_ON_GPUS if name == "auto" else name).needs_own_gpu


def _names(gpus: Sequence[Gpu]) -> str:
    return f"CUDA_VISIBLE_DEVICES={','.join(gpu.name for gpu in gpus)}"


def network_environment(host: str) -> dict[str, str]:
    """Returns the variables that make gloo and NCCL listen only on the network interface with this address, instead of
    the interface of the machine's host name. Variables that the user's environment sets are left out. Raises
    ConfigError if no interface has the address."""
    address = LOOPBACK if ipaddress.IPv4Address(host).is_loopback else host
    found = (name for name, own in psutil.net_if_addrs().items() if any(one.address == address for one in own))
    interface = next(found, None)
    # With the equals sign, NCCL uses this interface only, not all interfaces with this prefix.
    wanted = {"GLOO_SOCKET_IFNAME": f"{interface}", "NCCL_SOCKET_IFNAME": f"={interface}"}
    left = {name: value for name, value in wanted.items() if not os.environ.get(name)}
    if left and interface is None:
        raise ConfigError(
            f"launch.address = {host!r}: no network interface of this machine has the address, so that gloo and NCCL "
            f"would listen elsewhere; use an address of one, or set {' and '.join(left)} to the interface"
        )
    return left


def check_host(host: str) -> None:
    """Raises ConfigError unless `host` is an IPv4 address of this machine to which other processes can connect."""
    key = f"launch.address = {host!r}"
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
    """Returns the ports of a run at an address of this machine: `first` and the following ones, or with 0 free ones.

    Free ports are outside of the kernel's range for outgoing connections, which could otherwise use them before the
    roles open them. Raises ConfigError, naming the port, if one is taken, and if not enough are free.
    """
    if first:
        if first + count - 1 > LAST_PORT:
            raise ConfigError(
                f"launch.address = '{host}:{first}': the run needs {count} ports from there on, and the last "
                f"port is {LAST_PORT}; use at most {LAST_PORT + 1 - count}, or no port for free ones"
            )
        for port in range(first, first + count):
            if error := _taken(host, port):
                raise ConfigError(
                    f"launch.address = '{host}:{first}': port {port} is taken ({error}); the run needs {count} ports "
                    "from there on; choose another one, or leave it out for free ones"
                )
        return list(range(first, first + count))
    candidates = random.Random().sample(OWN_PORTS, len(OWN_PORTS))
    free = list(islice((port for port in candidates if not _taken(host, port)), count))
    if len(free) < count:
        raise ConfigError(
            f"launch.address = {host!r}: fewer than {count} of the ports {OWN_PORTS[0]}-{OWN_PORTS[-1]} are free"
        )
    return free


def _taken(host: str, port: int) -> str:
    """Returns why a port (0: any) of an address cannot be bound; empty if it can."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((host, port))
        except OSError as error:
            return error.strerror or str(error)
    return ""


def _deal(cpus: Sequence[int], count: int) -> list[RoleResources]:
    """Returns the resources of `count` equal processes: separate cores if enough are available, otherwise all cores for
    each."""
    each = len(cpus) // count
    if each == 0:
        return [RoleResources(tuple(cpus), threads=1)] * count
    return [RoleResources(tuple(cpus[index * each : (index + 1) * each]), threads=each) for index in range(count)]
