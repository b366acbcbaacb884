"""Keeps the roles of a run alive: starts them, restarts those that died or hang, scales to the wanted generators."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import structlog

from asyncrl.config.config import Config
from asyncrl.errors import ConfigError, PeerTimeoutError, RunError
from asyncrl.launch.launcher import HOST_LOST, Launcher, RoleHandle
from asyncrl.launch.machine import MIG, Host
from asyncrl.launch.placement import Placement, RoleResources, find_room
from asyncrl.launch.worker import EXIT_CONFIG, EXIT_SILENT_PEER, EXIT_TERMINATED, FINAL_CODES, ROLES, RoleSpec
from asyncrl.observe.logs import last_phase
from asyncrl.replay.client import LauncherClient

log = structlog.get_logger()

BACK_OFF_S = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
"""Pause before each consecutive restart; the last value holds for all later ones."""
RESTART_WINDOW_S = 600.0
"""Time that a restart counts against `launch.max_restarts`."""
SETTLED_S = 30.0
"""A role without heartbeats that lived this long has worked."""
GRACE_S = 1.0
"""Time that the other ranks have, after a learner rank died, to report the cause."""
NOT_UP_EVERY_S = 60.0
"""Pause between two lines about a role that is alive but not up yet."""
NUMBER = re.compile(r"0x[0-9a-f]+|\d+")
"""Process ids, ports, addresses and sizes in a reason, which may differ the next time."""
UNHEARD = ("reward_model",)
"""Roles without heartbeats; a live process counts as healthy."""
TOGETHER = ("learner", "critic")
"""Roles whose ranks are restarted together: each rank waits for the others in every step."""
NOT_MISSED = ("generator", "reward_model")
"""Roles that are not restarted when nothing is left to generate."""
BY_CHANCE = (EXIT_SILENT_PEER, EXIT_TERMINATED, HOST_LOST, -signal.SIGKILL, -signal.SIGTERM)
"""Exit codes of roles that another process ended or did not answer: two in a row need not have the same cause."""


class RestartHistory:
    """The restarts of one role group, and the back-off before the next."""

    def __init__(self, *, max_restarts: int, window_s: float = RESTART_WINDOW_S) -> None:
        self.total = self._in_a_row = 0
        self._max_restarts = max_restarts
        self._window_s = window_s
        self._times_s: list[float] = []
        self._step: int | None = None

    def next(self, now_s: float, step: int | None) -> float | None:
        """Counts a restart at this optimizer step of the run and returns the seconds to wait before it; None when no
        more are allowed.

        A step since the last restart resets the back-off. Restarts without one count however long ago they were: a role
        that never comes up, or fails at the same step again and again, ends the run.
        """
        if step != self._step:
            self._step, self._in_a_row = step, 0
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
        launch = self._config.launch
        # With a complete batch in the queue the learners are the ones to act.
        training = status["taken"] or status["finished"] >= self._batch_groups
        generated = None
        if not training or launch.colocated:  # a learner that shares its GPU waits for it with a batch in hand
            tokens = sum(generator["tokens"] for generator in status["generators"].values())
            generated = tokens, sum(status["refunded"].values())
        repeated = (status["catching_up"] or {}).get("step")
        seen = status["step"], status["eval"]["prompts_done"], repeated, training, generated
        if seen != self._seen:
            self._seen, self._since_s = seen, now_s
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
        f", evaluation of version {running['version']} at {running['done']} of {running['prompts']} prompts"
        for running in status["eval"]["running"]
    )
    return (
        f"step {status['step']}, {status['leased']} groups leased, {status['finished']} waiting for the learner"
        + "".join(running)
    )


def with_peer_gpus(members: Sequence[tuple[RoleSpec, RoleResources]]) -> list[tuple[RoleSpec, RoleResources]]:
    """Returns the members with the GPUs of all ranks of their role on their machine visible to each, so that NCCL can
    copy directly from one to another; LOCAL_RANK tells which is a rank's own. The ranks of one machine may be on
    several hosts of a launcher. A process sees one MIG instance only."""
    gpus: dict[tuple[str, str], tuple[str, ...]] = {}
    for spec, resources in members:
        key = spec.role, spec.endpoints.host
        gpus[key] = tuple(dict.fromkeys((*gpus.get(key, ()), *resources.gpus)))
    return [
        (spec, resources if any(gpu.startswith(MIG) for gpu in seen) else replace(resources, visible_gpus=seen))
        for spec, resources in members
        for seen in [gpus[spec.role, spec.endpoints.host]]
    ]


@dataclass
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
    last_heartbeat_s: float = 0.0
    session: str = ""
    """The replay queue's id of the generator process that sent the last heartbeat."""
    former_session: str = ""
    """The session at the time of the last start."""
    proven: bool = False
    """True once any of its starts has worked."""
    former_reason: str = ""
    """The reason for its last failure, with the numbers replaced."""
    died_s: float | None = None
    """Time at which a dead process of the group was first seen."""
    draining_since_s: float | None = None
    """Time since which the generator is asked to leave; None while it is wanted."""
    homeless_since_s: float | None = None
    """Time since which no host has room for a member whose host is lost."""

    def __post_init__(self) -> None:
        self.role, self.index = self.members[0][0].role, self.members[0][0].index

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
        epoch = self.starts if self.role == "learner" else 0
        self.processes = [
            launcher.start(replace(spec, start=self.starts, endpoints=replace(spec.endpoints, epoch=epoch)), resources)
            for spec, resources in members
        ]
        self.starts += 1
        self.started_s = self.reported_s = now_s
        self.restart_at_s = self.died_s = None
        self.healthy = False
        self.former_session = self.session

    def ended(self, codes: tuple[int, ...] = ()) -> RoleHandle | None:
        """The first process that exited with a code that is not in `codes`; None if there is none."""
        return next((role for role in self.processes if role.code is not None and role.code not in codes), None)

    def repeats(self, reason: str, now_s: float) -> bool:
        """Records a failure. True if no start has ever worked and the group failed for this reason the time before."""
        self.proven |= self.role in UNHEARD and now_s - self.started_s > SETTLED_S
        again, self.former_reason = NUMBER.sub("#", reason) == self.former_reason, NUMBER.sub("#", reason)
        return again and not self.proven


