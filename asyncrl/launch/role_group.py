"""Roles that are started and restarted together."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from asyncrl.config import Config
from asyncrl.errors import RunError
from asyncrl.launch.local import LocalLauncher, RoleProcess
from asyncrl.launch.placement import RoleResources
from asyncrl.launch.worker import FINAL_CODES, RoleSpec

BACK_OFF_S = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
"""Pause before each of the restarts that follow one another; the last one for all after it."""


class RestartHistory:
    """The restarts of one role."""

    def __init__(self, *, max_restarts: int, window_s: float) -> None:
        self.total = 0
        self._max_restarts = max_restarts
        self._window_s = window_s
        self._times_s: list[float] = []
        self._in_a_row = 0

    def next(self, now_s: float, *, settled: bool) -> float | None:
        """Counts a restart and gives the seconds to wait before it; None when there may be no more.

        `settled` says that the role worked well since its last start, so that the pauses begin anew. Restarts
        without that count however long ago they were: a role that never comes up ends the run.
        """
        if settled:
            self._in_a_row = 0
        self._times_s = [time_s for time_s in self._times_s if now_s - time_s <= self._window_s]
        if max(len(self._times_s), self._in_a_row) >= self._max_restarts:
            return None
        delay_s = BACK_OFF_S[min(self._in_a_row, len(BACK_OFF_S) - 1)]
        self._times_s.append(now_s)
        self._in_a_row += 1
        self.total += 1
        return delay_s


class Progress:
    """Watches for steps, evaluations and steps of a catch-up that end, and, while there is no batch for the
    learners, for generated tokens: a step whose completions take long is none that hangs."""

    def __init__(self, config: Config, now_s: float) -> None:
        self._config = config
        self._batch_groups = (config.replay.min_staleness + 1) * config.replay.groups_per_step
        """Finished groups that make a batch."""
        self._seen: tuple[Any, ...] = ()
        self._since_s = now_s
        self._missing_s = now_s
        """When something was last not up."""
        self._blamed: int | None = None
        """The step that the learners were restarted for."""

    def check(self, status: dict[str, Any], *, learners_started_s: float, missing: Sequence[str], now_s: float) -> str:
        """Why the learners must be started again, or nothing. Raises RunError when that would not help."""
        # A batch that lies there to be taken is the learners' turn, too.
        training = status["taken"] or status["finished"] >= self._batch_groups
        tokens = None if training else sum(generator["tokens"] for generator in status["generators"].values())
        again = (status["catching_up"] or {}).get("step")
        seen = status["step"], status["eval"]["prompts_done"], again, training, tokens
        if seen != self._seen:
            self._seen, self._since_s = seen, now_s
        launch = self._config.launch
        limit_s, since_s = launch.progress_timeout_s, max(self._since_s, learners_started_s)
        if missing:
            limit_s, self._missing_s = max(limit_s, launch.start_timeout_s), now_s
        if now_s - (since_s if missing else max(since_s, self._missing_s)) <= limit_s:
            return ""
        reason = (
            f"no optimizer step ended{'' if training else ', and no token was generated,'} within "
            f"launch.progress_timeout_s = {launch.progress_timeout_s:g} s: "
            + _describe(status)
            + (f"; not up: {', '.join(missing)}" if missing else "")
        )
        if not training or self._blamed == status["step"]:
            raise RunError(reason)
        self._blamed = status["step"]
        return reason


def _describe(status: dict[str, Any]) -> str:
    running = (
        f", evaluation of version {one['version']} at {one['done']} of {one['prompts']} prompts"
        for one in status["eval"]["running"]
    )
    return (
        f"step {status['step']}, {status['leased']} groups leased, {status['finished']} waiting for the learner"
        + "".join(running)
    )


SETTLED_S = 30.0
"""A role that has worked for so long since its start fell for a new reason."""
NUMBER = re.compile(r"0x[0-9a-f]+|\d+")
"""Process ids, ports, addresses and sizes in a reason, which may be others the next time."""
UNHEARD = ("reward_model",)
"""Roles that do not speak to the replay queue: who lives works."""


@dataclass(slots=True)
class RoleGroup:
    """A generator, the replay queue, the reward model, or all learner and critic ranks."""

    name: str
    members: list[tuple[RoleSpec, RoleResources]]
    history: RestartHistory
    processes: list[RoleProcess] = field(default_factory=list[RoleProcess])
    starts: int = 0
    started_s: float = 0.0
    restart_at_s: float | None = 0.0
    """When it is to be started; None while it is."""
    healthy: bool = False
    """It was heard since its start."""
    made_progress: bool = False
    """It did since its start what it is there for."""
    last_heartbeat_s: float = 0.0
    session: str = ""
    """What the replay queue calls the start of the generator that it heard last."""
    former_session: str = ""
    """That of the starts before this one."""
    proven: bool = False
    """A start of it has worked."""
    former_reason: str = ""
    """Why its start before this one fell, without its numbers."""
    died_s: float | None = None
    """When a process of it was first seen to have died."""
    draining_since_s: float | None = None
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
        return (
            self.restart_at_s is None
            and bool(self.processes)
            and all(process.code is None for process in self.processes)
        )

    def start(self, launcher: LocalLauncher, now_s: float) -> None:
        self.processes = [launcher.start(replace(spec, start=self.starts), share) for spec, share in self.members]
        self.starts += 1
        self.started_s = now_s
        self.restart_at_s = self.died_s = None
        self.healthy = self.made_progress = False
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
        return self.made_progress or (self.role in UNHEARD and now_s - self.started_s > SETTLED_S)
