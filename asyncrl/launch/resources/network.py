"""The addresses and ports that the roles of a run listen on."""

from __future__ import annotations

import ipaddress
import os
import random
import socket

import psutil

from asyncrl.errors import ConfigError
from asyncrl.wire.endpoints import LOOPBACK

OWN_PORTS = range(20000, 32000)
"""Range to search for free ports, below the ports that Linux assigns to outgoing connections (32768 and up)."""


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
