"""The addresses and ports that the roles of a run listen on."""

from __future__ import annotations

import os
import random
import socket
from ipaddress import IPv4Address, IPv4Network

import psutil

from asyncrl.config.addresses import parse_host
from asyncrl.errors import ConfigError
from asyncrl.wire.endpoints import LOOPBACK

OWN_PORTS = range(20000, 32000)
"""Range to search for free ports, below the ports that Linux assigns to outgoing connections (32768 and up)."""

ANY_PORT = 9


def resolve_host(host: str, *, machine: str = "this machine") -> str:
    """Returns the IPv4 address that the host of `launch.address` names on this machine, which errors call `machine`:
    the only address of an interface or in a network; an address is returned as it is. Raises ConfigError."""
    key = f"launch.address = {host!r}"
    try:
        named = parse_host(host)
    except ValueError as error:
        raise ConfigError(f"{key}: {error}") from None
    if isinstance(named, IPv4Address):
        return host
    own = _own_addresses()
    if isinstance(named, IPv4Network):
        fitting = {address: name for address, name in own.items() if IPv4Address(address) in named}
        lack = f"{machine} has no address in this network"
    else:
        fitting = {address: name for address, name in own.items() if name.partition(":")[0] == named}
        exists = named in (name for _, name in socket.if_nameindex())
        lack = f"{machine} has no {'IPv4 address on this interface' if exists else 'interface of this name'}"
    if not fitting:
        raise ConfigError(
            f"{key}: {lack}; it has {_listed(own)}; name an interface or a network (10.0.0.0/8) that every machine of "
            "the run has"
        )
    if len(fitting) > 1:
        raise ConfigError(
            f"{key}: {machine} has {len(fitting)} addresses there, {_listed(fitting)}; name a network that has only "
            "one of them"
        )
    return next(iter(fitting))


def address_beside(head: str, *, machine: str) -> str:
    """Returns the IPv4 address at which the other hosts of a run reach this machine, given the host of the launcher's
    `launch.address`: if that is an address, the own one on the interface that leads there. Raises ConfigError."""
    if (address := resolve_host(head, machine=machine)) != head:
        return address
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect((head, ANY_PORT))  # sends nothing
        except OSError as error:
            raise ConfigError(
                f"launch.address = {head!r}: {machine} has no way there ({error.strerror}); it has "
                f"{_listed(_own_addresses())}; name a network that all machines of the run are in"
            ) from None
        return sock.getsockname()[0]


def _own_addresses() -> dict[str, str]:
    """The interface of each IPv4 address of this machine; that of one with a label of its own is `eth0:label`."""
    return {
        one.address: name
        for name, addresses in psutil.net_if_addrs().items()
        for one in addresses
        if one.family is socket.AF_INET
    }


def _listed(own: dict[str, str]) -> str:
    return ", ".join(f"{name} ({address})" for address, name in own.items()) or "none with an IPv4 address"


def network_environment(host: str) -> dict[str, str]:
    """Returns the variables that make gloo and NCCL listen only on the network interface with this address, instead of
    the interface of the machine's host name. Variables that the user's environment sets are left out. Raises
    ConfigError if no interface has the address."""
    address = LOOPBACK if IPv4Address(host).is_loopback else host
    interface = _own_addresses().get(address)
    # With the equals sign, NCCL uses this interface only, not all interfaces with this prefix.
    wanted = {"GLOO_SOCKET_IFNAME": f"{interface}", "NCCL_SOCKET_IFNAME": f"={interface}"}
    left = {name: value for name, value in wanted.items() if not os.environ.get(name)}
    if left and interface is None:
        raise ConfigError(
            f"launch.address = {host!r}: no network interface of this machine has the address, so that gloo and NCCL "
            f"would listen elsewhere; use an address of one, or set {' and '.join(left)} to the interface"
        )
    return left


def check_interfaces(*, with_gpus: bool) -> None:
    """Raises ConfigError if a variable of the environment, as of a cluster's profile, tells gloo, or NCCL on a machine
    `with_gpus`, to listen on interfaces that this machine does not have."""
    names = [name for _, name in socket.if_nameindex()]
    for variable in ("GLOO_SOCKET_IFNAME", *(["NCCL_SOCKET_IFNAME"] if with_gpus else [])):
        value = os.environ.get(variable, "")
        wanted = value.removeprefix("=").split(",")
        is_prefix = variable.startswith("NCCL") and not value.startswith("=")
        if not value or (is_prefix and value.startswith("^")):  # NCCL: all but these
            continue
        if not any(name.startswith(one) if is_prefix else name == one for name in names for one in wanted):
            raise ConfigError(
                f"{variable} = {value!r} in the environment: this machine has no such network interface; it has "
                f"{_listed(_own_addresses())}; unset the variable, and launch.address chooses the interface"
            )


def listening_address(host: str) -> str:
    """Returns the IPv4 address that the host of `launch.address` names on this machine. Raises ConfigError unless other
    processes can connect to it."""
    address = resolve_host(host)
    key = f"launch.address = {host!r}"
    if IPv4Address(address).is_unspecified:
        raise ConfigError(f"{key}: means every address of this machine; name the address that the others can reach")
    if error := _taken(address, 0):
        raise ConfigError(f"{key}: cannot be listened on ({error}); this machine has {_listed(_own_addresses())}")
    network_environment(address)
    return address


def find_port(port: int = 0, *, host: str = LOOPBACK) -> int:
    """Returns the port if it is free at this address of this machine, or with 0 a free one.

    A free one is outside of the kernel's range for outgoing connections, which could otherwise use it before the role
    opens it. Raises ConfigError if the port is taken, and if none is free.
    """
    if port:
        if error := _taken(host, port):
            raise ConfigError(
                f"launch.address = '{host}:{port}': port {port} is taken ({error}); choose another one, or leave it "
                "out for a free one"
            )
        return port
    for candidate in random.Random().sample(OWN_PORTS, len(OWN_PORTS)):
        if not _taken(host, candidate):
            return candidate
    raise ConfigError(f"launch.address = {host!r}: none of the ports {OWN_PORTS[0]}-{OWN_PORTS[-1]} is free")


def _taken(host: str, port: int) -> str:
    """Returns why a port (0: any) of an address cannot be bound; empty if it can."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((host, port))
        except OSError as error:
            return error.strerror or str(error)
    return ""
