"""Launchers: what the supervisor needs to run roles on hosts, and the launcher of this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

import msgspec
import structlog

from asyncrl.config.config import Config
from asyncrl.errors import ConfigError
from asyncrl.launch.fork_server import Forked, ForkServer, ForkServerError
from asyncrl.launch.machine import Host, listening_address, this_machine
from asyncrl.launch.placement import RoleResources
from asyncrl.launch.worker import EXIT_DISK_FULL, SHOW_STACKS, RoleSpec
from asyncrl.observe.logs import last_error
from asyncrl.util.processes import PYTHON
from asyncrl.util.text import redact, redact_file
from asyncrl.util.user_code import resolve_function
from asyncrl.wire.endpoints import LOOPBACK

log = structlog.get_logger()

HOST_LOST = 120
"""The exit code of a role whose host is lost: whether and how the process ended is unknown."""


class RoleHandle(Protocol):
    """A role that was started on a host."""

    @property
    def spec(self) -> RoleSpec: ...

    @property
    def name(self) -> str:
        """Its name, with the host unless that is the launcher's own: `generator-1@n2`."""
        ...

    @property
    def place(self) -> str:
        """The process or step that it runs as, for errors: `process 123`."""
        ...

    @property
    def code(self) -> int | None:
        """Its exit code, negative for a signal, or HOST_LOST; None while it runs or its host is only silent. Never
        blocks."""
        ...

    def cause(self) -> str:
        """Returns why it ended, in one sentence without secrets."""
        ...


class Launcher(ABC):
    """Starts roles on hosts. No method but `acquire`, `wait`, `kill` and `end` blocks. Custom launchers subclass this
    class or `LocalLauncher` and take no constructor arguments."""

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
        handle reports that by an exit code."""

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


POLL_S = 0.02
STACKS_S = 0.1
"""Time for a hanging role to write its stacks."""
KILL_S = 5.0
"""Deadline for the kernel to end processes."""
REDACTED_BYTES = 64 << 20
"""Maximum size of an output file in which secrets are redacted; a larger file would block the launcher too long."""


@dataclass(slots=True, eq=False)
class RoleProcess:
    """A started role. Its output other than the log is written to `logs/<role>.out`; secrets in it are redacted when
    the role has ended."""

    spec: RoleSpec
    process: subprocess.Popen[bytes] | Forked
    output: IO[bytes]
    log_start_bytes: int = 0
    """Offset of this start's entries in the log; earlier entries belong to earlier starts."""
    output_start_bytes: int = 0
    read_code: Callable[[int], int] = int
    """Returns the role's exit code from the process's, which may be a program that runs the role elsewhere."""

    @property
    def name(self) -> str:
        return self.spec.label

    @property
    def place(self) -> str:
        return f"process {self.process.pid}"

    @property
    def code(self) -> int | None:
        """Exit code, negative for a signal; None while it runs. Reading it does not reap the process: its process id
        stays reserved, so that a later kill cannot hit another process."""
        if self.process.returncode is not None:
            return self.read_code(self.process.returncode)
        ended = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return None
        return self.read_code(ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status)

    @property
    def output_file(self) -> Path:
        return self.spec.logs / f"{self.spec.name}.out"

    def cause(self) -> str:
        """Returns why it ended, according to its exit code, log and output; secrets are replaced by ***."""
        code = self.code
        if code is not None and code < 0:
            return f"{self.name} was killed by signal {signal.Signals(-code).name}"
        if code == HOST_LOST:
            return f"{self.name} is lost with its host"
        if code == 0:
            return f"{self.name} ended before the run did"
        text = last_error(self.spec.logs / f"{self.spec.name}.jsonl", start_bytes=self.log_start_bytes)
        if not text:
            output = self.output_file.read_bytes()[self.output_start_bytes :].decode(errors="replace")
            lines = redact(output).strip().splitlines()
            text = lines[-1] if lines else "no output"
        if code == EXIT_DISK_FULL:
            return (
                f"{self.name} ended: no space is left on the disk of {self.spec.logs.parent}; free some and continue "
                f"with `asyncrl launch --resume` ({text})"
            )
        return f"{self.name} ended with code {code}: {text}"

    def close(self) -> None:
        """Closes its output and redacts secrets in it. The role must have ended."""
        self.output.close()
        file = self.output_file
        try:
            if (size := file.stat().st_size) > REDACTED_BYTES:
                log.warning("secrets are not redacted in a large output file", file=str(file), bytes=size)
            else:
                redact_file(file)
        except OSError as error:
            log.warning("secrets are not redacted in an output file", file=str(file), error=str(error))


