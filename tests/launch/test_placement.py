"""The cores, threads and GPUs of roles on one host and on several, and where those of a lost host go."""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.config.config import Config
from asyncrl.errors import ConfigError
from asyncrl.launch import machine as gpus
from asyncrl.launch.bottleneck import generators_per_device
from asyncrl.launch.checks import with_start_deadline
from asyncrl.launch.launcher import LocalLauncher
from asyncrl.launch.machine import (
    Gpu,
    Host,
    find_port,
    listening_address,
    network_environment,
    visible_gpus,
)
from asyncrl.launch.placement import (
    Placement,
    RoleResources,
    check_transport,
    find_room,
    place_roles,
)
from asyncrl.launch.supervisor import RestartHistory, RoleGroup
from asyncrl.launch.worker import RoleSpec
from asyncrl.learner.distributed import own_device
from tests.helpers.replay import loopback_endpoints, small_config


@pytest.fixture(autouse=True)
def four_cores_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(gpus, "torch_is_cpu_build", lambda: False)
    monkeypatch.setattr(gpus, "_listed_gpus", lambda: None)


def test_generators_and_learners_get_separate_cores() -> None:
    placement = place_roles(small_config(launch__generators=3))
    assert [resources.cpus for resources in placement.generators] == [(0,), (1,), (2,)]
    assert [resources.cpus for resources in placement.learners] == [(3,)]


def test_one_generator_and_one_learner_split_the_machine() -> None:
    placement = place_roles(small_config())
    (generator,), (learner,) = placement.generators, placement.learners
    assert (generator.cpus, generator.threads) == ((0, 1), 2)
    assert (learner.cpus, learner.threads) == ((2, 3), 2)
    assert generator.environment()["OMP_NUM_THREADS"] == "2"
    assert generator.environment()["DS_ACCELERATOR"] == "cpu"
    assert placement.replay.cpus == (2, 3), "no other role uses the engine's cores"
    assert generator.environment()["ASYNCRL_HELPER_CPUS"] == "2,3"


def test_a_generator_of_several_cores_shares_them_with_no_other_while_there_are_enough() -> None:
    placement = place_roles(small_config(generator__tensor_parallel=3))
    assert placement.generators[0].cpus == (0, 1, 2) and placement.learners[0].cpus == (3,)
    placement = place_roles(small_config(generator__tensor_parallel=4))
    assert placement.generators[0].cpus == placement.learners[0].cpus == placement.replay.cpus == (0, 1, 2, 3)
    placement = place_roles(small_config(generator__tensor_parallel=2, launch__generators=2))
    assert {resources.cpus for resources in placement.generators} == {(0, 1, 2)}
    with pytest.raises(ConfigError, match=r"tensor_parallel = 5: all cores .* this machine has 4; use .*=4 or less"):
        place_roles(small_config(generator__tensor_parallel=5))


def test_a_generator_gets_adjacent_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,3,5,1,2")
    placement = place_roles(small_config(generator__tensor_parallel=2, launch__generators=2))
    assert placement.learners[0].gpus == ("7",)
    assert [resources.gpus for resources in placement.generators] == [("3", "5"), ("1", "2")]
    assert placement.generators[0].environment()["CUDA_VISIBLE_DEVICES"] == "3,5"
    assert placement.sends_between_gpus
    placement = place_roles(small_config(generator__tensor_parallel=2, launch__generators=3))
    assert [resources.gpus for resources in placement.generators] == [("3", "5"), ("1", "2"), ("3", "5")]
    assert not placement.sends_between_gpus
    placement = place_roles(small_config(generator__tensor_parallel=5))
    assert placement.generators[0].gpus == ("7", "3", "5", "1", "2") and not placement.sends_between_gpus
    with pytest.raises(ConfigError, match=r"tensor_parallel = 6: all GPUs of a generator .* this machine has 5"):
        place_roles(small_config(generator__tensor_parallel=6))


def test_more_roles_than_cores_share_with_one_thread_each() -> None:
    placement = place_roles(small_config(launch__generators=8, launch__learners=4, replay__groups_per_step=4))
    assert {resources.threads for resources in placement.generators + placement.learners} == {1}
    generators = {cpu for resources in placement.generators for cpu in resources.cpus}
    learners = {cpu for resources in placement.learners for cpu in resources.cpus}
    assert generators | learners == {0, 1, 2, 3}
    assert not generators & learners


