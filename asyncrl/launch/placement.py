"""Assigns the cores, threads and GPUs of the hosts to roles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from asyncrl.config.config import Config
from asyncrl.errors import ConfigError
from asyncrl.generator.engine import GPU_FRACTION
from asyncrl.launch.machine import Gpu, Host, this_machine

PROVEN_ENGINES = ("transformers",)
"""Engines that `make gpu-check` has shown to share a GPU."""
Member = tuple[str, int]
"""A role and its index."""


def num_devices(config: Config, role: str) -> int:
    """Returns how many GPUs, or on a CPU cores, one process of the role needs."""
    return config.generator.tensor_parallel if role == "generator" else 1


def deal_roles(config: Config, hosts: Sequence[Host], *, reward_model: bool) -> list[list[Member]]:
    """Returns the roles of each host, apart from the replay queue, which is on the launcher's.

    The roles of a pool, or without pools all roles, are dealt to its hosts in the order learners, critics, reward
    model, generators: learner ranks are numbered host by host. A host gets roles in proportion to its GPUs; where there
    are none, to its cores. Raises ConfigError if a pool has no host.
    """
    counts = {
        "learner": config.launch.learners,
        "critic": config.critic.ranks,
        "reward_model": int(reward_model),
        "generator": config.launch.generators,
    }
    order = [(role, index) for role, count in counts.items() for index in range(count)]
    dealt: list[list[Member]] = [[] for _ in hosts]
    for pool in dict.fromkeys(config.placement.pool_of(role) for role, _ in order):
        members = [member for member in order if config.placement.pool_of(member[0]) == pool]
        numbers = [number for number, host in enumerate(hosts) if host.takes(pool)]
        if not numbers:
            raise ConfigError(
                f"placement.roles: pool {pool!r} of {', '.join(dict.fromkeys(role for role, _ in members))} has no host"
            )
        sizes = _sizes([hosts[number] for number in numbers], [num_devices(config, role) for role, _ in members])
        for number, first, end in zip(numbers, [0, *accumulate(sizes)], accumulate(sizes), strict=False):
            dealt[number] += members[first:end]
    return dealt


def _sizes(hosts: Sequence[Host], devices: Sequence[int]) -> list[int]:
    gpus = [len(host.gpus) for host in hosts]
    if sum(sizes := _separate(gpus, devices)) == len(devices):
        return sizes
    capacity = gpus if any(gpus) else [len(host.cpus) for host in hosts]
    ends = [round(end * len(devices) / sum(capacity)) for end in accumulate(capacity)]
    return [end - before for before, end in zip([0, *ends], ends, strict=False)]


def _separate(gpus: Sequence[int], devices: Sequence[int]) -> list[int]:
    sizes = [0] * len(gpus)
    place, left = 0, gpus[0]
    for wanted in devices:
        while left < wanted:
            place += 1
            if place == len(gpus):
                return sizes
            left = gpus[place]
        left -= wanted
        sizes[place] += 1
    return sizes


@dataclass(frozen=True, slots=True)
class RoleResources:
    """The cores, threads and GPUs of one role process."""

    cpus: tuple[int, ...]
    threads: int
    gpus: tuple[str, ...] = ()
    """Its GPUs: entries of CUDA_VISIBLE_DEVICES, with the names in this process's environment."""
    visible_gpus: tuple[str, ...] = ()
    """The GPUs that it sees, among them its own; empty for its own alone."""
    helper_cpus: tuple[int, ...] = ()
    """Cores of the role's helper processes; empty for the cores of the role itself."""
    gpu_memory_utilization: float | None = None
    """Fraction of the GPU's memory for the engine of a generator."""
    host: str = ""
    """Name of the host; empty for the launcher's own."""

    @property
    def devices(self) -> tuple[tuple[str, str], ...]:
        """Its GPUs, by host and name."""
        return tuple((self.host, gpu) for gpu in self.gpus)

    def environment(self) -> dict[str, str]:
        """Returns the variables that must be set before the process imports numpy or torch."""
        names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
        visible = self.visible_gpus or self.gpus
        environment = dict.fromkeys(names, str(self.threads)) | {
            "ASYNCRL_HELPER_CPUS": ",".join(map(str, self.helper_cpus or self.cpus)),
            "CUDA_VISIBLE_DEVICES": ",".join(visible),
            "LOCAL_RANK": str(visible.index(self.gpus[0])) if self.gpus else "0",
        }
        if self.gpu_memory_utilization is not None:
            environment[GPU_FRACTION] = f"{self.gpu_memory_utilization:.4f}"
        if self.gpus:
            # torch counts GPUs without starting the driver, which a forked child of the process could not use.
            environment["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
        else:
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
    """The GPUs of all hosts that the run may use."""

    @property
    def sends_between_gpus(self) -> bool:
        """True if learner rank 0 and every generator each have GPUs that none of the others uses, as NCCL requires."""
        devices = [resources.devices for resources in (self.learners[0], *self.generators)]
        return all(devices) and len({gpu for gpus in devices for gpu in gpus}) == sum(map(len, devices))

    def of(self, role: str) -> tuple[RoleResources, ...]:
        """Returns the resources of each process of the role."""
        return {
            "replay": (self.replay,),
            "generator": self.generators,
            "learner": self.learners,
            "critic": self.critics,
            "reward_model": () if self.reward_model is None else (self.reward_model,),
        }[role]


def place_roles(config: Config, *, reward_model: bool = False, hosts: Sequence[Host] | None = None) -> Placement:
    """Returns the cores and GPUs of all roles on these hosts, by default on this machine; the replay queue is on the
    first one.

    On each host every process has separate GPUs while enough are available, and cores are divided in proportion to the
    numbers of processes. A generator has `generator.tensor_parallel` adjacent GPUs, or at least as many cores. Critics
    and the reward model use the cores of the learners. With `launch.colocate` generators and learner ranks share GPUs
    and cores. Raises ConfigError if there are GPUs, but fewer than learner
    ranks or critic ranks, and if a host has fewer GPUs or cores than one of its generators needs.
    """
    hosts = list(hosts or [this_machine()])
    gpus = tuple(gpu for host in hosts for gpu in host.gpus)
    if gpus:
        _check_ranks(config, gpus)
    if config.launch.colocated:
        _check_colocate(config, hosts)
    placed: dict[Member, RoleResources] = {}
    parallel = num_devices(config, "generator")
    dealt = deal_roles(config, hosts, reward_model=reward_model)
    for host, members in zip(hosts, dealt, strict=True):
        if not members:
            continue
        if _split(members)[0]:
            _check_parallel(host, parallel)
        if config.launch.colocated:
            by_member = _on_shared(config, host, members)
        else:
            by_member = (_on_gpus if host.gpus else _on_cores)(host, members, parallel)
        placed |= {member: replace(resources, host=host.name) for member, resources in by_member.items()}

    def of(role: str) -> tuple[RoleResources, ...]:
        return tuple(resources for member, resources in sorted(placed.items()) if member[0] == role)

    head = hosts[0]
    # The replay queue uses the cores of the learners: nothing else runs on an engine's core.
    shared = head.cpus if head.gpus or config.launch.colocated else head.cpus[_cut(head, dealt[0], parallel) :]
    replay = RoleResources(shared or head.cpus, threads=1, host=head.name)
    return Placement(of("generator"), of("learner"), replay, of("critic"), next(iter(of("reward_model")), None), gpus)


def _check_colocate(config: Config, hosts: Sequence[Host]) -> None:
    """Raises ConfigError if roles cannot share the devices of these hosts."""
    key = f"launch.colocate = {config.launch.colocate!r}"
    if len(hosts) > 1:
        raise ConfigError(
            f"{key} on {len(hosts)} hosts: the locks of the devices are files that processes of one machine lock; use "
            "one host, or launch.colocate=off"
        )
    engine = config.generator.engine
    if hosts[0].gpus and config.launch.colocate != "force" and engine not in PROVEN_ENGINES:
        raise ConfigError(
            f"{key} on GPUs with generator.engine = {engine!r}: its sleep is not proven on a GPU by a stage of "
            "`make gpu-check`; launch.colocate=force uses it all the same, generator.engine=transformers is proven, "
            "launch.colocate=off takes separate GPUs"
        )


def _on_shared(config: Config, host: Host, members: Sequence[Member]) -> dict[Member, RoleResources]:
    """Device r, a GPU or a part of the host's cores, belongs to learner rank r and to generator
    r // `generator.tensor_parallel`. A generator that joined later has separate GPUs, or on a CPU all cores."""
    devices, parallel = config.launch.learners, config.generator.tensor_parallel
    last = min(devices, len(host.gpus) - 1)
    placed: dict[Member, RoleResources] = {}
    for role, index in members:
        if role == "reward_model":
            own = range(last, last + 1) if host.gpus else range(devices)
        else:
            count = parallel if role == "generator" else 1
            own = range(index * count, (index + 1) * count)
        each = len(host.cpus) // devices
        if host.gpus:
            if own.stop > len(host.gpus):
                raise ConfigError(f"no GPU of {host.name or 'this machine'} is free: it has {len(host.gpus)}")
            gpus = tuple(host.gpus[device].name for device in own)
            placed[role, index] = RoleResources(host.cpus, max(1, each), gpus)
        elif each and own.stop <= devices:
            cpus = tuple(host.cpus[own.start * each : own.stop * each])
            placed[role, index] = RoleResources(cpus, each * len(own))
        else:
            placed[role, index] = RoleResources(host.cpus, max(1, each * len(own)))
    return placed


def _check_ranks(config: Config, gpus: Sequence[Gpu]) -> None:
    for key, ranks in (("launch.learners", config.launch.learners), ("critic.ranks", config.critic.ranks)):
        if ranks > len(gpus):
            raise ConfigError(
                f"{key} = {ranks}: the ranks exchange gradients by NCCL, which needs a separate GPU for each rank, and "
                f"{ranks} ranks are more than the {len(gpus)} visible GPUs ({_names(gpus)}); use {key}={len(gpus)} "
                "or fewer, or set CUDA_VISIBLE_DEVICES= to run on the CPU"
            )


def _split(members: Sequence[Member]) -> tuple[list[Member], list[Member]]:
    generators = [member for member in members if member[0] == "generator"]
    return generators, [member for member in members if member[0] != "generator"]


def _check_parallel(host: Host, parallel: int) -> None:
    """Raises ConfigError if the host has fewer GPUs, or on a CPU cores, than one generator needs."""
    devices, number = ("GPUs", len(host.gpus)) if host.gpus else ("cores", len(host.cpus))
    if parallel > number:
        raise ConfigError(
            f"generator.tensor_parallel = {parallel}: all {devices} of a generator are of one host, and "
            f"{host.name or 'this machine'} has {number}; use generator.tensor_parallel={number} or less"
        )


def _cut(host: Host, members: Sequence[Member], parallel: int) -> int:
    """The number of cores, from the first on, that only generators use; 0 if all roles share the cores: a worker of an
    engine waits for the others by polling, so that two on one core would take turns at every layer."""
    generators, trained = _split(members)
    if len(host.cpus) < 2 or not generators or not trained:
        return 0
    weight = parallel * len(generators)
    wanted = round(len(host.cpus) * weight / (weight + len(trained)))
    cut = min(max(wanted, 1), len(host.cpus) - 1)
    return cut if cut >= parallel else 0


def _on_cores(host: Host, members: Sequence[Member], parallel: int) -> dict[Member, RoleResources]:
    generators, trained = _split(members)
    if cut := _cut(host, members, parallel):
        dealt = [
            replace(engine, helper_cpus=host.cpus[cut:]) for engine in _deal(host.cpus[:cut], len(generators), parallel)
        ]
        dealt += _deal(host.cpus[cut:], len(trained))
    elif not generators or not trained:
        dealt = _deal(host.cpus, len(members), parallel if generators else 1)
    else:
        dealt = [RoleResources(host.cpus, max(1, len(host.cpus) // len(members)))] * len(members)
    return dict(zip([*generators, *trained], dealt, strict=True))


def _on_gpus(host: Host, members: Sequence[Member], parallel: int) -> dict[Member, RoleResources]:
    generators, others = _split(members)
    trained = [member for member in others if member[0] != "reward_model"]
    num_gpus = len(host.gpus)
    taken = [index % num_gpus for index in range(len(trained))]
    left = list(range(num_gpus))[len(trained) :]
    scored = len(trained) < len(others)
    # The reward model gets a separate GPU if one is left.
    alone = scored and len(left) > parallel * len(generators)
    places = _places(left[:-1] if alone else left, parallel) or _least_taken(taken, num_gpus, parallel)
    devices = {member: [number] for member, number in zip(trained, taken, strict=True)}
    devices |= {member: places[index % len(places)] for index, member in enumerate(generators)}
    devices |= {("reward_model", 0): [left[-1] if left else _least_taken(taken, num_gpus, 1)[-1][0]]} if scored else {}
    threads = max(1, len(host.cpus) // max(1, len(members)))
    return {
        member: RoleResources(host.cpus, threads, tuple(host.gpus[number].name for number in numbers))
        for member, numbers in devices.items()
    }


def _places(gpus: Sequence[int], parallel: int) -> list[list[int]]:
    return [list(gpus[start : start + parallel]) for start in range(0, len(gpus) - parallel + 1, parallel)]


def _least_taken(taken: Sequence[int], num_gpus: int, parallel: int) -> list[list[int]]:
    groups = _places(range(num_gpus), parallel)
    loads = [sum(taken.count(gpu) for gpu in group) for group in groups]
    return [group for group, load in zip(reversed(groups), reversed(loads), strict=True) if load == min(loads)]


def find_room(config: Config, role: str, hosts: Sequence[Host], taken: Sequence[RoleResources]) -> RoleResources | None:
    """Returns resources for one more process of the role, on the least loaded host of its pool, where other
    processes have `taken` theirs. None if there is no host, or no GPU is free."""
    pool, count = config.placement.pool_of(role), num_devices(config, role)
    rooms: list[tuple[float, RoleResources]] = []
    for host in hosts:
        names = [gpu.name for gpu in host.gpus]
        adjacent = [tuple(names[start : start + count]) for start in range(len(names) - count + 1)]
        others = [resources for resources in taken if resources.host == host.name]
        used = {gpu for resources in others for gpu in resources.gpus}
        free = next((gpus for gpus in adjacent if not used & set(gpus)), ())
        if not host.takes(pool) or (host.gpus and not free) or len(host.cpus) < count:
            continue
        threads = max(1, len(host.cpus) // (len(others) + 1))
        rooms.append((len(others) / len(host.cpus), RoleResources(host.cpus, threads, free, host=host.name)))
    return min(rooms, key=lambda room: room[0])[1] if rooms else None


def check_transport(config: Config, placement: Placement) -> None:
    """Raises ConfigError if the weight transport needs a separate GPU for each process and the machine has fewer, or is
    for roles that share one."""
    name = config.weights.transport
    if name == "ipc" and not config.hands_over:
        raise ConfigError(
            "weights.transport = 'ipc': is for a generator and a learner rank on one card; use launch.colocate=on, or "
            "weights.transport=auto"
        )
    if name != "auto" and not placement.sends_between_gpus and _needs_own_gpus(config):
        raise ConfigError(
            f"weights.transport = {name!r}: needs a separate GPU for learner rank 0 and for each of "
            f"{len(placement.generators)} generators, in addition to those of all {len(placement.learners)} learner "
            f"ranks and {len(placement.critics)} critic ranks; this machine has {len(placement.gpus)}; use "
            "weights.transport=gloo, or auto"
        )


def _needs_own_gpus(config: Config) -> bool:
    """True if the transport sends weights between GPUs when every process has a separate GPU."""
    from asyncrl.weights.transports import transport_on_gpus  # imports torch

    return transport_on_gpus(config).needs_own_gpu


def _names(gpus: Sequence[Gpu]) -> str:
    return f"CUDA_VISIBLE_DEVICES={','.join(gpu.name for gpu in gpus)}"


def _deal(cpus: Sequence[int], count: int, least: int = 1) -> list[RoleResources]:
    """Returns the resources of `count` equal processes: separate cores if enough are available for `least` each,
    otherwise all cores for each."""
    each = len(cpus) // count
    if each < least:
        return [RoleResources(tuple(cpus), threads=least)] * count
    return [RoleResources(tuple(cpus[index * each : (index + 1) * each]), threads=each) for index in range(count)]
