"""Keeps the roles of a run alive: starts them, restarts what died or hangs, follows the wanted number of generators."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import structlog

from asyncrl.config import Config
from asyncrl.errors import ConfigError, PeerTimeoutError, RunError
from asyncrl.launch.fit import fit_memory
from asyncrl.launch.local import LocalLauncher, RoleProcess
from asyncrl.launch.placement import Placement, RoleResources, place_roles, refuse_joiner
from asyncrl.launch.role_group import RestartHistory, RoleGroup
from asyncrl.launch.worker import EXIT_CONFIG, EXIT_SILENT_PEER, EXIT_TERMINATED, ROLES, RoleSpec
from asyncrl.replay.client import LauncherClient

log = structlog.get_logger()

GRACE_S = 1.0
"""After a learner rank died, time for another one to say why."""
TOGETHER = ("learner", "critic")
"""Roles whose ranks are restarted all at once: each waits for the others in every step."""

BY_CHANCE = (EXIT_SILENT_PEER, EXIT_TERMINATED, -signal.SIGKILL, -signal.SIGTERM)
"""Exit codes of roles that others ended, or that others did not answer: two of a kind need not have one cause."""
NOT_MISSED = ("generator", "reward_model")
"""Roles that need no restart when nothing is left to generate."""


class Supervisor:
    """The roles of a run by unit; `spec` is what those of all roles have in common.

    Every method takes the time; none waits, but for an answer of the replay queue.
    """

    def __init__(
        self,
        config: Config,
        plan: Placement,
        spec: RoleSpec,
        launcher: LocalLauncher,
        client: LauncherClient,
        *,
        say: Callable[[str], None],
    ) -> None:
        self.config = config
        self.ending = False
        """Nothing is left to generate: generators that end are not missed."""
        self.answering_s: float | None = None
        """Since when the replay queue answers; None while it does not."""
        self.restarts: dict[str, int] = dict.fromkeys(("generator", "replay", "learner", "reward_model"), 0)
        self._plan = plan
        self._launcher = launcher
        self._client = client
        self._spec = spec
        self._say = say
        self._units: dict[str, RoleGroup] = {}
        self._lost: set[int] = set()
        """Generators whose death the replay queue has not been told."""
        self._step: int | None = None
        self._asked = False
        for role in ROLES:
            for index, share in enumerate(plan.of(role)):
                self._add(role, index, share)

    @property
    def learners(self) -> RoleGroup:
        return self._units["learner"]

    @property
    def replay(self) -> RoleGroup:
        return self._units["replay"]

    @property
    def generators(self) -> list[RoleGroup]:
        return [unit for unit in self._units.values() if unit.role == "generator"]

    @property
    def learners_ended(self) -> bool:
        """All learner ranks ended well."""
        ranks = [role for role in self.learners.processes if role.spec.role == "learner"]
        return self.learners.restart_at_s is None and all(role.code == 0 for role in ranks)

    @property
    def alive(self) -> list[RoleProcess]:
        return [role for unit in self._units.values() for role in unit.processes if role.code is None]

    @property
    def missing(self) -> list[str]:
        """Units that should be up and are not."""
        return sorted(unit.name for unit in self._units.values() if unit.role != "reward_model" and not unit.healthy)

    def tick(self, now_s: float) -> None:
        """Starts what is due and deals with what ended. Raises RunError with the cause when the run cannot go on, and
        ConfigError when that is a setting."""
        for unit in list(self._units.values()):
            if role := unit.failed():
                raise (ConfigError if role.code == EXIT_CONFIG else RunError)(role.cause())
        for unit in list(self._units.values()):
            self._look_at(unit, now_s)
            if unit.restart_at_s is not None and now_s >= unit.restart_at_s and unit.name in self._units:
                unit.start(self._launcher, now_s)

    def update(self, status: dict[str, Any], now_s: float) -> None:
        """Takes in a status of the replay queue: who was heard, what is wanted. Raises RunError as `tick` does, and
        PeerTimeoutError when the queue falls silent meanwhile."""
        self.replay.healthy = self.replay.made_progress = True
        self.replay.last_heartbeat_s = now_s
        if self.answering_s is None:
            self.answering_s = now_s
        self.ending = self.ending or status["done"]
        if not self.ending:
            self._scale(self._wanted(status), now_s)
        told = {int(index): generator for index, generator in status["generators"].items()}
        for unit in self.generators:
            self._hear_generator(unit, told.get(unit.index), now_s)
        for index in list(self._lost):
            self._tell_lost(index)
        self._hear_learners(status, now_s)

    def end_generation(self) -> None:
        """Nothing is left to generate: generators that end are not missed, those that are not up yet are ended."""
        self.ending = True
        for unit in self.generators:
            if not unit.healthy:
                self._forget(unit)

    def end_hanging(self) -> None:
        """Ends the generators that are left, and has them show where they hang."""
        for unit in self.generators:
            self._kill(unit, show_stacks=True)
            self._forget(unit)

    def miss(self, now_s: float) -> None:
        """The replay queue did not answer. Raises RunError when it was restarted too often."""
        unit, launch = self.replay, self.config.launch
        self.answering_s = None
        if not unit.running:
            return
        name, since_s = (
            ("heartbeat_timeout_s", unit.last_heartbeat_s) if unit.healthy else ("start_timeout_s", unit.started_s)
        )
        limit_s = getattr(launch, name)
        if now_s - since_s > limit_s:
            self.restart(unit, f"replay did not answer within launch.{name} = {limit_s:g} s", now_s, hangs=True)

    def restart(
        self, unit: RoleGroup, reason: str, now_s: float, *, hangs: bool = False, by_chance: bool = False
    ) -> None:
        """Ends what is left of a unit and has it started again after its pause. Raises RunError with the reason when
        it was restarted too often, or never worked and fell for this reason the time before, too, unless that may be
        by chance."""
        self._kill(unit, show_stacks=hangs)
        if unit.role == "generator":
            self._lost.add(unit.index)
            self._tell_lost(unit.index)
        if unit.role == "replay":
            self.answering_s = None
        if not by_chance and unit.repeats(reason, now_s):
            raise RunError(f"{reason}; it has never worked and fell twice for that: another start would only repeat it")
        delay_s = unit.delay_s(now_s)
        if delay_s is None:
            raise RunError(reason + self._too_often())
        unit.restart_at_s = now_s + delay_s
        self.restarts[unit.role] += 1
        log.warning("role restarts", name=unit.name, reason=reason, restart=unit.history.total, delay_s=delay_s)
        self._say(f"{reason}; restart {unit.history.total} in {delay_s:g} s")

    def _too_often(self) -> str:
        launch = self.config.launch
        if not launch.max_restarts:
            return ""
        return (
            f"; it was restarted {launch.max_restarts} times within launch.restart_window_s = "
            f"{launch.restart_window_s:g} s, or without ever working (launch.max_restarts)"
        )

    def _add(self, role: str, index: int, share: RoleResources) -> None:
        checkpoint = self._spec.checkpoint if role == "replay" else ""
        spec = replace(self._spec, role=role, index=index, cpus=share.cpus, checkpoint=checkpoint)
        name = "learner" if role in TOGETHER else spec.name
        if name in self._units:
            self._units[name].members.append((spec, share))
            return
        launch = self.config.launch
        history = RestartHistory(max_restarts=launch.max_restarts, window_s=launch.restart_window_s)
        self._units[name] = RoleGroup(name, [(spec, share)], history)

    def _look_at(self, unit: RoleGroup, now_s: float) -> None:
        role = unit.ended((0,) if self._may_end(unit) else ())
        if role is not None and not self._is_clear(unit, role, now_s):
            return
        if self.ending and unit.restart_at_s is not None and unit.role in NOT_MISSED:
            self._forget(unit)
        elif role is not None and self.ending and unit.role in NOT_MISSED:
            log.warning("role died at the end of the run", name=unit.name, cause=role.cause())
            self._forget(unit)
        elif role is not None and unit.draining_since_s is not None:
            log.warning("generator died instead of leaving", name=unit.name, cause=role.cause())
            self._forget(unit)
        elif role is not None:
            self.restart(unit, role.cause(), now_s, by_chance=role.code in BY_CHANCE)
        elif unit.draining_since_s is not None and unit.ended() is not None:
            self._say(f"{unit.name} has left")
            self._forget(unit)

    def _is_clear(self, unit: RoleGroup, role: RoleProcess, now_s: float) -> bool:
        """False while something may still tell what the end of the process means."""
        if unit.died_s is None:
            unit.died_s = now_s
        if unit.role == "learner":
            return now_s - unit.died_s >= GRACE_S
        if unit.role == "generator" and role.code == 0:
            return self.replay.last_heartbeat_s > unit.died_s  # a status says whether it was told to leave
        return True

    def _may_end(self, unit: RoleGroup) -> bool:
        if unit.role == "generator":
            return self.ending or unit.draining_since_s is not None
        return unit.role == "learner"

    def _kill(self, unit: RoleGroup, *, show_stacks: bool = False) -> None:
        for role in unit.kill(self._launcher, show_stacks=show_stacks):
            self._say(f"{role.name} (process {role.process.pid}) does not die of SIGKILL and is left behind")

    def _forget(self, unit: RoleGroup) -> None:
        self._kill(unit)
        del self._units[unit.name]
        if unit.role == "generator" and not self.ending:
            self._lost.add(unit.index)
            self._tell_lost(unit.index)

    def _tell_lost(self, index: int) -> None:
        """Has the leases of a dead generator given out again; later, when the replay queue is not there."""
        unit = self._units.get(f"generator-{index}")
        if unit is not None and unit.healthy and unit.processes:
            self._lost.discard(index)  # the queue has seen by its new session that the old one is gone
        elif self.answering_s is not None and self.replay.running:
            try:
                self._client.lost(index)
                self._lost.discard(index)
            except PeerTimeoutError as error:
                log.warning("the replay queue does not know yet of a lost generator", index=index, error=str(error))

    def _wanted(self, status: dict[str, Any]) -> int:
        """Generators wanted; at first those of the config, whatever number an earlier launch left."""
        if not self._asked:
            if status["generators_wanted"] != self.config.launch.generators:
                self._client.scale(self.config.launch.generators)
            self._asked = True
            return self.config.launch.generators
        return status["generators_wanted"]

    def _scale(self, wanted: int, now_s: float) -> None:
        known = {unit.index for unit in self.generators}
        joiners = [index for index in range(wanted) if index not in known]
        if joiners:
            self._join(joiners, wanted)
        for unit in self.generators:
            if unit.index < wanted:
                unit.draining_since_s = None
            elif unit.restart_at_s is not None:
                self._forget(unit)
            elif unit.draining_since_s is None:
                unit.draining_since_s = now_s
            elif now_s - unit.draining_since_s > 2 * self.config.launch.stop_timeout_s:
                log.warning("generator did not leave in time and was killed", name=unit.name)
                self._forget(unit)

    def _join(self, joiners: list[int], wanted: int) -> None:
        """Adds generators on their part of the machine as it would be split anew; the others stay where they are."""
        launch = self.config.launch.model_copy(update={"generators": wanted})
        try:
            config = self.config.model_copy(update={"launch": launch})
            reward_model = self._plan.reward_model is not None
            plan = fit_memory(config, place_roles(config, reward_model=reward_model), reward_model=reward_model)
        except ConfigError as error:
            self._say(f"no more generators: {error}")
            self._client.scale(min(joiners))
            return
        for index in joiners:
            if reason := refuse_joiner(self.config, self._plan, plan, index):
                self._say(f"no more generators: {reason}")
                self._client.scale(index)
                return
            self._add("generator", index, plan.generators[index])

    def _hear_generator(self, unit: RoleGroup, told: dict[str, Any] | None, now_s: float) -> None:
        if not unit.running or unit.draining_since_s is not None or self.answering_s is None:
            return
        heard_s = now_s - told["heard_ago_s"] if told else 0.0
        # A replay queue that was restarted takes those for heard now that it knew before.
        if told and heard_s > unit.started_s and told["session"] not in ("", unit.former_session):
            unit.healthy = unit.made_progress = True
            unit.last_heartbeat_s, unit.session = heard_s, told["session"]
        if self.ending:
            return  # nobody is missed
        # While the replay queue was away nobody could be heard.
        if unit.healthy:
            name, since_s = "heartbeat_timeout_s", max(unit.last_heartbeat_s, self.answering_s)
        else:
            name, since_s = "start_timeout_s", max(unit.started_s, self.answering_s)
        self._check_silence(unit, name, since_s, now_s)

    def _hear_learners(self, status: dict[str, Any], now_s: float) -> None:
        unit = self.learners
        unit.made_progress = unit.made_progress or (self._step is not None and status["step"] > self._step)
        self._step = status["step"]
        if unit.healthy or not unit.running or self.answering_s is None:
            return
        heard_s = {int(rank): now_s - ago_s for rank, ago_s in status["learners"].items()}
        ranks = range(self.config.launch.learners)
        unit.healthy = all(heard_s.get(rank, unit.started_s) > unit.started_s for rank in ranks)
        if not unit.healthy:
            self._check_silence(unit, "start_timeout_s", max(unit.started_s, self.answering_s), now_s)

    def _check_silence(self, unit: RoleGroup, name: str, since_s: float, now_s: float) -> None:
        limit_s = getattr(self.config.launch, name)
        if now_s - since_s > limit_s:
            self.restart(unit, f"{unit.name} was not heard for launch.{name} = {limit_s:g} s", now_s, hangs=True)
