"""The forms of `launch.address`."""

from __future__ import annotations

import re
from ipaddress import IPv4Address, IPv4Network

LAST_PORT = 65535
INTERFACE = re.compile(r"[^\s/:]{1,15}")
"""The names that Linux allows for network interfaces, but those with a colon."""
NUMBERS = re.compile(r"[0-9.]+")


def split_address(address: str) -> tuple[str, int]:
    """Returns host and port of HOST or HOST:PORT; the port is 0 if there is none. Raises ValueError."""
    if address.count(":") > 1:
        raise ValueError(
            "runs do not use IPv6; give an IPv4 address, or an interface (eth0) or network (10.0.0.0/8) with one"
        )
    host, _, port = address.partition(":")
    port = port if ":" in address else "0"
    if not host or not port.isascii() or not port.isdigit() or int(port) > LAST_PORT:
        raise ValueError(f"must be HOST or HOST:PORT with a port of at most {LAST_PORT}, such as 10.0.0.5:29500")
    return host, int(port)


def parse_host(host: str) -> IPv4Address | IPv4Network | str:
    """Returns what the host of `launch.address` names: an address, a network, or an interface. Raises ValueError."""
    if NUMBERS.fullmatch(host):
        try:
            return IPv4Address(host)
        except ValueError as error:
            raise ValueError(f"not an IPv4 address ({error})") from None
    if "/" in host:
        try:
            network = IPv4Network(host, strict=False)
        except ValueError as error:
            raise ValueError(f"not an IPv4 network such as 10.0.0.0/8 ({error})") from None
        if IPv4Address(host.partition("/")[0]) != network.network_address:
            raise ValueError(f"not a network, but an address with a prefix; its network is {network}")
        return network
    if not INTERFACE.fullmatch(host):
        raise ValueError(
            "neither an IPv4 address, nor a network such as 10.0.0.0/8, nor the name of an interface, which has at "
            "most 15 characters; host names are not looked up"
        )
    return host