def test_generators_that_take_turns_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    assert generators_per_device(place_roles(small_config(launch__generators=3))) == 1
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    assert generators_per_device(place_roles(small_config(launch__generators=3))) == 3
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    assert generators_per_device(place_roles(small_config(launch__generators=3))) == 2


def test_critics_and_the_reward_model_share_with_the_learners() -> None:
    config = small_config(launch__learners=2, critic__ranks=1, algorithm__advantage="gae", replay__groups_per_step=4)
    placement = place_roles(config, reward_model=True)
    assert [len(placement.of(role)) for role in ("generator", "learner", "critic", "reward_model")] == [1, 2, 1, 1]
    learners = {cpu for resources in placement.learners for cpu in resources.cpus}
    assert {
        cpu for resources in (*placement.critics, placement.reward_model) if resources for cpu in resources.cpus
    } <= learners | {1, 2, 3}
    assert 0 in placement.generators[0].cpus and 0 not in learners


def test_taken_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        taken = holder.getsockname()[1]
        with pytest.raises(ConfigError, match=f"launch.address = '127.0.0.1:{taken}': port {taken} is taken"):
            find_port(taken)
    assert find_port(taken) == taken


def test_a_free_port_is_free() -> None:
    port = find_port()
    outgoing, _ = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    assert port < int(outgoing), "the kernel could assign it before the role listens"
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as roles do: closed connections may linger
        sock.bind(("127.0.0.1", port))


@pytest.mark.parametrize(
    ("host", "reason"),
    [
        ("0.0.0.0", "every address of this machine; name the address that the others can reach"),
        ("192.0.2.7", r"cannot be listened on \(Cannot assign requested address\); this machine has lo \(127"),
        ("localhost", r"this machine has no interface of this name; it has lo \(127"),
    ],
)
def test_a_host_that_cannot_be_listened_on_is_refused(host: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=f"launch.address = '{host}': .*{reason}"):
        listening_address(host)


def test_gloo_and_nccl_listen_on_the_interface_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    def interfaces() -> dict[str, list[SimpleNamespace]]:
        addresses = {"lo": "127.0.0.1", "eth1": "10.1.2.3", "eth10": "10.1.2.4"}
        return {name: [SimpleNamespace(address=address, family=socket.AF_INET)] for name, address in addresses.items()}

    monkeypatch.setattr("psutil.net_if_addrs", interfaces)
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    loopback = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}
    assert network_environment("127.0.0.1") == network_environment("127.0.0.2") == loopback
    assert network_environment("10.1.2.3") == {"GLOO_SOCKET_IFNAME": "eth1", "NCCL_SOCKET_IFNAME": "=eth1"}
    rule = "launch.address = '10.9.9.9': no network interface .*, or set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to"
    with pytest.raises(ConfigError, match=rule):
        network_environment("10.9.9.9")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "mine")
    assert network_environment("127.0.0.1") == {"NCCL_SOCKET_IFNAME": "=lo"}
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "mine")
    assert network_environment("10.9.9.9") == {}


def test_the_deadline_for_starts_is_that_of_the_device_unless_it_is_set() -> None:
    default, explicit = small_config(), small_config(launch__start_timeout_s=77.0)
    placement = place_roles(default)
    with_gpus = replace(placement, gpus=(Gpu("0", 80 << 30),))
    assert with_start_deadline(default, with_gpus).launch.start_timeout_s == 1800.0
    on_cpu = with_start_deadline(default, placement)
    assert on_cpu.launch.start_timeout_s == 180.0
    assert with_start_deadline(explicit, placement) == explicit
    saved = Config.model_validate(yaml.safe_load(on_cpu.to_yaml()))
    assert with_start_deadline(saved, with_gpus) == saved == on_cpu


def show(monkeypatch: pytest.MonkeyPatch, visible: str) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        ("4,5", ["4", "5"]),
        (" 7 , 2", ["7", "2"]),
        ("GPU-aaaa,GPU-bbbb", ["GPU-aaaa", "GPU-bbbb"]),
        ("MIG-1b2c", ["MIG-1b2c"]),
        ("2,-1,3", ["2"]),
        ("1,none,0", ["1"]),
        ("-1", []),
        ("", []),
    ],
)
def test_roles_get_the_gpus_that_the_user_gave(monkeypatch: pytest.MonkeyPatch, visible: str, names: list[str]) -> None:
    show(monkeypatch, visible)
    assert [gpu.name for gpu in visible_gpus()] == names
    placement = place_roles(small_config())
    given = [
        resources.environment()["CUDA_VISIBLE_DEVICES"] for resources in (*placement.learners, *placement.generators)
    ]
    assert given == ([names[0], names[-1]] if names else ["", ""])


