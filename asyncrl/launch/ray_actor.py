"""The actor that holds resources of a Ray node and starts roles there, as its child processes."""

from __future__ import annotations

import asyncio
import os
import platform
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from asyncrl.launch.launcher import POLL_S, LocalLauncher, RoleProcess
from asyncrl.launch.machine import HostFacts, facts_of_this_host
from asyncrl.launch.placement import RoleResources
from asyncrl.launch.worker import RoleSpec

PASSED = ("ASYNCRL_", "GLOO_", "HF_", "NCCL_", "PYTHONPATH", "VLLM_", "WANDB_")
"""Prefixes of the launcher's variables that roles on other hosts get."""


class NodeLauncher(LocalLauncher):
    """Starts roles as children of an actor. Their environment does not show that they belong to Ray."""

    def __init__(self, passed: dict[str, str]) -> None:
        super().__init__()
        self._passed = passed

    def environment(self) -> dict[str, str]:
        return {name: value for name, value in os.environ.items() if not name.startswith("RAY_")} | self._passed


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

    async def describe(self, head: str, token: str) -> HostFacts:
        """Returns the facts of its node; `head` and `token` are those of `asyncrl.launch.machine`."""
        import ray

        facts = facts_of_this_host(head, Path(token), name=platform.node())
        if not ray.get_runtime_context().get_accelerator_ids().get("GPU"):
            facts = replace(facts, host=replace(facts.host, gpus=()))
        return facts

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
                role.process.send_signal(signal.SIGTERM)

    async def kill(self, keys: Sequence[int], *, show_stacks: bool) -> list[int]:
        """Kills roles with their children; a role that is not started yet will not be. Returns those that could not be
        killed."""
        roles = {key: self._roles[key] for key in keys if key in self._roles and key not in self._killed}
        self._killed.update(keys)
        immortal = self._launcher.kill(list(roles.values()), show_stacks=show_stacks)
        return [key for key, role in roles.items() if role in immortal]

    async def ping(self) -> None:
        """Shows that its node is alive."""
