"""The addresses of a run while it is running."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from asyncrl.config import Config
from asyncrl.errors import ConfigError
from asyncrl.launch.resources.placement import check_host, reserve_ports
from asyncrl.wire.curve_keys import is_loopback, new_keys
from asyncrl.wire.endpoints import Endpoints
from asyncrl.wire.socket_folder import socket_folder
from asyncrl.wire.sockets import IPC

RUN_ID_BYTES = 16
"""Random bytes: knowledge of the run id authenticates a process as part of the run."""


@contextmanager
def run_endpoints(config: Config, *, reward_model: bool = False) -> Iterator[Endpoints]:
    """Yields addresses for all roles of a run, with a new run id; valid inside the block.

    On a loopback `launch.address`, ZeroMQ uses unix sockets in a folder that only this user can enter; on any other
    address it uses ports, encrypted with new keys. Raises ConfigError when the host cannot be bound, when a
    port is taken or has no effect, and when the socket folder cannot be created.
    """
    host, first_port = config.launch.host, config.launch.port
    check_host(host)
    critics = [f"critic-{rank}" for rank in range(config.critic.ranks)]
    names = ["replay", "weights", "learners", *critics]
    names += ["critic-ranks"] if critics else []
    names += ["reward-model"] if reward_model else []
    with ExitStack() as stack:
        if is_loopback(host):
            if first_port:
                raise ConfigError(
                    f"launch.address = {config.launch.address!r}: a port has no effect on a loopback address, where "
                    "the roles listen on unix sockets; leave it out, or use an address that other machines reach"
                )
            folder, keys = str(stack.enter_context(socket_folder())), ""
            addresses = {name: f"{IPC}{folder}/{name}" for name in names}
        else:
            ports = reserve_ports(first_port, len(names), host=host)
            folder, keys = "", new_keys()
            addresses = {name: f"tcp://{host}:{port}" for name, port in zip(names, ports, strict=True)}
        yield Endpoints(
            f"{config.run}-{secrets.token_hex(RUN_ID_BYTES)}",
            replay=addresses["replay"],
            weights=addresses["weights"],
            learners=addresses["learners"],
            host=host,
            reward_model=addresses.get("reward-model", ""),
            critics=tuple(addresses[name] for name in critics),
            critic_ranks=addresses.get("critic-ranks", ""),
            folder=folder,
            keys=keys,
        )