def test_the_list_of_nvidia_smi_bounds_the_gpus_and_has_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = [gpus._Listed("0", "GPU-aa11", 80 << 30), gpus._Listed("1", "GPU-bb22", 40 << 30)]
    monkeypatch.setattr(gpus, "_listed_gpus", lambda: listed)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    show(monkeypatch, "1,7,0")
    assert visible_gpus() == [Gpu("1", 40 << 30)]
    show(monkeypatch, "GPU-aa,GPU-cc")
    assert visible_gpus() == [Gpu("GPU-aa", 80 << 30)]
    show(monkeypatch, "0")
    assert visible_gpus() == [Gpu("0", 40 << 30)], "CUDA numbers the fastest GPU first, so 0 may be either of them"
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    assert visible_gpus() == [Gpu("0", 80 << 30)]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert [gpu.name for gpu in visible_gpus()] == ["0", "1"]
    monkeypatch.setattr(gpus, "torch_is_cpu_build", lambda: True)
    assert visible_gpus() == []


def test_a_gpu_that_is_named_twice_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    show(monkeypatch, "3,3")
    with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES=3,3: names 3 twice"):
        visible_gpus()


def test_nvidia_smi_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.undo()
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho '0, GPU-aa11, 81559'\necho '1, GPU-bb22, 143771'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert [(line.uuid, line.memory_bytes >> 20) for line in gpus._listed_gpus() or []] == [
        ("GPU-aa11", 81559),
        ("GPU-bb22", 143771),
    ]
    tool.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed'; exit 9\n")
    assert gpus._listed_gpus() == []
    tool.unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpus._listed_gpus() is None


def places(placement: Placement) -> dict[str, str]:
    """Returns the GPUs by role."""
    roles = ("learner", "critic", "generator", "reward_model")
    return {
        role: ",".join(gpu for resources in placement.of(role) for gpu in resources.gpus)
        for role in roles
        if placement.of(role)
    }


@pytest.mark.parametrize(
    ("gpus_visible", "learners", "critics", "generators", "reward_model", "expected"),
    [
        (4, 1, 0, 3, False, {"learner": "0", "generator": "1,2,3"}),
        (4, 2, 0, 3, False, {"learner": "0,1", "generator": "2,3,2"}),
        (3, 1, 0, 4, False, {"learner": "0", "generator": "1,2,1,2"}),
        (2, 2, 0, 2, False, {"learner": "0,1", "generator": "1,0"}),
        (3, 2, 2, 2, False, {"learner": "0,1", "critic": "2,0", "generator": "2,1"}),
        (1, 1, 1, 2, True, {"learner": "0", "critic": "0", "generator": "0,0", "reward_model": "0"}),
        (8, 4, 2, 1, True, {"learner": "0,1,2,3", "critic": "4,5", "generator": "6", "reward_model": "7"}),
        (8, 6, 0, 2, True, {"learner": "0,1,2,3,4,5", "generator": "6,7", "reward_model": "7"}),
    ],
)
def test_generators_share_among_themselves_before_they_share_with_learners(
    monkeypatch: pytest.MonkeyPatch,
    gpus_visible: int,
    learners: int,
    critics: int,
    generators: int,
    reward_model: bool,
    expected: dict[str, str],
) -> None:
    show(monkeypatch, ",".join(map(str, range(gpus_visible))))
    config = small_config(
        launch__generators=generators, launch__learners=learners, critic__ranks=critics, replay__groups_per_step=12
    )
    placement = place_roles(config, reward_model=reward_model)
    assert places(placement) == expected
    assert "DS_ACCELERATOR" not in placement.learners[0].environment()