class Placer:
    """The places of a run's roles on the hosts of its launcher. `say` tells the user of moves."""

    def __init__(
        self,
        config: Config,
        placement: Placement,
        spec: RoleSpec,
        launcher: Launcher,
        *,
        say: Callable[[str], None],
    ) -> None:
        """`spec` holds the fields that all roles have in common, as on the launcher's own host."""
        self._config = config
        self._own_address = spec.endpoints.host
        self._first = placement.generators
        """The resources of the generators at the start of the run."""
        self._launcher = launcher
        self._say = say

    def spec(self, spec: RoleSpec, resources: RoleResources, hosts: Sequence[Host]) -> RoleSpec:
        """Returns the spec of a role with these resources on one of these hosts."""
        address = self._own_address
        if resources.host:
            # One that is lost by now has no address: before the role starts, `has_hosts` looks again.
            address = next((host for host in hosts if host.name == resources.host), Host(resources.host, ())).address
        endpoints = replace(spec.endpoints, host=address)
        return replace(spec, cpus=resources.cpus, host=resources.host, endpoints=endpoints)

    def has_hosts(self, group: RoleGroup, groups: Sequence[RoleGroup], now_s: float) -> bool:
        """True if the host of each member of the group is there. A member whose host is lost is placed again, with the
        members of all `groups`; False while no host has room for it. Raises RunError when that lasts longer than
        `launch.start_timeout_s`."""
        if not any(resources.host for _, resources in group.members):
            return True
        hosts = self._launcher.hosts()
        names = {host.name for host in hosts}
        for number, (spec, resources) in enumerate(group.members):
            room: RoleResources | None = resources
            if resources.host not in names:
                members = [resources for other in groups for _, resources in other.members]
                taken = [resources for resources in members if resources.host in names]
                room = find_room(self._config, spec.role, hosts, taken)
                if room is None:
                    self._wait_for_room(group, f"{spec.name}, whose host {resources.host} is lost", now_s)
                    return False
                room = replace(room, gpu_memory_utilization=resources.gpu_memory_utilization)
                self._say(f"{spec.name} moves from {resources.host} to {room.host or 'the host of the launcher'}")
            group.members[number] = self.spec(spec, room, hosts), room
        group.homeless_since_s = None
        return True

    def joiners(
        self, indices: Sequence[int], groups: Sequence[RoleGroup], hosts: Sequence[Host]
    ) -> list[RoleResources]:
        """Returns the resources on these hosts of the generators that can join, in the order of their indices: each
        needs a free GPU where there are GPUs, or returns to the one that it shared at the start of the run."""
        taken = [resources for group in groups for _, resources in group.members]
        rooms: list[RoleResources] = []
        for index in indices:
            if room := find_room(self._config, "generator", hosts, [*taken, *rooms]):
                rooms.append(replace(room, gpu_memory_utilization=self._first[0].gpu_memory_utilization))
            elif index < len(self._first) and any(host.name == self._first[index].host for host in hosts):
                rooms.append(self._first[index])
            else:
                break
        return rooms

    def _wait_for_room(self, group: RoleGroup, what: str, now_s: float) -> None:
        if group.homeless_since_s is None:
            group.homeless_since_s = now_s
            self._say(f"no host has room for {what}; waiting for one")
        limit_s = self._config.launch.start_timeout_s
        if now_s - group.homeless_since_s > limit_s:
            raise RunError(f"no host had room for {what}, within launch.start_timeout_s = {limit_s:g} s")


