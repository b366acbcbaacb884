"""The assignment of GPUs to roles, and the roles that must not share one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.errors import ConfigError
from asyncrl.launch import machine as gpus
from asyncrl.launch.launcher import LocalLauncher
from asyncrl.launch.machine import Gpu, visible_gpus
from asyncrl.launch.placement import Host, Placement, RoleResources, check_transport, place_roles, refuse_joiner
from asyncrl.launch.supervisor import RestartHistory, RoleGroup
from asyncrl.launch.worker import RoleSpec
from asyncrl.learner.distributed import own_device
from tests.helpers.replay import loopback_endpoints, small_config


@pytest.fixture(autouse=True)
def torch_for_gpus_without_nvidia_smi(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "torch_is_cpu_build", lambda: False)
    monkeypatch.setattr(gpus, "_listed_gpus", lambda: None)


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
    listed = [gpus._Listed("0", "GPU-aa11", 80 << 30, "580.65"), gpus._Listed("1", "GPU-bb22", 40 << 30, "580.65")]
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


def test_gpus_that_cannot_be_used_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    show(monkeypatch, "3,3")
    with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES=3,3: names 3 twice"):
        visible_gpus()
    monkeypatch.setattr(gpus, "_listed_gpus", lambda: [gpus._Listed("0", "GPU-aa", 80 << 30, "550.54.15")])
    monkeypatch.setattr("importlib.metadata.version", lambda package: "13.0.96")
    show(monkeypatch, "0")
    with pytest.raises(ConfigError, match=r"driver is 550.54.15, but CUDA 13.0.96, .* needs 580 or newer"):
        visible_gpus()


def test_nvidia_smi_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.undo()
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho '0, GPU-aa11, 81559, 580.65.06'\necho '1, GPU-bb22, 143771, 580.65.06'\n")
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


@pytest.mark.parametrize(
    ("visible", "first", "settings", "reason"),
    [
        ("0,1,2", 1, {}, ""),
        ("0,1", 1, {}, "generator-1 would share GPU 1 with generator-0, and weights are sent between GPUs, which"),
        ("0,1", 1, {"weights__transport": "gloo"}, "generator-1 would share GPU 1 with generator-0, whose engine has"),
        ("0,1", 1, {"weights__transport": "gloo", "generator__kv_cache_bytes": 1 << 26}, ""),
        ("0", 1, {"generator__kv_cache_bytes": 1 << 26}, ""),
        ("0", 2, {}, ""),
    ],
)
def test_a_generator_joins_only_where_there_is_a_gpu_for_it(
    monkeypatch: pytest.MonkeyPatch, visible: str, first: int, settings: dict[str, object], reason: str
) -> None:
    show(monkeypatch, visible)
    config = small_config(launch__generators=first, **settings)
    wanted = place_roles(small_config(launch__generators=2, **settings))
    said = refuse_joiner(config, place_roles(config), wanted, 1)
    assert said.startswith(reason) and bool(said) == bool(reason)


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
