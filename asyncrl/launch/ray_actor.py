"""The actor that holds resources of a Ray node and starts roles there, as its child processes."""

from __future__ import annotations

import asyncio
import os
import platform
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from asyncrl.errors import ConfigError
from asyncrl.launch.launcher import POLL_S, LocalLauncher, RoleProcess
from asyncrl.launch.machine import Gpu, package_versions, resolve_host, visible_gpus
from asyncrl.launch.placement import RoleResources
from asyncrl.launch.worker import RoleSpec

PASSED = ("ASYNCRL_", "GLOO_", "HF_", "NCCL_", "PYTHONPATH", "VLLM_", "WANDB_")
"""Beginnings of the names of the launcher's variables that roles on other hosts get."""
RoleFile = Literal["jsonl", "out"]


def passed_environment() -> dict[str, str]:
    """Returns the variables of this process that roles on other hosts get."""
    return {name: value for name, value in os.environ.items() if name.startswith(PASSED)}


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """The facts of a node, as its actor reports them."""

    node_id: str
    hostname: str
    address: str
    cpus: tuple[int, ...]
    """The cores that its process may use, whatever Ray reserved."""
    gpus: tuple[Gpu, ...]
    versions: dict[str, str]
    shares_run_dir: bool
    problem: str = ""
    """Why it has no address; empty if it has one."""


class NodeLauncher(LocalLauncher):
    """Starts roles as children of an actor. They get nothing that says they belong to Ray."""

    def __init__(self, passed: dict[str, str]) -> None:
        super().__init__()
        self._passed = passed

    def environment(self) -> dict[str, str]:
        """As `LocalLauncher.environment`."""
        own = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        return own | self._passed


class PoolActor:
    """Starts, monitors and ends roles on its node. All methods run on the thread of the actor's event loop, which lives
    as long as the actor: the kernel ends the children of a thread with it (PDEATHSIG)."""

    def __init__(self, folder: str, environment: dict[str, str]) -> None:
        """`folder` and `environment` are the launcher's working directory and its variables to pass on."""
        if Path(folder).is_dir():
            os.chdir(folder)
        self._launcher = NodeLauncher(environment)
        self._roles: dict[int, RoleProcess] = {}
        self._killed: set[int] = set()

    async def describe(self, token_file: str, token: str, network: str) -> NodeFacts:
        """Returns the facts of its node. The run folder is shared if `token_file`, which is next to it, has the token.
        The address is that on `network`, an interface or a network; without one it is that in the cluster."""
        import ray

        context, address, problem = ray.get_runtime_context(), "", ""
        try:
            address = resolve_host(network or ray.util.get_node_ip_address(), machine=platform.node())
        except ConfigError as error:
            problem = str(error)
        try:
            shares = Path(token_file).read_text() == token
        except OSError:
            shares = False
        gpus = tuple(visible_gpus()) if context.get_accelerator_ids().get("GPU") else ()
        return NodeFacts(
            context.get_node_id(),
            platform.node(),
            address,
            tuple(sorted(os.sched_getaffinity(0))),
            gpus,
            package_versions(),
            shares,
            problem,
        )

    async def run(self, key: int, spec: RoleSpec, resources: RoleResources) -> tuple[int, str]:
        """Starts a role unless one of this key was started; returns its exit code and cause when it has ended."""
        if key in self._killed:
            return -signal.SIGKILL, f"{spec.label} was killed before it started"
        role = self._roles.get(key)
        if role is None:
            role = self._roles[key] = self._launcher.start(spec, resources)
        while (code := role.code) is None:
            await asyncio.sleep(POLL_S)
        return code, role.cause()

    async def terminate(self, keys: Sequence[int]) -> None:
        """Asks roles to stop."""
        for key in keys:
            if (role := self._roles.get(key)) is not None and role.code is None:
                role.process.terminate()

    async def kill(self, keys: Sequence[int], *, show_stacks: bool) -> list[int]:
        """Kills roles with their children; a role that is not started yet will not be. Returns those that do not
        die."""
        roles = {key: self._roles[key] for key in keys if key in self._roles and key not in self._killed}
        self._killed.update(keys)
        immortal = self._launcher.kill(list(roles.values()), show_stacks=show_stacks)
        return [key for key, role in roles.items() if role in immortal]

    async def size(self, logs: str, name: str, file: RoleFile) -> int:
        """Returns the size of a role's log or output in bytes."""
        path = _path(logs, name, file)
        return path.stat().st_size if path.is_file() else 0

    async def read(self, logs: str, name: str, file: RoleFile, offset: int, max_bytes: int) -> bytes:
        """Returns bytes of a role's log or output; empty if there are none from `offset` on."""
        path = _path(logs, name, file)
        if not path.is_file():
            return b""
        with path.open("rb") as stream:
            stream.seek(offset)
            return stream.read(max_bytes)

    async def ping(self) -> None:
        """Answers."""


def _path(logs: str, name: str, file: RoleFile) -> Path:
    return Path(logs).expanduser() / f"{name}.{file}"
