"""Keeps the roles of a run alive: starts them, restarts those that died or hang, scales to the wanted generators."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import structlog

from asyncrl.config import Config
from asyncrl.errors import ConfigError, PeerTimeoutError, RunError
from asyncrl.launch.launcher import HOST_LOST, Launcher, RoleHandle
from asyncrl.launch.placer import Placer
from asyncrl.launch.resources.hosts import Host, RoleResources
from asyncrl.launch.resources.placement import Placement
from asyncrl.launch.role_group import RESTART_WINDOW_S, RestartHistory, RoleGroup
from asyncrl.launch.worker import EXIT_CONFIG, EXIT_SILENT_PEER, EXIT_TERMINATED, ROLES, RoleSpec
from asyncrl.observe.logs import last_phase
from asyncrl.replay.client import LauncherClient

log = structlog.get_logger()

GRACE_S = 1.0
"""Time that the other ranks have, after a learner rank died, to report the cause."""
TOGETHER = ("learner", "critic")
"""Roles whose ranks are restarted together: each rank waits for the others in every step."""

EVICTED = (EXIT_TERMINATED, HOST_LOST, -signal.SIGTERM)
"""Exit codes of roles whose machine is wanted for something else: they never count as failures of the role."""
BY_CHANCE = (EXIT_SILENT_PEER, -signal.SIGKILL, *EVICTED)
"""Exit codes of roles that another process ended or did not answer: two in a row need not have the same cause."""
NOT_UP_EVERY_S = 60.0
"""Pause between two lines about a role that is alive but not up yet."""
NOT_MISSED = ("generator", "reward_model")
"""Roles that are not restarted when nothing is left to generate."""


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
        for group in list(self._groups.values()):
            if role := group.failed():
                raise (ConfigError if role.code == EXIT_CONFIG else RunError)(role.cause())
        for group in list(self._groups.values()):
            self._check_ended(group, now_s)
            due = group.restart_at_s is not None and now_s >= group.restart_at_s and group.name in self._groups
            if due and self._placer.has_hosts(group, list(self._groups.values()), now_s):
                group.start(self._launcher, now_s)

    def update(self, status: dict[str, Any], now_s: float) -> None:
        """Applies a status of the replay queue: heartbeats, and the wanted number of generators. Raises RunError as
        `tick` does, and PeerTimeoutError when the queue stops answering meanwhile."""
        self.replay.healthy = self.replay.made_progress = True
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
        chance = code in BY_CHANCE
        if code not in EVICTED and (repeated := group.repeats(reason, self._step, now_s, by_chance=chance)):
            raise RunError(f"{reason}; {repeated}: another start would only repeat it")
        delay_s = group.delay_s(now_s)
        if delay_s is None:
            raise RunError(reason + self._too_often())
        group.restart_at_s = now_s + delay_s
        self.restarts[group.role] += 1
        log.warning("role restarts", name=group.name, reason=reason, restart=group.history.total, delay_s=delay_s)
        self._say(f"{reason}; restart {group.history.total} in {delay_s:g} s")

    def _too_often(self) -> str:
        launch = self.config.launch
        if not launch.max_restarts:
            return ""
        return (
            f"; it was restarted {launch.max_restarts} times within {RESTART_WINDOW_S:g} s, "
            "or without having worked (launch.max_restarts)"
        )

    def _add(self, role: str, index: int, resources: RoleResources, hosts: Sequence[Host]) -> None:
        checkpoint = self._spec.checkpoint if role == "replay" else ""
        spec = self._placer.spec(replace(self._spec, role=role, index=index, checkpoint=checkpoint), resources, hosts)
        name = "learner" if role in TOGETHER else spec.name
        if name in self._groups:
            self._groups[name].members.append((spec, resources))
            return
        launch = self.config.launch
        history = RestartHistory(max_restarts=launch.max_restarts)
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
            return self.replay.last_heartbeat_s > group.died_s  # a status says whether it was asked to leave
        return True

    def _may_end(self, group: RoleGroup) -> bool:
        if group.role == "generator":
            return self.ending or group.draining_since_s is not None
        return group.role == "learner"

    def _kill(self, group: RoleGroup, *, show_stacks: bool = False) -> None:
        for role in group.kill(self._launcher, show_stacks=show_stacks):
            self._say(f"{role.name} ({role.place}) does not die of SIGKILL and is left running")

    def _forget(self, group: RoleGroup) -> None:
        self._kill(group)
        del self._groups[group.name]
        if group.role == "generator" and not self.ending:
            self._lost.add(group.index)
            self._report_lost(group.index)

    def _report_lost(self, index: int) -> None:
        """Tells the replay queue to return the leases of a dead generator; tries again later when the queue is down."""
        group = self._groups.get(f"generator-{index}")
        if group is not None and group.healthy and group.processes:
            self._lost.discard(index)  # the new session has told the queue that the old one is gone
        elif self.answering_s is not None and self.replay.running:
            try:
                self._client.lost(index)
                self._lost.discard(index)
            except PeerTimeoutError as error:
                log.warning("the replay queue does not know yet of a lost generator", index=index, error=str(error))

    def _wanted(self, status: dict[str, Any]) -> int:
        """The wanted number of generators; at first that of the config, whatever number an earlier launch set."""
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
        """Adds generators; the other roles keep their resources."""
        waits_for, hosts = self._launcher.resize(wanted), self._launcher.hosts()
        found, reason = self._placer.joiners(joiners, wanted, list(self._groups.values()), hosts)
        for index, resources in zip(joiners, found, strict=False):
            self._add("generator", index, resources, hosts)
        if reason and not waits_for:
            self._say(f"no more generators: {reason}")
            self._client.scale(joiners[len(found)])
        elif reason and waits_for != self._waits_for:
            self._say(f"waiting for {waits_for}")
        self._waits_for = waits_for

    def _update_generator(self, group: RoleGroup, reported: dict[str, Any] | None, now_s: float) -> None:
        if not group.running or group.draining_since_s is not None or self.answering_s is None:
            return
        heard_s = now_s - reported["heard_ago_s"] if reported else 0.0
        # A restarted replay queue reports a heartbeat now for every generator that it knew before.
        if reported and heard_s > group.started_s and reported["session"] not in ("", group.former_session):
            group.healthy = group.made_progress = True
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
        group.made_progress = group.made_progress or (self._step is not None and status["step"] > self._step)
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
