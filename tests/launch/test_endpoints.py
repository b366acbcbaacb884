"""The endpoints of a run: unix sockets of its owner on one machine, encrypted ports on several."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from asyncrl.errors import ConfigError
from asyncrl.launch import run_dir as endpoints_module
from asyncrl.launch.run_dir import run_endpoints
from asyncrl.wire.curve_keys import read_keys
from asyncrl.wire.endpoints import Endpoints
from tests.helpers.replay import small_config

WITH_ALL = small_config(launch__learners=2, critic__ranks=2, algorithm__advantage="gae")


def all_addresses(endpoints: Endpoints) -> list[str]:
    stores = [endpoints.weights, endpoints.learners, endpoints.critic_ranks]
    return [endpoints.replay, endpoints.reward_model, *stores, *endpoints.critics]


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2"])
def test_on_one_machine_zeromq_listens_in_a_folder_of_the_owner(host: str) -> None:
    config = WITH_ALL.model_copy(update={"launch": WITH_ALL.launch.model_copy(update={"address": host})})
    with run_endpoints(config, reward_model=True) as endpoints:
        folder = Path(endpoints.folder)
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        addresses = all_addresses(endpoints)
        assert len(set(addresses)) == 7
        assert all(address.startswith(f"ipc://{folder}/") for address in addresses)
        assert (endpoints.host, endpoints.keys) == (host, "")
    assert not folder.exists()


def test_a_port_without_effect_is_refused() -> None:
    refused = pytest.raises(ConfigError, match=r"launch.address = '127.0.0.1:5555': a port has no effect on a loopback")
    with refused, run_endpoints(small_config(launch__address="127.0.0.1:5555")):
        pass


def test_on_other_addresses_zeromq_listens_on_encrypted_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints_module, "is_loopback", lambda host: False)
    with run_endpoints(WITH_ALL, reward_model=True) as endpoints:
        replay, *others = all_addresses(endpoints)
        assert replay.startswith("tcp://127.0.0.1:") and endpoints.folder == "" and endpoints.announces
        assert len(set(others)) == 6 and all(address.startswith("run:") for address in others)
        assert {endpoints.listening(address) for address in others} == {"tcp://127.0.0.1:*"}
        read_keys(endpoints.keys)


def test_a_run_has_only_needed_endpoints_and_a_random_id() -> None:
    with run_endpoints(small_config(run="one")) as endpoints, run_endpoints(small_config(run="one")) as others:
        assert (endpoints.reward_model, endpoints.critics) == ("", ())
        assert endpoints.folder != others.folder
        name, _, secret = endpoints.run_id.rpartition("-")
        assert name == "one" and len(secret) == 32 and secret not in others.run_id
