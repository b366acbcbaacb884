"""Evaluations: prompts of each policy version that are open, leased or scored, and the results.

Every due version (`Config.evaluates`) is evaluated on the same prompts. Only a generator that has that version
loaded leases them, and it keeps that version until no prompt is open; so an evaluation measures exactly one version.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import structlog

from asyncrl.config import Config
from asyncrl.errors import ProtocolError
from asyncrl.replay.eval_scores import PromptScore, eval_metrics, score_table
from asyncrl.types import Lease, Prompt
from asyncrl.wire.messages import Evaluated, ReleasedEvaluation

log = structlog.get_logger()

STRANDED = "no generator has the version any more"


@dataclass(slots=True)
class _Leased:
    generator: int
    attempt: int
    renewed_s: float
    """When it was leased, or when its generator last renewed the lease."""
    session: str = ""
    number: int = -1
    """Number, in its session, of the ask that got the lease."""


@dataclass(slots=True)
class Evaluation:
    """One version under evaluation; its tickets start at `first`, in the order of the prompts."""

    version: int
    first: int
    open: deque[int]
    """Tickets that are not leased."""
    leased: dict[int, _Leased] = field(default_factory=dict[int, _Leased])
    attempts: dict[int, int] = field(default_factory=dict[int, int])
    scores: dict[int, PromptScore] = field(default_factory=dict[int, PromptScore])

    def state(self) -> list[Any]:
        """The state for msgpack, without the age of leases."""
        leased = [[ticket, h.generator, h.attempt, h.session, h.number] for ticket, h in self.leased.items()]
        attempts = [list(pair) for pair in self.attempts.items()]
        scores = [[ticket, *score.state()] for ticket, score in self.scores.items()]
        return [self.version, self.first, list(self.open), leased, attempts, scores]

    @classmethod
    def of_state(cls, state: Sequence[Any], now_s: float) -> Self:
        """Restores the result of `state`, with leases renewed at `now_s`."""
        version, first, still_open, leased, attempts, scores = state
        return cls(
            version,
            first,
            deque(still_open),
            {t: _Leased(generator, attempt, now_s, *asked) for t, generator, attempt, *asked in leased},
            dict(attempts),
            {ticket: PromptScore(*score) for ticket, *score in scores},
        )


class EvalBook:
    """All evaluations of a run. It reads no clock: methods that need the time get it as `now_s`, seconds of the run."""

    def __init__(self, config: Config, prompts: Sequence[Prompt] = ()) -> None:
        self._config = config
        self._prompts = prompts
        self._running: dict[int, Evaluation] = {}
        self._issued = 0
        self._heartbeats: dict[int, tuple[int, float]] = {}
        """Generator -> version loaded at its last heartbeat, and the time of that heartbeat."""
        self._unreported: deque[dict[str, Any]] = deque()
        self._step = 0
        self.ended: list[dict[str, Any]] = []
        """Results of the complete evaluations: version, at_step, and the metrics of `score_table`."""
        self.dropped: list[dict[str, Any]] = []
        """Version and reason of each evaluation that was dropped."""
        self.prompts_done = 0
        self.tokens = 0
        """Tokens sampled for evaluated prompts."""
        self.committed(0, due=config.evaluates(0))

    @property
    def running(self) -> bool:
        """True if evaluations are due or under way."""
        return bool(self._running)

    def committed(self, version: int, *, due: bool) -> None:
        """Registers a new policy version; its evaluation starts now if it is `due`."""
        self._step = version
        if self._prompts and due:
            tickets = range(self._issued, self._issued + len(self._prompts))
            self._running[version] = Evaluation(version, self._issued, deque(tickets))
            self._issued += len(tickets)

    def heartbeat(self, generator: int, version: int, now_s: float) -> None:
        """Records that the generator is up and has `version` loaded."""
        self._heartbeats[generator] = (version, now_s)

    def lease(
        self, generator: int, version: int, num_prompts: int, now_s: float, *, session: str = "", number: int = -1
    ) -> list[Lease]:
        """Leases up to `num_prompts` prompts to a generator that has `version` loaded; `number` is that of the ask in
        its session."""
        self.heartbeat(generator, version, now_s)
        evaluation = self._running.get(version)
        leases: list[Lease] = []
        while evaluation is not None and evaluation.open and len(leases) < num_prompts:
            ticket = evaluation.open.popleft()
            attempt = evaluation.attempts.get(ticket, -1) + 1
            evaluation.attempts[ticket] = attempt
            evaluation.leased[ticket] = _Leased(generator, attempt, now_s, session, number)
            leases.append(self._lease(evaluation, ticket))
        return leases

    def left(self, version: int) -> bool:
        """True if prompts of this version are open."""
        evaluation = self._running.get(version)
        return evaluation is not None and bool(evaluation.open)

    def leases_of(self, generator: int) -> list[tuple[Lease, str, int]]:
        """The leases that the generator holds, each with the session and number of the ask that got it."""
        return [
            (self._lease(evaluation, ticket), held.session, held.number)
            for evaluation in self._running.values()
            for ticket, held in evaluation.leased.items()
            if held.generator == generator
        ]

    def wants(self, result: Evaluated) -> bool:
        """False for a repeated result, or one whose evaluation has ended. Raises ProtocolError for a wrong one."""
        evaluation = self._running.get(result.version)
        ticket = result.ticket
        if evaluation is None or ticket in evaluation.scores:
            return False
        if ticket not in evaluation.attempts or result.attempt > evaluation.attempts[ticket]:
            raise ProtocolError(f"evaluation ticket {ticket} of version {result.version} was never leased")
        self._check(result)
        return True

    def finish(self, result: Evaluated) -> None:
        """Counts an evaluated prompt: the first result that arrives for it. Raises ProtocolError for a wrong one."""
        if not self.wants(result):
            return
        evaluation, ticket = self._running[result.version], result.ticket
        evaluation.leased.pop(ticket, None)
        if ticket in evaluation.open:
            evaluation.open.remove(ticket)
        score = PromptScore.of(result)
        evaluation.scores[ticket] = score
        self.prompts_done += 1
        self.tokens += score.tokens
        if len(evaluation.scores) == len(self._prompts):
            self._end(evaluation)

    def held(self) -> Iterator[tuple[int, int, int]]:
        """(generator, ticket, attempt) of every prompt that is leased."""
        for evaluation in self._running.values():
            for ticket, held in evaluation.leased.items():
                yield held.generator, ticket, held.attempt

    def wake(self, now_s: float) -> None:
        """All leases count as renewed at `now_s`."""
        for evaluation in self._running.values():
            for held in evaluation.leased.values():
                held.renewed_s = now_s

    def renew(self, generator: int, ticket: int, attempt: int, now_s: float) -> None:
        """Renews a lease, if the generator holds it."""
        for evaluation in self._running.values():
            held = evaluation.leased.get(ticket)
            if held is not None and (held.generator, held.attempt) == (generator, attempt):
                held.renewed_s = now_s

    def release(self, leases: Iterable[ReleasedEvaluation]) -> None:
        """Takes back prompts that a generator will not finish."""
        for lease in leases:
            for evaluation in self._running.values():
                held = evaluation.leased.get(lease.ticket)
                if held is not None and held.attempt == lease.attempt:
                    del evaluation.leased[lease.ticket]
                    evaluation.open.append(lease.ticket)

    def expired(self, now_s: float) -> list[ReleasedEvaluation]:
        """Prompts whose leases were not renewed for `launch.heartbeat_timeout_s`."""
        found: list[ReleasedEvaluation] = []
        for evaluation in self._running.values():
            for ticket, held in evaluation.leased.items():
                if now_s - held.renewed_s > self._config.launch.heartbeat_timeout_s:
                    log.warning("evaluation lease expired", ticket=ticket, generator=held.generator)
                    found.append(ReleasedEvaluation(ticket, held.attempt))
        return found

    def stranded(self, now_s: float) -> list[int]:
        """Versions under evaluation that no running generator has loaded or can still load."""
        return [
            evaluation.version
            for evaluation in self._running.values()
            if self._heartbeats and not evaluation.leased and not self._may_come(evaluation.version, now_s)
        ]

    def expire(self, now_s: float) -> None:
        """Takes back `expired` leases and drops `stranded` evaluations."""
        self.release(self.expired(now_s))
        for version in self.stranded(now_s):
            self.drop(version, STRANDED)

    def drop(self, version: int, reason: str) -> None:
        """Drops the evaluation of a version."""
        evaluation = self._running.pop(version)
        done, total = len(evaluation.scores), len(self._prompts)
        self.dropped.append({"version": version, "reason": reason, "done": done, "prompts": total})
        log.warning("evaluation dropped", version=version, reason=reason, done=done, prompts=total)

    def drop_all(self, reason: str) -> None:
        """Drops all evaluations that are due or under way."""
        for version in list(self._running):
            self.drop(version, reason)

    def next_metrics(self) -> dict[str, float]:
        """Removes the oldest unreported result and returns it as metrics named `eval/...`; empty if there is none."""
        return eval_metrics(self._unreported.popleft() if self._unreported else {})

    def unreported(self, after: int) -> dict[str, Any] | None:
        """The unreported result that follows `after` others; None if there is none."""
        return self._unreported[after] if after < len(self._unreported) else None

    def reported_stats(self) -> list[list[int]]:
        """Generator and version of each generator with a heartbeat."""
        return [[generator, version] for generator, (version, _) in self._heartbeats.items()]

    def load_reported_stats(self, stats: Sequence[Sequence[int]], now_s: float | None) -> None:
        """Restores the stats. The generators count as alive at `now_s`; with None no generator does."""
        self._heartbeats = {} if now_s is None else {generator: (version, now_s) for generator, version in stats}

    def state_dict(self) -> dict[str, Any]:
        """The state for msgpack, without reported stats and the age of leases."""
        return {
            "running": [evaluation.state() for evaluation in self._running.values()],
            "issued": self._issued,
            "unreported": list(self._unreported),
            "step": self._step,
            "ended": list(self.ended),
            "dropped": list(self.dropped),
            "prompts_done": self.prompts_done,
            "tokens": self.tokens,
        }

    def load_state_dict(self, state: dict[str, Any], now_s: float) -> None:
        """Restores the result of `state_dict`, with leases renewed at `now_s`."""
        running = [Evaluation.of_state(one, now_s) for one in state["running"]]
        self._running = {evaluation.version: evaluation for evaluation in running}
        self._issued, self._step = state["issued"], state["step"]
        self._unreported = deque(state["unreported"])
        self.ended, self.dropped = list(state["ended"]), list(state["dropped"])
        self.prompts_done, self.tokens = state["prompts_done"], state["tokens"]

    def status(self) -> dict[str, Any]:
        """The progress of evaluations, for live views."""
        progress = [
            {"version": e.version, "done": len(e.scores), "prompts": len(self._prompts)} for e in self._running.values()
        ]
        return {
            "prompts_done": self.prompts_done,
            "running": progress,
            "last": self.ended[-1] if self.ended else None,
        }

    def summary(self) -> dict[str, Any]:
        """The evaluations' part of the run's summary, sorted by version: evaluations may end in another order. Empty
        for a run without evaluation prompts."""
        if not self._prompts:
            return {}
        results = sorted(self.ended, key=lambda result: result["version"])
        return {"eval": results, "eval_tokens": self.tokens, "eval_dropped": self.dropped}

    def _check(self, result: Evaluated) -> None:
        where = f"evaluation ticket {result.ticket}"
        for name in ("rewards", "status"):
            if len(getattr(result, name)) != self._config.eval.samples:
                raise ProtocolError(
                    f"{where}: {len(getattr(result, name))} {name}, expected {self._config.eval.samples}"
                )
        if not all(map(math.isfinite, result.rewards)):
            raise ProtocolError(f"{where}: rewards {result.rewards} are not finite")

    def _may_come(self, version: int, now_s: float) -> bool:
        """True if a running generator has the version loaded or can still load it."""
        launch = self._config.launch
        limit_s = launch.heartbeat_timeout_s + launch.start_timeout_s  # until a restarted one is heard
        return any(loaded <= version and now_s - heard_s <= limit_s for loaded, heard_s in self._heartbeats.values())

    def _lease(self, evaluation: Evaluation, ticket: int) -> Lease:
        prompt = self._prompts[ticket - evaluation.first]
        return Lease(ticket, evaluation.attempts[ticket], prompt, evaluation=True)

    def _end(self, evaluation: Evaluation) -> None:
        del self._running[evaluation.version]
        result = {"version": evaluation.version, "at_step": self._step, **score_table(evaluation.scores.values())}
        self.ended.append(result)
        self._unreported.append(result)
        log.info("evaluation done", version=evaluation.version, reward=result["reward"], at_step=self._step)
