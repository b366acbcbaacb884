"""The addresses of a run while it is running."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from asyncrl.config import Config
from asyncrl.errors import ConfigError
from asyncrl.launch.resources.network import find_port, listening_address
from asyncrl.wire.curve_keys import is_loopback, new_keys
from asyncrl.wire.endpoints import NAMED, Endpoints
from asyncrl.wire.socket_folder import socket_folder
from asyncrl.wire.sockets import IPC

RUN_ID_BYTES = 16
"""Random bytes: knowledge of the run id authenticates a process as part of the run."""


@contextmanager
def run_endpoints(config: Config, *, host: str = "", reward_model: bool = False) -> Iterator[Endpoints]:
    """Yields addresses for all roles of a run, with a new run id; valid inside the block. `host` is the address of the
    launcher's own host, by default that of `launch.address`.

    On a loopback address, ZeroMQ uses unix sockets in a folder that only this user can enter; on any other one it uses
    ports, encrypted with new keys. The port of the replay queue is chosen here, those of the other roles by the roles
    (`wire/directory.py`). Raises ConfigError when the host cannot be bound, when a port is taken or has no effect, and
    when the socket folder cannot be created.
    """
    host, port = listening_address(host or config.launch.host), config.launch.port
    critics = [f"critic-{rank}" for rank in range(config.critic.ranks)]
    names = ["replay", "weights", "learners", *critics]
    names += ["critic-ranks"] if critics else []
    names += ["reward-model"] if reward_model else []
    with ExitStack() as stack:
        if is_loopback(host):
            if port:
                raise ConfigError(
                    f"launch.address = {config.launch.address!r}: a port has no effect on a loopback address, where "
                    "the roles listen on unix sockets; leave it out, or use an address that other machines reach"
                )
            folder, keys = str(stack.enter_context(socket_folder())), ""
            addresses = {name: f"{IPC}{folder}/{name}" for name in names}
        else:
            port = find_port(port, host=host)
            folder, keys = "", new_keys()
            addresses = {name: f"{NAMED}{name}" for name in names} | {"replay": f"tcp://{host}:{port}"}
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
