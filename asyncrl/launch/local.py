"""Role processes on this machine: started, watched and ended by process id."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import structlog

from asyncrl.config import Config
from asyncrl.errors import ConfigError
from asyncrl.launch.fork_server import Forked, ForkServer, ForkServerError
from asyncrl.launch.placement import RoleResources, network_environment
from asyncrl.launch.worker import EXIT_DISK_FULL, SHOW_STACKS, RoleSpec
from asyncrl.observe.logs import last_error
from asyncrl.util.redaction import redact, redact_file
from asyncrl.util.user_code import resolve_function

log = structlog.get_logger()

POLL_S = 0.02
STACKS_S = 0.1
"""Time for a role that hangs to write where it hangs."""
KILL_S = 5.0
"""How long the kernel may take to end processes."""
REDACTED_BYTES = 64 << 20
"""A larger output is left as it is: to look for secrets in it would hold the launcher up."""


@dataclass(slots=True)
class RoleProcess:
    """A started role; its output other than the log goes to `logs/<role>.out`, where secrets show until it is ended."""

    spec: RoleSpec
    process: subprocess.Popen[bytes] | Forked
    output: IO[bytes]
    log_start_bytes: int = 0
    """Where the log of this start begins; what is before it was said by earlier ones."""
    output_start_bytes: int = 0

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def code(self) -> int | None:
        """Exit code, negative for a signal; None while it runs. Its number stays taken until it is killed: no other
        process can be hit by that."""
        if self.process.returncode is not None:
            return self.process.returncode
        ended = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return None
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status

    @property
    def output_file(self) -> Path:
        return self.spec.logs / f"{self.name}.out"

    def cause(self) -> str:
        """Why it ended, as far as its exit code and its log tell; secrets show as ***."""
        code = self.code
        if code is not None and code < 0:
            return f"{self.name} was killed by signal {signal.Signals(-code).name}"
        if code == 0:
            return f"{self.name} ended before the run did"
        said = last_error(self.spec.logs / f"{self.name}.jsonl", start_bytes=self.log_start_bytes)
        if not said:
            output = self.output_file.read_bytes()[self.output_start_bytes :].decode(errors="replace")
            lines = redact(output).strip().splitlines()
            said = lines[-1] if lines else "it said nothing"
        if code == EXIT_DISK_FULL:
            return (
                f"{self.name} ended: no space is left on the disk of {self.spec.logs.parent}; free some and go on with "
                f"`asyncrl launch --resume` ({said})"
            )
        return f"{self.name} ended with code {code}: {said}"

    def close(self) -> None:
        """Closes its output and takes the secrets out of it; the role must have ended."""
        self.output.close()
        file = self.output_file
        try:
            if (size := file.stat().st_size) > REDACTED_BYTES:
                log.warning("secrets are not taken out of a large output", file=str(file), bytes=size)
            else:
                redact_file(file)
        except OSError as error:
            log.warning("secrets are not taken out of an output", file=str(file), error=str(error))


class LocalLauncher:
    """Starts roles as processes in groups of their own, so that a terminal's Ctrl-C reaches the launcher only.

    The processes stay in the launcher's session: Linux schedules sessions against one another (autogroups), which can
    leave almost no time to a role that starts on a busy core.

    A launcher of the user's own is a subclass, whose processes are on this machine, too. With this in `polite.py`,
    `launch.cluster=polite.py:Polite` starts roles of low priority:

        class Polite(LocalLauncher):
            def start(self, spec, share):
                role = super().start(spec, share)
                os.setpriority(os.PRIO_PROCESS, role.process.pid, 10)
                return role
    """

    def __init__(self) -> None:
        self.roles: list[RoleProcess] = []
        self.fork_server: ForkServer | None = None
        """Roles without GPUs are forked from it; where there is none, each does its own imports."""

    def start(self, spec: RoleSpec, share: RoleResources) -> RoleProcess:
        log_file, path = spec.logs / f"{spec.name}.jsonl", spec.logs / f"{spec.name}.out"
        path.parent.mkdir(parents=True, exist_ok=True)
        output = path.open("ab")
        environment = {
            **os.environ,
            "TOKENIZERS_PARALLELISM": "false",
            **share.environment(),
            **network_environment(spec.endpoints.host),
        }
        process = self._fork(spec, share, environment, output) or subprocess.Popen(
            self.command(spec),
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            process_group=0,
        )
        assert process.stdin is not None
        with suppress(BrokenPipeError), process.stdin as pipe:  # one that died already says so by its exit code
            pipe.write(spec.to_json().encode())
        log_bytes = log_file.stat().st_size if log_file.exists() else 0
        role = RoleProcess(spec, process, output, log_bytes, output.tell())
        self.roles.append(role)
        log.info("role started", name=spec.name, start=spec.start, pid=process.pid, cpus=share.cpus, gpus=share.gpus)
        return role

    def _fork(
        self, spec: RoleSpec, share: RoleResources, environment: dict[str, str], output: IO[bytes]
    ) -> Forked | None:
        """The role forked from the fork server; None where it has to be started otherwise."""
        if self.fork_server is None or share.gpus:
            return None
        try:
            return self.fork_server.fork(self.command(spec)[1:], environment, output.fileno())
        except ForkServerError as error:
            log.warning("roles are started with imports of their own from here on", error=str(error))
            self.fork_server.close()
            self.fork_server = None
            return None

    def command(self, spec: RoleSpec) -> list[str]:
        """What is run for the role; it reads its spec from standard input."""
        return [sys.executable, "-m", "asyncrl.launch.worker", spec.name, str(os.getpid())]

    def of(self, role: str) -> list[RoleProcess]:
        return [process for process in self.roles if process.spec.role == role]

    def wait(self, roles: list[RoleProcess], timeout_s: float) -> list[RoleProcess]:
        """Waits for roles to end; gives those that did not within the time."""
        deadline_s = time.monotonic() + timeout_s
        while running := [role for role in roles if role.code is None]:
            if time.monotonic() >= deadline_s:
                return running
            time.sleep(POLL_S)
        return []

    def kill(self, roles: list[RoleProcess], *, show_stacks: bool = False) -> list[RoleProcess]:
        """Ends roles at once, with their children, and forgets them; on request they write first where they hang.

        Returns those that the kernel does not end within KILL_S, as they wait inside a driver or for a disk.
        """
        if show_stacks:
            for role in roles:
                if role.code is None:
                    role.process.send_signal(SHOW_STACKS)
            time.sleep(STACKS_S)
        for role in roles:
            self._kill_group(role)
        deadline_s, immortal = time.monotonic() + KILL_S, list[RoleProcess]()
        for role in list(roles):
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

    def end(self, *, grace_s: float) -> list[RoleProcess]:
        """Ends whatever still runs: a request first, after the grace the kernel; takes their children along. Returns
        those that `kill` does."""
        for role in self.roles:
            if role.code is None:
                role.process.terminate()
        late = self.wait(self.roles, grace_s)
        for role in late:
            log.warning("role did not stop in time and was killed", name=role.name, grace_s=grace_s)
        return self.kill(list(self.roles), show_stacks=bool(late))

    @staticmethod
    def _kill_group(role: RoleProcess) -> None:
        try:
            os.killpg(role.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return  # nobody of it is left


LAUNCHERS: dict[str, Callable[[], LocalLauncher]] = {"local": LocalLauncher}
"""Launchers by the name that `launch.cluster` gives them."""


def find_launcher(config: Config) -> Callable[[], LocalLauncher]:
    """Returns the class that `launch.cluster` names. Raises ConfigError as `resolve` does, and for anything but a
    LocalLauncher."""
    key, name = "launch.cluster", config.launch.cluster
    found = resolve_function(key, name, LAUNCHERS)
    if name not in LAUNCHERS and not (isinstance(found, type) and issubclass(found, LocalLauncher)):
        raise ConfigError(f"{key} = {name!r}: must be a subclass of asyncrl.launch.local.LocalLauncher")
    return found
