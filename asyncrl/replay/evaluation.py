"""Evaluations: which prompts of which policy version are handed out, done or given up, and their results.

Every due version (`Config.evaluates`) is evaluated on the same prompts. Only a generator that has that version
loaded gets them, and it keeps the version until none is left; so an evaluation is of exactly one version.
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
from asyncrl.wire.messages import EvaluatedBody, ReleasedEvaluation

log = structlog.get_logger()

STRANDED = "no generator has the version any more"


@dataclass(slots=True)
class _Leased:
    generator: int
    attempt: int
    renewed_s: float
    """When it was leased, or its generator last said that it works on it."""
    session: str = ""
    number: int = -1
    """Of the ask that got it, in its session."""


@dataclass(slots=True)
class Evaluation:
    """One version under evaluation; its tickets are `first` and on, in the order of the prompts."""

    version: int
    first: int
    open: deque[int]
    """Tickets left to hand out."""
    leased: dict[int, _Leased] = field(default_factory=dict[int, _Leased])
    attempts: dict[int, int] = field(default_factory=dict[int, int])
    scores: dict[int, PromptScore] = field(default_factory=dict[int, PromptScore])

    def state(self) -> list[Any]:
        leased = [[ticket, h.generator, h.attempt, h.session, h.number] for ticket, h in self.leased.items()]
        attempts = [list(pair) for pair in self.attempts.items()]
        scores = [[ticket, *score.state()] for ticket, score in self.scores.items()]
        return [self.version, self.first, list(self.open), leased, attempts, scores]

    @classmethod
    def of_state(cls, state: Sequence[Any], now_s: float) -> Self:
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
    """All evaluations of a run. Pure: every method is told the time it needs, in seconds on one clock."""

    def __init__(self, config: Config, prompts: Sequence[Prompt] = ()) -> None:
        self._config = config
        self._prompts = prompts
        self._running: dict[int, Evaluation] = {}
        self._issued = 0
        self._heard: dict[int, tuple[int, float]] = {}
        """Generator -> version it had loaded when it last spoke, and when that was."""
        self._unreported: deque[dict[str, Any]] = deque()
        self._step = 0
        self.ended: list[dict[str, Any]] = []
        """Results of the complete evaluations: version, at_step, and the metrics of `score_table`."""
        self.dropped: list[dict[str, Any]] = []
        """Version and reason of the evaluations that were given up."""
        self.prompts_done = 0
        self.tokens = 0
        """Sampled for evaluated prompts."""
        self.committed(0, due=config.evaluates(0))

    @property
    def running(self) -> bool:
        """Evaluations are due or under way."""
        return bool(self._running)

    def committed(self, version: int, *, due: bool) -> None:
        """The learner has made this version; it is evaluated from now on if it is due."""
        self._step = version
        if self._prompts and due:
            tickets = range(self._issued, self._issued + len(self._prompts))
            self._running[version] = Evaluation(version, self._issued, deque(tickets))
            self._issued += len(tickets)

    def heartbeat(self, generator: int, version: int, now_s: float) -> None:
        """The generator is up and has `version` loaded."""
        self._heard[generator] = (version, now_s)

    def lease(
        self, generator: int, version: int, num_prompts: int, now_s: float, *, session: str = "", number: int = -1
    ) -> list[Lease]:
        """Up to so many prompts for a generator that has `version` loaded; `number` is of the ask in its session."""
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
        """Prompts of this version are left to hand out."""
        evaluation = self._running.get(version)
        return evaluation is not None and bool(evaluation.open)

    def leases_of(self, generator: int) -> list[tuple[Lease, str, int]]:
        """What the generator holds now, each with the session and the number of the ask that got it."""
        return [
            (self._lease(evaluation, ticket), held.session, held.number)
            for evaluation in self._running.values()
            for ticket, held in evaluation.leased.items()
            if held.generator == generator
        ]

    def wants(self, result: EvaluatedBody) -> bool:
        """False for a result that came before, or that is of an evaluation given up. Raises ProtocolError."""
        evaluation = self._running.get(result["version"])
        ticket = result["ticket"]
        if evaluation is None or ticket in evaluation.scores:
            return False
        if ticket not in evaluation.attempts or result["attempt"] > evaluation.attempts[ticket]:
            raise ProtocolError(f"evaluation ticket {ticket} of version {result['version']} was never handed out")
        self._check(result)
        return True

    def finish(self, result: EvaluatedBody) -> None:
        """Counts an evaluated prompt; of several attempts the first that arrives. Raises ProtocolError."""
        if not self.wants(result):
            return
        evaluation, ticket = self._running[result["version"]], result["ticket"]
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
        """What is leased counts as leased at `now_s`."""
        for evaluation in self._running.values():
            for held in evaluation.leased.values():
                held.renewed_s = now_s

    def renew(self, generator: int, ticket: int, attempt: int, now_s: float) -> None:
        """The generator works on the prompt; nothing changes unless it holds its lease."""
        for evaluation in self._running.values():
            held = evaluation.leased.get(ticket)
            if held is not None and (held.generator, held.attempt) == (generator, attempt):
                held.renewed_s = now_s

    def release(self, leases: Iterable[ReleasedEvaluation]) -> None:
        """Takes back prompts that a generator will not finish."""
        for lease in leases:
            for evaluation in self._running.values():
                held = evaluation.leased.get(lease["ticket"])
                if held is not None and held.attempt == lease["attempt"]:
                    del evaluation.leased[lease["ticket"]]
                    evaluation.open.append(lease["ticket"])

    def expired(self, now_s: float) -> list[ReleasedEvaluation]:
        """Prompts whose leases were not renewed for `replay.lease_timeout_s`."""
        found: list[ReleasedEvaluation] = []
        for evaluation in self._running.values():
            for ticket, held in evaluation.leased.items():
                if now_s - held.renewed_s > self._config.replay.lease_timeout_s:
                    log.warning("evaluation lease expired", ticket=ticket, generator=held.generator)
                    found.append({"ticket": ticket, "attempt": held.attempt})
        return found

    def stranded(self, now_s: float) -> list[int]:
        """Versions under evaluation with prompts left that no generator will ask for any more."""
        return [
            evaluation.version
            for evaluation in self._running.values()
            if self._heard and not evaluation.leased and not self._may_come(evaluation.version, now_s)
        ]

    def expire(self, now_s: float) -> None:
        """Takes back what is `expired`, and gives up what is `stranded`."""
        self.release(self.expired(now_s))
        for version in self.stranded(now_s):
            self.drop(version, STRANDED)

    def drop(self, version: int, reason: str) -> None:
        """Gives up the evaluation of a version."""
        evaluation = self._running.pop(version)
        done, total = len(evaluation.scores), len(self._prompts)
        self.dropped.append({"version": version, "reason": reason, "done": done, "prompts": total})
        log.warning("evaluation dropped", version=version, reason=reason, done=done, prompts=total)

    def drop_all(self, reason: str) -> None:
        """Gives up what is due or under way."""
        for version in list(self._running):
            self.drop(version, reason)

    def next_metrics(self) -> dict[str, float]:
        """The oldest result that was not given out before, as metrics named `eval/...`; empty when there is none."""
        return eval_metrics(self._unreported.popleft() if self._unreported else {})

    def unreported(self, after: int) -> dict[str, Any] | None:
        """The result that follows so many others of those that `next_metrics` has not given out."""
        return self._unreported[after] if after < len(self._unreported) else None

    def reported_stats(self) -> list[list[int]]:
        """Generator and version of each that was heard."""
        return [[generator, version] for generator, (version, _) in self._heard.items()]

    def load_reported_stats(self, told: Sequence[Sequence[int]], now_s: float | None) -> None:
        """They count as heard at `now_s`; nobody does when it is None."""
        self._heard = {} if now_s is None else {generator: (version, now_s) for generator, version in told}

    def state_dict(self) -> dict[str, Any]:
        """All but what is told, made of what msgpack can carry; leases without their age."""
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
        """Goes on from a state; what is leased counts as leased at `now_s`."""
        running = [Evaluation.of_state(one, now_s) for one in state["running"]]
        self._running = {evaluation.version: evaluation for evaluation in running}
        self._issued, self._step = state["issued"], state["step"]
        self._unreported = deque(state["unreported"])
        self.ended, self.dropped = list(state["ended"]), list(state["dropped"])
        self.prompts_done, self.tokens = state["prompts_done"], state["tokens"]

    def status(self) -> dict[str, Any]:
        """What a live view shows."""
        progress = [
            {"version": e.version, "done": len(e.scores), "prompts": len(self._prompts)} for e in self._running.values()
        ]
        return {
            "prompts_done": self.prompts_done,
            "running": progress,
            "last": self.ended[-1] if self.ended else None,
        }

    def summary(self) -> dict[str, Any]:
        """The evaluations' part of the run's summary, by version: generators on different versions may end them in
        another order. Empty when the run has none."""
        if not self._prompts:
            return {}
        results = sorted(self.ended, key=lambda result: result["version"])
        return {"eval": results, "eval_tokens": self.tokens, "eval_dropped": self.dropped}

    def _check(self, result: EvaluatedBody) -> None:
        where = f"evaluation ticket {result['ticket']}"
        for name in ("rewards", "status"):
            if len(result[name]) != self._config.eval.samples:
                raise ProtocolError(f"{where}: {len(result[name])} {name}, expected {self._config.eval.samples}")
        if not all(map(math.isfinite, result["rewards"])):
            raise ProtocolError(f"{where}: rewards {result['rewards']} are not finite")

    def _may_come(self, version: int, now_s: float) -> bool:
        """Whether a generator that lives has the version loaded or can still load it."""
        limit_s = self._config.replay.lease_timeout_s
        return any(loaded <= version and now_s - heard_s <= limit_s for loaded, heard_s in self._heard.values())

    def _lease(self, evaluation: Evaluation, ticket: int) -> Lease:
        prompt = self._prompts[ticket - evaluation.first]
        return Lease(ticket, evaluation.attempts[ticket], prompt, evaluation=True)

    def _end(self, evaluation: Evaluation) -> None:
        del self._running[evaluation.version]
        result = {"version": evaluation.version, "at_step": self._step, **score_table(evaluation.scores.values())}
        self.ended.append(result)
        self._unreported.append(result)
        log.info("evaluation done", version=evaluation.version, reward=result["reward"], at_step=self._step)
