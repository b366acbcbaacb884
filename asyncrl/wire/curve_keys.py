"""The CURVE keys of a run whose sockets leave this machine: one pair for servers, one for clients.

New keys are generated for each launch. They are part of the run's endpoints: roles read them from standard input, and
commands on a running run from `endpoints.json`, which only its owner can read.
"""

from __future__ import annotations

import ipaddress
import json
from dataclasses import asdict, dataclass
from typing import Any

import zmq

from asyncrl.errors import ConfigError
from asyncrl.util.redaction import keep_secret

KEY_CHARACTERS = 40
"""Length of a CURVE key as Z85 text."""


@dataclass(frozen=True, slots=True)
class Keys:
    """Two CURVE key pairs as Z85 text."""

    server_public: str
    server_secret: str
    client_public: str
    client_secret: str


def is_loopback(host: str) -> bool:
    """True if data sent to this IP address stays on the machine."""
    return ipaddress.ip_address(host).is_loopback


def new_keys() -> str:
    """Returns new keys as JSON text, the form that endpoints hold."""
    return json.dumps(asdict(Keys(*(key.decode() for _ in ("server", "client") for key in zmq.curve_keypair()))))


def read_keys(text: str) -> Keys:
    """Returns the keys of a text by `new_keys`; logs redact them from now on. Raises ConfigError if it is malformed."""
    try:
        values: Any = json.loads(text)
    except ValueError:
        values = None
    names = list(Keys.__slots__)
    if (
        not isinstance(values, dict)
        or sorted(values) != sorted(names)
        or not all(isinstance(key, str) and len(key) == KEY_CHARACTERS for key in values.values())
    ):
        raise ConfigError(f"the run's keys are not the JSON of {', '.join(names)}; start the run again to get new ones")
    keys = Keys(**values)
    for secret in (keys.server_secret, keys.client_secret):
        keep_secret(secret)
    return keys
