"""Role groups: the processes that are started and restarted together, their back-off and their stall detector."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from asyncrl.config import Config
from asyncrl.errors import RunError
from asyncrl.launch.launcher import Launcher, RoleHandle
from asyncrl.launch.resources.gpus import MIG
from asyncrl.launch.resources.hosts import RoleResources
from asyncrl.launch.worker import FINAL_CODES, RoleSpec

BACK_OFF_S = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
"""Pause before each consecutive restart; the last value holds for all later ones."""
RESTART_WINDOW_S = 600.0
"""Time that a restart counts against `launch.max_restarts`."""


class RestartHistory:
    """The restarts of one role group, and the back-off before the next."""

    def __init__(self, *, max_restarts: int, window_s: float = RESTART_WINDOW_S) -> None:
        self.total = 0
        self._max_restarts = max_restarts
        self._window_s = window_s
        self._times_s: list[float] = []
        self._in_a_row = 0

    def next(self, now_s: float, *, settled: bool) -> float | None:
        """Counts a restart and returns the seconds to wait before it; None when no more are allowed.

        `settled` says that the role worked well since its last start, which resets the back-off. Restarts without
        success in between count however long ago they were: a role that never comes up ends the run.
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
    """Detects stalls: no progress within `launch.progress_timeout_s`.

    Progress is a finished optimizer step, evaluation prompt or repeated step after a resume. While there is no batch
    for the learners, generated tokens count too: a step that waits for long completions does not hang. So do refunded
    groups, also those without a token: the replay queue ends a run of them, and names the reason.
    """

    def __init__(self, config: Config, now_s: float) -> None:
        self._config = config
        self._batch_groups = (config.replay.min_staleness + 1) * config.replay.groups_per_step
        """Finished groups that make a batch."""
        self._seen: tuple[Any, ...] = ()
        self._since_s = now_s
        self._missing_s = now_s
        """Time at which a role was last missing."""
        self._blamed: int | None = None
        """The step at which the learners were restarted for a stall."""

    def check(self, status: dict[str, Any], *, learners_started_s: float, missing: Sequence[str], now_s: float) -> str:
        """Returns why the learners must be restarted, or "". Raises RunError when a restart would not help."""
        # With a complete batch in the queue the learners are the ones to act.
        training = status["taken"] or status["finished"] >= self._batch_groups
        # A learner that shares its card waits for it with a batch in hand.
        waits = not training or self._config.launch.colocated
        generated = None
        if waits:
            tokens = sum(generator["tokens"] for generator in status["generators"].values())
            generated = tokens, sum(status["refunded"].values())
        again = (status["catching_up"] or {}).get("step")
        seen = status["step"], status["eval"]["prompts_done"], again, training, generated
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
"""A role that worked for this long after its start is taken to have failed for a new reason."""
MAX_ALIKE = 5
"""Failures for one reason and at one optimizer step after which a role is not started again."""
NUMBER = re.compile(r"0x[0-9a-f]+|\d+")
"""Process ids, ports, addresses and sizes in a reason, which may differ the next time."""
UNHEARD = ("reward_model",)
"""Roles without heartbeats; a live process counts as healthy."""


def with_peer_gpus(members: Sequence[tuple[RoleSpec, RoleResources]]) -> list[tuple[RoleSpec, RoleResources]]:
    """Returns the members with the GPUs of all ranks of their role on their machine visible to each, so that NCCL can
    copy directly from one to another; LOCAL_RANK says which is a rank's own. The ranks of one machine may be on several
    hosts of a launcher. A process sees one MIG instance only."""
    seen: dict[tuple[str, str], dict[str, None]] = {}
    for spec, resources in members:
        seen.setdefault((spec.role, spec.endpoints.host), {}).update(dict.fromkeys(resources.gpus))
    found = [(spec, resources, tuple(seen[spec.role, spec.endpoints.host])) for spec, resources in members]
    return [
        (spec, resources if any(gpu.startswith(MIG) for gpu in gpus) else replace(resources, visible_gpus=gpus))
        for spec, resources, gpus in found
    ]