def test_torch_looks_for_gpus_without_starting_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has started it cannot fork one that uses a GPU."""
    show(monkeypatch, "0,1")
    placement = place_roles(small_config())
    roles = (*placement.generators, *placement.learners)
    assert {role.environment()["PYTORCH_NVML_BASED_CUDA_CHECK"] for role in roles} == {"1"}
    assert "PYTORCH_NVML_BASED_CUDA_CHECK" not in placement.replay.environment()


def test_ranks_that_would_share_a_gpu_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    show(monkeypatch, "4,5")
    rule = r"4 ranks are more than the 2 visible GPUs \(CUDA_VISIBLE_DEVICES=4,5\); use launch.learners=2 or fewer"
    with pytest.raises(ConfigError, match=f"launch.learners = 4: .* NCCL, .*{rule}, or set CUDA"):
        place_roles(small_config(launch__learners=4, replay__groups_per_step=4))
    show(monkeypatch, "4")
    config = small_config(launch__learners=2, critic__ranks=2, replay__groups_per_step=4)
    with pytest.raises(ConfigError, match=r"launch\.learners = 2: "):
        place_roles(config)


def test_nccl_needs_a_gpu_for_each_that_sends_or_receives_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    show(monkeypatch, "0,1,2")
    assert place_roles(small_config(launch__generators=2, weights__transport="nccl")).sends_between_gpus
    # Roles that receive no weights may share a GPU.
    config = small_config(launch__generators=2, weights__transport="nccl")
    check_transport(config, place_roles(config, reward_model=True))
    rule = "needs a separate GPU for learner rank 0 and for each of 3 generators, .* this machine has 3;"
    config = small_config(launch__generators=3, weights__transport="nccl")
    with pytest.raises(ConfigError, match=rule):
        check_transport(config, place_roles(config))
    assert not place_roles(small_config(launch__generators=3)).sends_between_gpus


class Environments(LocalLauncher):
    """Notes CUDA_VISIBLE_DEVICES and LOCAL_RANK of roles, and starts none."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, tuple[str, str]] = {}

    def start(self, spec: RoleSpec, resources: RoleResources) -> Any:
        variables = resources.environment()
        self.seen[spec.name] = variables["CUDA_VISIBLE_DEVICES"], variables["LOCAL_RANK"]


def environments(hosts: Sequence[Host], **changes: int) -> dict[str, tuple[str, str]]:
    """CUDA_VISIBLE_DEVICES and LOCAL_RANK of each process on the hosts."""
    config = small_config(replay__groups_per_step=12, **changes)
    placement, address = place_roles(config, hosts=hosts), {host.name: host.address for host in hosts}
    members = [
        (RoleSpec(role, index, "", replace(loopback_endpoints(1), host=address[own.host]), own.cpus, 8), own)
        for role in ("learner", "critic", "generator")
        for index, own in enumerate(placement.of(role))
    ]
    launcher = Environments()
    for group in ([one for one in members if one[0].role != "generator"], members[-1:]):
        RoleGroup("group", group, RestartHistory(max_restarts=1)).start(launcher, 0.0)
    return launcher.seen


def cards(*names: str) -> tuple[Gpu, ...]:
    return tuple(Gpu(name) for name in names)


@pytest.mark.parametrize(
    "hosts",
    [
        [Host("", (0, 1), cards("4", "5", "6", "7"))],
        [Host("", (0,), replay_only=True), *(Host(f"n-{gpu}", (0,), cards(gpu), "10.0.0.1") for gpu in "4567")],
    ],
    ids=["one host", "a host of Ray for each GPU of one node"],
)
def test_ranks_of_a_machine_see_the_gpus_of_all_and_are_told_their_own(hosts: list[Host]) -> None:
    assert environments(hosts, launch__learners=3, launch__generators=1) == {
        "learner-0": ("4,5,6", "0"),
        "learner-1": ("4,5,6", "1"),
        "learner-2": ("4,5,6", "2"),
        "generator-0": ("7", "0"),
    }


def test_learner_and_critic_ranks_see_their_own_kind() -> None:
    found = environments(
        [Host("", (0, 1), cards("0", "1", "2", "3", "4"))], launch__learners=2, critic__ranks=2, launch__generators=1
    )
    assert found["learner-1"] == ("0,1", "1") and found["critic-1"] == ("2,3", "1")


def test_ranks_of_several_machines_see_those_of_their_own() -> None:
    hosts = [Host(name, (0, 1), cards("0", "1"), address) for name, address in (("", "10.0.0.1"), ("n2", "10.0.0.2"))]
    assert environments(hosts, launch__learners=3, launch__generators=1) == {
        "learner-0": ("0,1", "0"),
        "learner-1": ("0,1", "1"),
        "learner-2": ("0", "0"),
        "generator-0": ("1", "0"),
    }