class LocalLauncher(Launcher):
    """Starts each role as a process of this machine, in a separate process group, so that a terminal's Ctrl-C reaches
    only the launcher.

    The processes stay in the launcher's session: Linux divides CPU time among sessions (autogroups), which can leave
    almost no time for a role that starts on a busy core.

    A user-defined launcher is a subclass, whose processes also run on this machine. With this in `polite.py`,
    `launch.cluster=polite.py:Polite` starts roles with low priority:

        class Polite(LocalLauncher):
            def start(self, spec, resources):
                role = super().start(spec, resources)
                os.setpriority(os.PRIO_PROCESS, role.process.pid, 10)
                return role
    """

    def __init__(self) -> None:
        self.address = LOOPBACK
        self.roles: list[RoleProcess] = []
        self.fork_server: ForkServer | None = None
        """Roles without GPUs are forked from it; if None, roles are started as subprocesses."""

    def acquire(self, config: Config) -> None:
        """Raises ConfigError if `launch.address` names no address of this machine."""
        self.address = listening_address(config.launch.host)

    def hosts(self) -> list[Host]:
        return [this_machine(self.address)]

    def start(self, spec: RoleSpec, resources: RoleResources) -> RoleProcess:
        log_file, path = spec.logs / f"{spec.name}.jsonl", spec.logs / f"{spec.name}.out"
        path.parent.mkdir(parents=True, exist_ok=True)
        output = path.open("ab")
        environment = {
            **self.environment(),
            "TOKENIZERS_PARALLELISM": "false",
            **resources.environment(),
        }
        process = self._fork(spec, resources, environment, output) or subprocess.Popen(
            self.command(spec),
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            env=environment,
            process_group=0,
        )
        assert process.stdin is not None
        with suppress(BrokenPipeError), process.stdin as pipe:  # the exit code shows that a role died already
            pipe.write(msgspec.json.encode(spec))
        log_bytes = log_file.stat().st_size if log_file.exists() else 0
        role = RoleProcess(spec, process, output, log_bytes, output.tell())
        self.roles.append(role)
        log.info(
            "role started", name=spec.name, start=spec.start, pid=process.pid, cpus=resources.cpus, gpus=resources.gpus
        )
        return role

    def _fork(
        self, spec: RoleSpec, resources: RoleResources, environment: dict[str, str], output: IO[bytes]
    ) -> Forked | None:
        """Returns the role forked from the fork server; None if it must be started as a subprocess."""
        if self.fork_server is None or resources.gpus or spec.host:
            return None
        try:
            return self.fork_server.fork(self.command(spec)[len(PYTHON) :], environment, output.fileno())
        except ForkServerError as error:
            log.warning("the fork server failed: roles are started as subprocesses", error=str(error))
            self.fork_server.close()
            self.fork_server = None
            return None

    def environment(self) -> dict[str, str]:
        """Returns the environment that roles inherit."""
        return dict(os.environ)

    def command(self, spec: RoleSpec) -> list[str]:
        """Returns the command of the role's process, which reads its spec from standard input."""
        return [*PYTHON, "-m", "asyncrl.launch.worker", spec.name, str(os.getpid())]

    def of(self, role: str) -> list[RoleProcess]:
        return [process for process in self.roles if process.spec.role == role]

    def wait(self, roles: Sequence[RoleHandle], timeout_s: float) -> list[RoleHandle]:
        deadline_s = time.monotonic() + timeout_s
        while running := [role for role in roles if role.code is None]:
            if time.monotonic() >= deadline_s:
                return running
            time.sleep(POLL_S)
        return []

    def kill(self, roles: Sequence[RoleHandle], *, show_stacks: bool = False) -> list[RoleHandle]:
        """Also removes them from `self.roles`. A process that does not end within KILL_S waits in a
        driver or for a disk."""
        killed = [role for role in self.roles if role in roles]
        if show_stacks:
            self.signal(killed, SHOW_STACKS)
            time.sleep(STACKS_S)
        for role in killed:
            self._kill_group(role)
        deadline_s, immortal = time.monotonic() + KILL_S, list[RoleHandle]()
        for role in killed:
            try:
                role.process.wait(max(0.0, deadline_s - time.monotonic()))
                role.close()
            except subprocess.TimeoutExpired:
                immortal.append(role)
                role.output.close()
                log.error("process does not die of SIGKILL", name=role.name, pid=role.process.pid, waited_s=KILL_S)
            self.roles.remove(role)
        if self.fork_server is not None:
            self.fork_server.reap()
        return immortal

    def end(self, *, grace_s: float) -> list[RoleHandle]:
        self.signal(self.roles, signal.SIGTERM)
        late = self.wait(self.roles, grace_s)
        for role in late:
            log.warning("role did not stop in time and was killed", name=role.name, grace_s=grace_s)
        return self.kill(list(self.roles), show_stacks=bool(late))

    def signal(self, roles: Sequence[RoleProcess], number: signal.Signals) -> None:
        """Sends a signal to the running roles."""
        for role in roles:
            if role.code is None:
                role.process.send_signal(number)

    @staticmethod
    def _kill_group(role: RoleProcess) -> None:
        try:
            os.killpg(role.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return  # the process group has ended


LAUNCHERS: dict[str, Callable[[], Launcher] | str] = {
    "local": LocalLauncher,
    "ray": "asyncrl.launch.ray_launcher:RayLauncher",
    "slurm": "asyncrl.launch.slurm:SlurmLauncher",
}
"""Launchers by their names in `launch.cluster`."""


def find_launcher(config: Config) -> Callable[[], Launcher]:
    """Returns the class that `launch.cluster` names. Raises ConfigError if it cannot be resolved or is not a subclass
    of Launcher."""
    key, name = "launch.cluster", config.launch.cluster
    launcher = resolve_function(key, name, LAUNCHERS)
    if name not in LAUNCHERS and not (isinstance(launcher, type) and issubclass(launcher, Launcher)):
        raise ConfigError(f"{key} = {name!r}: must be a subclass of asyncrl.launch.launcher.Launcher")
    return launcher
