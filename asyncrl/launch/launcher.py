"""The seam for launchers: what the supervisor needs to run roles on hosts.

`local.py` has the launcher of this machine and the table of launchers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

from asyncrl.config import Config
from asyncrl.launch.resources.hosts import Host, RoleResources
from asyncrl.launch.worker import RoleSpec

HOST_LOST = 120
"""The exit code of a role whose host is gone: nobody knows how the process ended, or whether it did."""


class RoleHandle(Protocol):
    """A role that was started on a host."""

    @property
    def spec(self) -> RoleSpec:
        """The spec that it was started with."""
        ...

    @property
    def name(self) -> str:
        """Its name, with the host unless that is the launcher's own: `generator-1@n2`."""
        ...

    @property
    def code(self) -> int | None:
        """Its exit code, negative for a signal, or HOST_LOST; None while it runs, and while its host is only silent.
        Never blocks."""
        ...

    @property
    def place(self) -> str:
        """The process or step that it runs as, for errors: `process 123`."""
        ...

    def cause(self) -> str:
        """Returns why it ended, in one sentence without secrets."""
        ...


class Launcher(ABC):
    """Starts roles on hosts. No method but `acquire`, `wait`, `kill` and `end` blocks.

    A launcher of one's own is a subclass, or one of `LocalLauncher`, without parameters.
    """

    def acquire(self, config: Config) -> None:
        """Gets the hosts of the run. Raises ConfigError if they cannot be had: each pool that lacks some, what it asks
        for and what there is."""
        return

    preemptible = False
    """True if the hosts are lent for a time: SIGUSR1 announces its end, after which the run continues by `requeue`, and
    SIGTERM leaves only seconds."""

    @abstractmethod
    def hosts(self) -> list[Host]:
        """Returns the hosts that are there now, the launcher's own first. A host that is lost is missing; new ones may
        appear."""

    @abstractmethod
    def start(self, spec: RoleSpec, resources: RoleResources) -> RoleHandle:
        """Starts a role on the host `spec.host`, without waiting until it is up. If it cannot be started there, its
        handle says so by an exit code."""

    @abstractmethod
    def wait(self, roles: Sequence[RoleHandle], timeout_s: float) -> list[RoleHandle]:
        """Waits for roles to end. Returns those still running after `timeout_s`."""

    @abstractmethod
    def kill(self, roles: Sequence[RoleHandle], *, show_stacks: bool = False) -> list[RoleHandle]:
        """Kills roles with their children. With `show_stacks` they first write the stacks of their threads. Returns
        those that are not ended within a few seconds, other than those on lost hosts."""

    @abstractmethod
    def end(self, *, grace_s: float) -> list[RoleHandle]:
        """Ends all roles with their children: asks them to stop, and kills those still running after `grace_s`. Returns
        those that do not end."""

    def resize(self, generators: int) -> str:
        """Asks for hosts for this number of generators, if it can get more. Returns at once what it waits for, empty if
        nothing more will appear in `hosts`. Called again until there is room for all, or nothing to wait for."""
        return ""

    def requeue(self) -> None:
        """Asks for the hosts again, on which the run then resumes. Raises RunError if that is refused."""
        return

    def describe(self) -> dict[str, str]:
        """Returns what a user may want to know of it, such as a dashboard's address and a job's id."""
        return {}

    def close(self) -> None:
        """Releases the hosts. All roles have ended."""
        return
