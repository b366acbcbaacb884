"""The cores, threads, GPUs and ports of the roles."""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from asyncrl.config import Config
from asyncrl.errors import ConfigError
from asyncrl.launch import machine as gpus
from asyncrl.launch.bottleneck import generators_per_device
from asyncrl.launch.checks import with_start_deadline
from asyncrl.launch.machine import Gpu, check_interfaces, find_port, listening_address, network_environment
from asyncrl.launch.placement import place_roles
from tests.helpers.replay import small_config


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


@pytest.mark.parametrize(
    ("variable", "value", "with_gpus", "is_there"),
    [
        ("GLOO_SOCKET_IFNAME", "eth7", False, False),
        ("GLOO_SOCKET_IFNAME", "l", False, False),
        ("GLOO_SOCKET_IFNAME", "eth7,lo", False, True),
        ("NCCL_SOCKET_IFNAME", "eth7", True, False),
        ("NCCL_SOCKET_IFNAME", "=l", True, False),
        ("NCCL_SOCKET_IFNAME", "eth7,l", True, True),  # prefixes
        ("NCCL_SOCKET_IFNAME", "^docker", True, True),
        ("NCCL_SOCKET_IFNAME", "eth7", False, True),  # NCCL is not used
    ],
)
def test_an_interface_of_the_environment_that_is_not_there_is_named(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, with_gpus: bool, is_there: bool
) -> None:
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo")])
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv(variable, value)
    if is_there:
        check_interfaces(with_gpus=with_gpus)
        return
    with pytest.raises(ConfigError, match=rf"^{variable} = '{value}' in the environment: this machine has no such"):
        check_interfaces(with_gpus=with_gpus)


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