class Supervisor:
    """The role groups of a run. `spec` holds the fields that all roles have in common.

    Methods take the current time as an argument. None of them blocks, except for a reply of the replay queue.
    """

    def __init__(
        self,
        config: Config,
        placement: Placement,
        spec: RoleSpec,
        launcher: Launcher,
        client: LauncherClient,
        *,
        say: Callable[[str], None],
    ) -> None:
        self.config = config
        self.ending = False
        """True when nothing is left to generate: generators that end are not restarted."""
        self.answering_s: float | None = None
        """Time since which the replay queue answers; None while it does not."""
        self.restarts: dict[str, int] = dict.fromkeys(("generator", "replay", "learner", "reward_model"), 0)
        self._placer = Placer(config, placement, spec, launcher, say=say)
        self._launcher = launcher
        self._client = client
        self._spec = spec
        self._say = say
        self._groups: dict[str, RoleGroup] = {}
        self._lost: set[int] = set()
        """Generators whose death is not reported to the replay queue yet."""
        self._step: int | None = None
        self._asked = False
        self._waits_for = ""
        """The resources that the launcher waits for to have room for more generators."""
        hosts = launcher.hosts()
        for role in ROLES:
            for index, resources in enumerate(placement.of(role)):
                self._add(role, index, resources, hosts)

    @property
    def learners(self) -> RoleGroup:
        """The group of all learner and critic ranks."""
        return self._groups["learner"]

    @property
    def replay(self) -> RoleGroup:
        """The group of the replay process."""
        return self._groups["replay"]

    @property
    def generators(self) -> list[RoleGroup]:
        """The group of each generator."""
        return [group for group in self._groups.values() if group.role == "generator"]

    @property
    def learners_ended(self) -> bool:
        """True if all learner ranks exited with code 0."""
        ranks = [role for role in self.learners.processes if role.spec.role == "learner"]
        return self.learners.restart_at_s is None and all(role.code == 0 for role in ranks)

    @property
    def alive(self) -> list[RoleHandle]:
        """Processes that have not exited."""
        return [role for group in self._groups.values() for role in group.processes if role.code is None]

    @property
    def missing(self) -> list[str]:
        """Names of the groups that should be up and are not."""
        return sorted(
            group.name for group in self._groups.values() if group.role != "reward_model" and not group.healthy
        )

    def tick(self, now_s: float) -> None:
        """Starts the groups that are due and handles processes that ended. Raises RunError with the cause when the run
        cannot continue, and ConfigError when the cause is a setting."""
        for role in [role for group in self._groups.values() for role in group.processes]:
            if role.code in FINAL_CODES:  # another start would only repeat it
                raise (ConfigError if role.code == EXIT_CONFIG else RunError)(role.cause())
        for group in list(self._groups.values()):
            self._check_ended(group, now_s)
            due = group.restart_at_s is not None and now_s >= group.restart_at_s and group.name in self._groups
            if due and self._placer.has_hosts(group, list(self._groups.values()), now_s):
                group.start(self._launcher, now_s)

    def update(self, status: dict[str, Any], now_s: float) -> None:
        """Applies a status of the replay queue: heartbeats, and the wanted number of generators. Raises RunError as
        `tick` does, and PeerTimeoutError when the queue stops answering."""
        self.replay.healthy = self.replay.proven = True
        self.replay.last_heartbeat_s = now_s
        if self.answering_s is None:
            self.answering_s = now_s
        self.ending = self.ending or status["done"]
        if not self.ending:
            self._scale(self._wanted(status), now_s)
        reported = {int(index): generator for index, generator in status["generators"].items()}
        for group in self.generators:
            self._update_generator(group, reported.get(group.index), now_s)
        for index in list(self._lost):
            self._report_lost(index)
        self._update_learners(status, now_s)

    def end_generation(self) -> None:
        """Records that nothing is left to generate: generators that end are not restarted, and those that are not up
        yet are ended."""
        self.ending = True
        for group in self.generators:
            if not group.healthy:
                self._forget(group)

    def end_hanging(self) -> None:
        """Kills the remaining generators, which log their stacks first."""
        for group in self.generators:
            self._kill(group, show_stacks=True)
            self._forget(group)

    def miss(self, now_s: float) -> None:
        """Records that the replay queue did not answer, and restarts it after its timeout. Raises RunError when it was
        restarted too often."""
        group, launch = self.replay, self.config.launch
        self.answering_s = None
        if not group.running:
            return
        name, since_s = (
            ("heartbeat_timeout_s", group.last_heartbeat_s) if group.healthy else ("start_timeout_s", group.started_s)
        )
        limit_s = getattr(launch, name)
        if now_s - since_s > limit_s:
            self.restart(group, f"replay did not answer within launch.{name} = {limit_s:g} s", now_s, hangs=True)

    def restart(
        self, group: RoleGroup, reason: str, now_s: float, *, hangs: bool = False, code: int | None = None
    ) -> None:
        """Kills the processes of a group and schedules its next start; `code` is the exit code of a process that ended.
        Raises RunError with the reason when the group was restarted too often, and when another start would only repeat
        the failure (`RoleGroup.repeats`)."""
        self._kill(group, show_stacks=hangs)
        if group.role == "generator":
            self._lost.add(group.index)
            self._report_lost(group.index)
        if group.role == "replay":
            self.answering_s = None
        if group.repeats(reason, now_s) and code not in BY_CHANCE:
            raise RunError(f"{reason}; it has never worked and failed twice for this reason")
        delay_s = group.history.next(now_s, self._step)
        if delay_s is None:
            too_often = (
                f"; it was restarted {self.config.launch.max_restarts} times within {RESTART_WINDOW_S:g} s, or without "
                "an optimizer step in between (launch.max_restarts)"
            )
            raise RunError(reason + (too_often if self.config.launch.max_restarts else ""))
        group.restart_at_s = now_s + delay_s
        self.restarts[group.role] += 1
        log.warning("role restarts", name=group.name, reason=reason, restart=group.history.total, delay_s=delay_s)
        self._say(f"{reason}; restart {group.history.total} in {delay_s:g} s")

    def _add(self, role: str, index: int, resources: RoleResources, hosts: Sequence[Host]) -> None:
        checkpoint = self._spec.checkpoint if role == "replay" else ""
        spec = self._placer.spec(replace(self._spec, role=role, index=index, checkpoint=checkpoint), resources, hosts)
        name = "learner" if role in TOGETHER else spec.name
        if name in self._groups:
            self._groups[name].members.append((spec, resources))
            return
        history = RestartHistory(max_restarts=self.config.launch.max_restarts)
        self._groups[name] = RoleGroup(name, [(spec, resources)], history)

    def _check_ended(self, group: RoleGroup, now_s: float) -> None:
        expected = (0,) if self._may_end(group) else ()
        role = group.ended((*expected, *BY_CHANCE)) or group.ended(expected)  # a rank's error, not its echo in others
        if role is not None and not self._cause_is_known(group, role, now_s):
            return
        if self.ending and group.restart_at_s is not None and group.role in NOT_MISSED:
            self._forget(group)
        elif role is not None and self.ending and group.role in NOT_MISSED:
            log.warning("role died at the end of the run", name=group.name, cause=role.cause())
            self._forget(group)
        elif role is not None and group.draining_since_s is not None:
            log.warning("generator died instead of leaving", name=group.name, cause=role.cause())
            self._forget(group)
        elif role is not None:
            self.restart(group, role.cause(), now_s, code=role.code)
        elif group.draining_since_s is not None and group.ended() is not None:
            self._say(f"{group.name} has left")
            self._forget(group)

    def _cause_is_known(self, group: RoleGroup, role: RoleHandle, now_s: float) -> bool:
        """False while a later report may still explain why the process ended."""
        if group.died_s is None:
            group.died_s = now_s
        if group.role == "learner":
            return now_s - group.died_s >= GRACE_S
        if group.role == "generator" and role.code == 0:
            return self.replay.last_heartbeat_s > group.died_s  # a status tells whether it was asked to leave
        return True

    def _may_end(self, group: RoleGroup) -> bool:
        if group.role == "generator":
            return self.ending or group.draining_since_s is not None
        return group.role == "learner"

    def _kill(self, group: RoleGroup, *, show_stacks: bool = False) -> None:
        processes, group.processes = group.processes, []
        for role in self._launcher.kill(processes, show_stacks=show_stacks):
            self._say(f"{role.name} ({role.place}) could not be killed (SIGKILL) and was left running")

    def _forget(self, group: RoleGroup) -> None:
        self._kill(group)
        del self._groups[group.name]
        if group.role == "generator" and not self.ending:
            self._lost.add(group.index)
            self._report_lost(group.index)

    def _report_lost(self, index: int) -> None:
        group = self._groups.get(f"generator-{index}")
        if group is not None and group.healthy and group.processes:
            self._lost.discard(index)  # by the new session the queue knows that the old one has ended
        elif self.answering_s is not None and self.replay.running:
            try:
                self._client.lost(index)
                self._lost.discard(index)
            except PeerTimeoutError as error:
                log.warning("the replay queue does not know yet of a lost generator", index=index, error=str(error))

    def _wanted(self, status: dict[str, Any]) -> int:
        if not self._asked:
            if status["generators_wanted"] != self.config.launch.generators:
                self._client.scale(self.config.launch.generators)
            self._asked = True
            return self.config.launch.generators
        return status["generators_wanted"]

    def _scale(self, wanted: int, now_s: float) -> None:
        known = {group.index for group in self.generators}
        joiners = [index for index in range(wanted) if index not in known]
        if joiners:
            self._join(joiners, wanted)
        for group in self.generators:
            if group.index < wanted:
                group.draining_since_s = None
            elif group.restart_at_s is not None:
                self._forget(group)
            elif group.draining_since_s is None:
                group.draining_since_s = now_s
            elif now_s - group.draining_since_s > 2 * self.config.launch.stop_timeout_s:
                log.warning("generator did not leave in time and was killed", name=group.name)
                self._forget(group)

    def _join(self, joiners: list[int], wanted: int) -> None:
        waits_for, hosts = self._launcher.resize(wanted), self._launcher.hosts()
        placed = self._placer.joiners(joiners, list(self._groups.values()), hosts)
        for index, resources in zip(joiners, placed, strict=False):
            self._add("generator", index, resources, hosts)
        if len(placed) < len(joiners) and not waits_for:
            self._say("no more generators: no host has a free GPU for one")
            self._client.scale(joiners[len(placed)])
        elif len(placed) < len(joiners) and waits_for != self._waits_for:
            self._say(f"waiting for {waits_for}")
        self._waits_for = waits_for

    def _update_generator(self, group: RoleGroup, reported: dict[str, Any] | None, now_s: float) -> None:
        if not group.running or group.draining_since_s is not None or self.answering_s is None:
            return
        heard_s = now_s - reported["heard_ago_s"] if reported else 0.0
        # A restarted replay queue reports a heartbeat now for every generator that it knew before.
        if reported and heard_s > group.started_s and reported["session"] not in ("", group.former_session):
            group.healthy = group.proven = True
            group.last_heartbeat_s, group.session = heard_s, reported["session"]
        if self.ending:
            return  # generators that end are not restarted
        # No heartbeat can arrive while the replay queue is down.
        if group.healthy:
            name, since_s = "heartbeat_timeout_s", max(group.last_heartbeat_s, self.answering_s)
        else:
            name, since_s = "start_timeout_s", max(group.started_s, self.answering_s)
        self._check_silence(group, name, since_s, now_s)

    def _update_learners(self, status: dict[str, Any], now_s: float) -> None:
        group = self.learners
        group.proven |= self._step is not None and status["step"] > self._step
        self._step = status["step"]
        if group.healthy or not group.running or self.answering_s is None:
            return
        heard_s = {int(rank): now_s - ago_s for rank, ago_s in status["learners"].items()}
        ranks = range(self.config.launch.learners)
        group.healthy = all(heard_s.get(rank, group.started_s) > group.started_s for rank in ranks)
        if not group.healthy:
            self._check_silence(group, "start_timeout_s", max(group.started_s, self.answering_s), now_s)

    def _check_silence(self, group: RoleGroup, name: str, since_s: float, now_s: float) -> None:
        limit_s = getattr(self.config.launch, name)
        is_late = now_s - since_s > limit_s
        if not is_late and (group.healthy or now_s - group.reported_s < NOT_UP_EVERY_S):
            return
        spec, _ = group.members[0]
        phase = "" if group.healthy else last_phase(spec.logs / f"{spec.name}.jsonl")
        doing = f"; it has been {phase}" if phase else ""
        limit = f"launch.{name} = {limit_s:g} s"
        if is_late:
            self.restart(group, f"{group.name} sent no heartbeat for {limit}{doing}", now_s, hangs=True)
            return
        group.reported_s = now_s
        self._say(f"{group.name} is not up {now_s - group.started_s:.0f} s after its start{doing} (limit: {limit})")