def test_a_process_sees_one_mig_instance() -> None:
    hosts = [Host("", (0, 1), cards("MIG-a", "MIG-b", "MIG-c"))]
    found = environments(hosts, launch__learners=2, launch__generators=1)
    assert found == {"learner-0": ("MIG-a", "0"), "learner-1": ("MIG-b", "0"), "generator-0": ("MIG-c", "0")}


def test_a_rank_uses_the_gpu_that_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert own_device(rank=5) == torch.device("cuda", 1)
    monkeypatch.delenv("LOCAL_RANK")
    assert own_device(rank=5) == torch.device("cuda", 2), "outside of a launcher all see the same"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert own_device(rank=5) == torch.device("cpu")


ROLES = ("generator", "learner", "critic", "reward_model")
POOLS = {
    "placement__pools": {"gen": "8 x gpu", "train": {"nodes": 2, "gpus": 4}},
    "placement__roles": {"generator": "gen", "learner": "train"},
}


def host(name: str, *, cpus: int = 2, gpus: int = 0, pool: str = "") -> Host:
    cards = tuple(Gpu(str(number)) for number in range(gpus))
    return Host(name, tuple(range(cpus)), cards, f"10.0.0.{len(name)}", pool)


def config_of(generators: int, learners: int, **others: Any) -> Config:
    return small_config(
        launch__generators=generators, launch__learners=learners, replay__groups_per_step=4 * learners, **others
    )


def placed(placement: Placement) -> dict[str, list[str]]:
    """The hosts of the processes of each role."""
    return {role: [resources.host for resources in placement.of(role)] for role in ROLES if placement.of(role)}


def test_cores_of_several_hosts_are_dealt_learners_first() -> None:
    hosts = [host(""), host("n1"), host("n2"), host("n3")]
    placement = place_roles(config_of(2, 2), hosts=hosts)
    assert placed(placement) == {"learner": ["", "n1"], "generator": ["n2", "n3"]}
    assert placement.generators[0].cpus == (0, 1) and placement.generators[0].threads == 2
    assert placement.replay.host == ""


def test_a_gpu_for_each_process_and_learner_ranks_host_by_host() -> None:
    placement = place_roles(config_of(3, 3), hosts=[host("", gpus=2), host("n1", gpus=2), host("n2", gpus=2)])
    assert placed(placement) == {"learner": ["", "", "n1"], "generator": ["n1", "n2", "n2"]}
    devices = [device for role in ROLES for resources in placement.of(role) for device in resources.devices]
    assert len(set(devices)) == 6
    assert placement.sends_between_gpus


def test_the_gpus_of_a_generator_are_of_one_host() -> None:
    hosts = [host("", gpus=4, cpus=8), host("n1", gpus=4, cpus=8), host("n2", gpus=4, cpus=8)]
    config = config_of(4, 3, generator__tensor_parallel=2)
    placement = place_roles(config, hosts=hosts)  # one GPU is left on the first host
    assert placed(placement) == {"learner": ["", "", ""], "generator": ["n1", "n1", "n2", "n2"]}
    assert [resources.gpus for resources in placement.generators] == 2 * [("0", "1"), ("2", "3")]
    assert placement.sends_between_gpus
    taken = [*placement.learners, *placement.generators[:2], placement.generators[3]]
    room = find_room(config, "generator", hosts, taken)
    assert room is not None and (room.host, room.gpus) == ("n2", ("0", "1"))
    assert find_room(config, "generator", hosts, [*taken, room]) is None
    learner = find_room(config, "learner", hosts, [*taken, room])
    assert learner is not None and (learner.host, learner.gpus) == ("", ("3",))


def test_pools_say_which_hosts_a_role_gets() -> None:
    hosts = [host("", gpus=0), *(host(f"t{n}", gpus=4, pool="train") for n in (1, 2)), host("g", gpus=8, pool="gen")]
    placement = place_roles(config_of(8, 8, **POOLS), hosts=hosts)
    assert placed(placement) == {"learner": ["t1"] * 4 + ["t2"] * 4, "generator": ["g"] * 8}
    assert [resources.gpus for resources in placement.learners[:4]] == [("0",), ("1",), ("2",), ("3",)]


def test_a_pool_without_a_host_is_named() -> None:
    with pytest.raises(ConfigError, match=r"placement.roles: pool 'gen' of generator has no host"):
        place_roles(config_of(1, 1, **POOLS), hosts=[host(""), host("t1", gpus=4, pool="train")])


