"""Roles that are started and restarted together."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

from asyncrl.launch.local import LocalLauncher, RoleProcess
from asyncrl.launch.resources import Share
from asyncrl.launch.restarts import RestartHistory
from asyncrl.launch.role import FINAL_CODES, RoleSpec

SETTLED_S = 30.0
"""A role that has worked for so long since its start fell for a new reason."""
NUMBER = re.compile(r"0x[0-9a-f]+|\d+")
"""Process ids, ports, addresses and sizes in a reason, which may be others the next time."""
UNHEARD = ("reward_model",)
"""Roles that do not speak to the replay queue: who lives works."""


@dataclass(slots=True)
class Unit:
    """A generator, the replay queue, the reward model, or all learner and critic ranks."""

    name: str
    members: list[tuple[RoleSpec, Share]]
    history: RestartHistory
    processes: list[RoleProcess] = field(default_factory=list[RoleProcess])
    starts: int = 0
    started_s: float = 0.0
    due_s: float | None = 0.0
    """When it is to be started; None while it is."""
    up: bool = False
    """It was heard since its start."""
    worked: bool = False
    """It did since its start what it is there for."""
    heard_s: float = 0.0
    session: str = ""
    """What the replay queue calls the start of the generator that it heard last."""
    former_session: str = ""
    """That of the starts before this one."""
    proven: bool = False
    """A start of it has worked."""
    former_reason: str = ""
    """Why its start before this one fell, without its numbers."""
    fell_s: float | None = None
    """When a process of it was first seen to have died."""
    leaving_s: float | None = None
    """Since when it is not wanted any more."""

    @property
    def role(self) -> str:
        return self.members[0][0].role

    @property
    def index(self) -> int:
        return self.members[0][0].index

    @property
    def running(self) -> bool:
        """It has processes, and all are alive."""
        return self.due_s is None and bool(self.processes) and all(process.code is None for process in self.processes)

    def start(self, launcher: LocalLauncher, now_s: float) -> None:
        self.processes = [launcher.start(replace(spec, start=self.starts), share) for spec, share in self.members]
        self.starts += 1
        self.started_s = now_s
        self.due_s = self.fell_s = None
        self.up = self.worked = False
        self.former_session = self.session

    def ended(self, codes: tuple[int, ...] = ()) -> RoleProcess | None:
        """The first process that ended with an exit code other than these."""
        return next((role for role in self.processes if role.code is not None and role.code not in codes), None)

    def failed(self) -> RoleProcess | None:
        """The first process that ended with an error which a restart would only repeat."""
        return next((role for role in self.processes if role.code in FINAL_CODES), None)

    def kill(self, launcher: LocalLauncher, *, show_stacks: bool = False) -> list[RoleProcess]:
        """Ends its processes; returns those that do not die."""
        processes, self.processes = self.processes, []
        return launcher.kill(processes, show_stacks=show_stacks)

    def repeats(self, reason: str, now_s: float) -> bool:
        """True if it falls for the same reason as the time before, and no start of it has ever worked: nothing speaks
        for another one."""
        self.proven = self.proven or self._works(now_s)
        alike = NUMBER.sub("#", reason)
        again = not self.proven and alike == self.former_reason
        self.former_reason = alike
        return again

    def delay_s(self, now_s: float) -> float | None:
        """Counts a restart and gives the pause before it; None when there may be no more."""
        settled = self._works(now_s) and now_s - self.started_s > SETTLED_S
        return self.history.next(now_s, settled=settled)

    def _works(self, now_s: float) -> bool:
        return self.worked or (self.role in UNHEARD and now_s - self.started_s > SETTLED_S)
