"""The roles of a run on several hosts: who goes where, and where those of a lost host go."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.config import Config
from asyncrl.errors import ConfigError
from asyncrl.launch.machine import Gpu
from asyncrl.launch.placement import Host, Placement, check_run_dir, find_room, place_roles, why_no_room
from tests.helpers.replay import small_config

ROLES = ("generator", "learner", "critic", "reward_model")
POOLS = {
    "placement__pools": {"gen": "8 x gpu", "train": {"nodes": 2, "gpus": 4}},
    "placement__roles": {"generator": "gen", "learner": "train"},
}


def host(name: str, *, cpus: int = 2, gpus: int = 0, pool: str = "", shares_run_dir: bool = True) -> Host:
    cards = tuple(Gpu(str(number)) for number in range(gpus))
    return Host(name, tuple(range(cpus)), cards, f"10.0.0.{len(name)}", pool, shares_run_dir)


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
        ({"gen": "8 x gpu"}, {"generator": "gone", "learner": "gen"}, r"roles.generator = 'gone': is not a pool.* gen"),
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


def test_learners_need_the_run_folder() -> None:
    hosts = [host("", cpus=1), host("apart", cpus=8, shares_run_dir=False)]
    config = config_of(2, 2)
    with pytest.raises(ConfigError, match=r"runs_dir = .*: apart does not share the run folder .* set runs_dir to a"):
        check_run_dir(config, place_roles(config, hosts=hosts), hosts)
    check_run_dir(config, place_roles(config, hosts=[host("")]), [host("")])


def test_generators_need_the_run_folder_where_their_weights_are_in_it() -> None:
    hosts = [host(""), host("apart", shares_run_dir=False)]
    files = config_of(1, 1, weights__transport="files")
    with pytest.raises(ConfigError, match=r"apart does not share the run folder .*, from which generators read the w"):
        check_run_dir(files, place_roles(files, hosts=hosts), hosts)
    elsewhere = config_of(1, 1, weights__transport="files", weights__url="/shared")
    check_run_dir(elsewhere, place_roles(elsewhere, hosts=hosts), hosts)
    assert find_room(files, "generator", hosts[1:], []) is None
    assert find_room(elsewhere, "generator", hosts[1:], []) is not None


@pytest.mark.parametrize("role", ["learner", "critic"])
def test_a_role_that_needs_the_run_folder_gets_a_host_that_shares_it(role: str) -> None:
    hosts = [host("n1"), host("apart", cpus=8, shares_run_dir=False)]
    busy = place_roles(config_of(1, 1), hosts=hosts[:1])
    room = find_room(config_of(1, 1), role, hosts, taken(busy, hosts))
    assert room is not None and room.host == "n1", "although the other one is less loaded"
    assert find_room(config_of(1, 1), role, hosts[1:], []) is None
    assert why_no_room(config_of(1, 1), role, hosts[1:], []).startswith("apart would have room, but does not share")
    assert find_room(config_of(1, 1), "generator", hosts[1:], []) is not None
    assert why_no_room(config_of(1, 1), "generator", hosts[1:], []) == ""
    full = [host("full", gpus=1, shares_run_dir=False)]
    assert why_no_room(config_of(1, 1), role, full, taken(place_roles(config_of(1, 1), hosts=full), full)) == ""