@pytest.mark.parametrize(
    ("pools", "roles", "text"),
    [
        ({"gen": "many"}, {}, r"pools.gen = 'many': must be N x gpu"),
        ({"gen": {}}, {}, "has neither nodes nor gpus"),
        ({"gen": "8 x gpu"}, {"generator": "gen"}, "roles lacks learner"),
        (
            {"gen": "8 x gpu"},
            {"generator": "gone", "learner": "gen"},
            r"roles.generator = 'gone': unknown pool; placement.pools has gen",
        ),
        ({"gen": "8 x gpu", "idle": "1 x gpu"}, {"generator": "gen", "learner": "gen"}, "pools.idle: no role is in it"),
        ({"gen": "8 x gpu"}, {"generator": "gen", "learner": "gen", "replay": "gen"}, "replay"),
    ],
)
def test_wrong_placements_are_refused(pools: dict[str, Any], roles: dict[str, str], text: str) -> None:
    with pytest.raises((ConfigError, ValueError), match=text):
        small_config(placement__pools=pools, placement__roles=roles)


@settings(max_examples=200, deadline=None)
@given(
    cpus=st.lists(st.integers(1, 8), min_size=1, max_size=5),
    gpus=st.lists(st.integers(0, 4), min_size=5, max_size=5),
    generators=st.integers(1, 9),
    learners=st.integers(1, 4),
    reward_model=st.booleans(),
)
def test_every_process_has_a_place(
    cpus: list[int], gpus: list[int], generators: int, learners: int, reward_model: bool
) -> None:
    hosts = [host(f"n{n}" if n else "", cpus=own, gpus=gpus[n]) for n, own in enumerate(cpus)]
    cards = sum(len(one.gpus) for one in hosts)
    config = config_of(generators, learners)
    if 0 < cards < learners:
        with pytest.raises(ConfigError, match=r"launch.learners = "):
            place_roles(config, reward_model=reward_model, hosts=hosts)
        return
    placement = place_roles(config, reward_model=reward_model, hosts=hosts)
    by_name = {one.name: one for one in hosts}
    processes = [resources for role in ROLES for resources in placement.of(role)]
    assert len(processes) == generators + learners + reward_model
    for resources in processes:
        assert resources.cpus and set(resources.cpus) <= set(by_name[resources.host].cpus)
        assert len(resources.gpus) == min(1, len(by_name[resources.host].gpus))
    if cards >= len(processes):
        assert max(Counter(device for resources in processes for device in resources.devices).values()) == 1
    ranks = [hosts.index(by_name[resources.host]) for resources in placement.learners]
    assert ranks == sorted(ranks), "learner ranks are numbered host by host"


def taken(placement: Placement, hosts: Sequence[Host]) -> list[Any]:
    names = {one.name for one in hosts}
    return [own for role in ROLES for own in placement.of(role) if own.host in names]


def test_a_role_of_a_lost_host_goes_where_there_is_room() -> None:
    hosts = [host("", gpus=2), host("n1", gpus=2), host("n2", gpus=2)]
    config = config_of(2, 2)
    placement = place_roles(config, hosts=hosts)
    assert placed(placement) == {"learner": ["", ""], "generator": ["n1", "n1"]}
    left = [hosts[0], hosts[2]]
    room = find_room(config, "generator", left, taken(placement, left))
    assert room is not None and (room.host, room.gpus) == ("n2", ("0",))
    other = find_room(config, "generator", left, [*taken(placement, left), room])
    assert other is not None and (other.host, other.gpus) == ("n2", ("1",))
    assert find_room(config, "generator", left, [*taken(placement, left), room, other]) is None


def test_without_gpus_the_least_loaded_host_of_the_pool_gets_it() -> None:
    pools = {"placement__pools": {"a": {"nodes": 1}, "b": {"nodes": 2}}}
    config = config_of(2, 1, placement__roles={"generator": "b", "learner": "a"}, **pools)
    hosts = [host("", cpus=8), host("a1", pool="a"), host("b1", pool="b"), host("b2", cpus=4, pool="b")]
    placement = place_roles(config, hosts=hosts)
    room = find_room(config, "generator", hosts[:3], taken(placement, hosts[:3]))
    assert room is not None and room.host == "b1"
    assert find_room(config, "learner", hosts[2:], []) is None