@dataclass(slots=True)
class RoleGroup:
    """A generator, the replay queue, the reward model, or all learner and critic ranks."""

    name: str
    members: list[tuple[RoleSpec, RoleResources]]
    history: RestartHistory
    processes: list[RoleHandle] = field(default_factory=list[RoleHandle])
    starts: int = 0
    started_s: float = 0.0
    reported_s: float = 0.0
    """Time of its start, or of the last line that it is not up yet."""
    restart_at_s: float | None = 0.0
    """Time of the next start; None while the group is started."""
    healthy: bool = False
    """True once a heartbeat arrived since its start."""
    made_progress: bool = False
    """True once it did useful work since its start."""
    last_heartbeat_s: float = 0.0
    session: str = ""
    """The replay queue's id of the generator process that sent the last heartbeat."""
    former_session: str = ""
    """The session at the time of the last start."""
    proven: bool = False
    """True once any of its starts has worked."""
    former_reason: str = ""
    """The reason of its last failure, with the numbers replaced."""
    former_step: int | None = None
    """The optimizer step of the run at its last failure."""
    alike: int = 0
    """Its latest failures in a row that had one reason and came at one step."""
    died_s: float | None = None
    """Time at which a dead process of the group was first seen."""
    draining_since_s: float | None = None
    """Time since which the generator is asked to leave; None while it is wanted."""
    homeless_since_s: float | None = None
    """Time since which no host has room for a member whose host is gone."""

    @property
    def role(self) -> str:
        return self.members[0][0].role

    @property
    def index(self) -> int:
        return self.members[0][0].index

    @property
    def running(self) -> bool:
        """True if the group has processes and all are alive."""
        return (
            self.restart_at_s is None
            and bool(self.processes)
            and all(process.code is None for process in self.processes)
        )

    def start(self, launcher: Launcher, now_s: float) -> None:
        """Starts all processes of the group."""
        members = with_peer_gpus(self.members)
        self.processes = [launcher.start(self._spec(spec), resources) for spec, resources in members]
        self.starts += 1
        self.started_s = self.reported_s = now_s
        self.restart_at_s = self.died_s = None
        self.healthy = self.made_progress = False
        self.former_session = self.session

    def _spec(self, spec: RoleSpec) -> RoleSpec:
        epoch = self.starts if self.role == "learner" else 0
        return replace(spec, start=self.starts, endpoints=replace(spec.endpoints, epoch=epoch))

    def ended(self, codes: tuple[int, ...] = ()) -> RoleHandle | None:
        """The first process that exited with a code that is not in `codes`; None if there is none."""
        return next((role for role in self.processes if role.code is not None and role.code not in codes), None)

    def failed(self) -> RoleHandle | None:
        """The first process that exited with an error that a restart would only repeat; None if there is none."""
        return next((role for role in self.processes if role.code in FINAL_CODES), None)

    def kill(self, launcher: Launcher, *, show_stacks: bool = False) -> list[RoleHandle]:
        """Kills the processes of the group; returns those that do not die."""
        processes, self.processes = self.processes, []
        return launcher.kill(processes, show_stacks=show_stacks)

    def repeats(self, reason: str, step: int | None, now_s: float, *, by_chance: bool) -> str:
        """Counts a failure at this optimizer step of the run. Returns why another start would only repeat it, or "":
        the group failed for this reason the time before and no start has ever worked, unless that was `by_chance`; or
        it failed for it MAX_ALIKE times, however slowly, and the run made no step in between."""
        self.proven = self.proven or self._works(now_s)
        reason = NUMBER.sub("#", reason)
        again = reason == self.former_reason
        self.alike = self.alike + 1 if again and step == self.former_step else 1
        self.former_reason, self.former_step = reason, step
        if again and not self.proven and not by_chance:
            return "it has never worked and failed twice for this reason"
        if self.alike >= MAX_ALIKE:
            return f"it has failed {self.alike} times for this reason, and no optimizer step ended in between"
        return ""

    def delay_s(self, now_s: float) -> float | None:
        """Counts a restart and returns the pause before it; None when no more are allowed."""
        settled = self._works(now_s) and now_s - self.started_s > SETTLED_S
        return self.history.next(now_s, settled=settled)

    def _works(self, now_s: float) -> bool:
        return self.made_progress or (self.role in UNHEARD and now_s - self.started_s > SETTLED_S)
