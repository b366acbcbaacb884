"""Every socket of a run on one machine, and another user who knows where it is."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncrl.launch.run_dir import run_endpoints
from asyncrl.wire.endpoints import Endpoints
from asyncrl.wire.sockets import bind_router
from tests.helpers.replay import small_config

SOCKETS = ["replay", "weights", "learners", "critic-0", "critic-ranks", "reward-model"]
NOBODY = 65534


@pytest.fixture
def endpoints() -> Iterator[Endpoints]:
    config = small_config(launch__learners=1, critic__ranks=1, algorithm__advantage="gae")
    with run_endpoints(config, reward_model=True) as endpoints:
        yield endpoints


def call(paths: list[Path], user: int) -> list[str]:
    """Returns the outcome of a connection to each of the sockets by that user, in a forked process."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.setuid(user)
            os.write(write_end, "\n".join(map(connection, paths)).encode())
        finally:
            os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end) as answers:
        said = answers.read().split("\n")
    os.waitpid(child, 0)
    return said


def connection(path: Path) -> str:
    with socket.socket(socket.AF_UNIX) as caller:
        try:
            caller.connect(str(path))
        except OSError as error:
            return error.strerror or str(error)
    return "connected"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_another_user_reaches_no_socket(endpoints: Endpoints) -> None:
    addresses = [
        endpoints.replay, endpoints.weights, endpoints.learners, *endpoints.critics, endpoints.critic_ranks,
        endpoints.reward_model,
    ]  # fmt: skip
    paths = [Path(address.removeprefix("ipc://")) for address in addresses]
    assert [path.name for path in paths] == SOCKETS and {str(path.parent) for path in paths} == {endpoints.folder}
    routers = [bind_router(address, "socket") for address in addresses]
    try:
        assert call(paths, os.geteuid()) == ["connected"] * len(paths)
        assert call(paths, NOBODY) == ["Permission denied"] * len(paths)
    finally:
        for router in routers:
            router.close()
