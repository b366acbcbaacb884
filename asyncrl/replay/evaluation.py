"""Evaluations: which prompts of which policy version are handed out, done or given up, and their results.

Every due version (`Config.evaluates`) is evaluated on the same prompts. Only a generator that has that version
loaded gets them, and it keeps the version until none is left; so an evaluation is of exactly one version.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import structlog

from asyncrl.config import Config
from asyncrl.errors import ProtocolError
from asyncrl.replay.messages import EvaluatedBody, ReleasedEvaluation
from asyncrl.replay.scores import PromptScore, score_table
from asyncrl.types import Lease, Prompt

log = structlog.get_logger()


@dataclass(slots=True)
class _Leased:
    generator: int
    attempt: int
    leased_s: float


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
        self.committed(0)

    @property
    def running(self) -> bool:
        """Evaluations are due or under way."""
        return bool(self._running)

    def committed(self, version: int) -> None:
        """The learner has made this version; it is evaluated from now on if it is due."""
        self._step = version
        if self._prompts and self._config.evaluates(version):
            tickets = range(self._issued, self._issued + len(self._prompts))
            self._running[version] = Evaluation(version, self._issued, deque(tickets))
            self._issued += len(tickets)

    def lease(self, generator: int, version: int, num_prompts: int, now_s: float) -> list[Lease]:
        """Up to so many prompts for a generator that has `version` loaded."""
        self._heard[generator] = (version, now_s)
        evaluation = self._running.get(version)
        leases: list[Lease] = []
        while evaluation is not None and evaluation.open and len(leases) < num_prompts:
            ticket = evaluation.open.popleft()
            attempt = evaluation.attempts.get(ticket, -1) + 1
            evaluation.attempts[ticket] = attempt
            evaluation.leased[ticket] = _Leased(generator, attempt, now_s)
            leases.append(Lease(ticket, attempt, self._prompts[ticket - evaluation.first], evaluation=True))
        return leases

    def left(self, version: int) -> bool:
        """Prompts of this version are left to hand out."""
        evaluation = self._running.get(version)
        return evaluation is not None and bool(evaluation.open)

    def finish(self, result: EvaluatedBody) -> None:
        """Counts an evaluated prompt; of several attempts the first that arrives. Raises ProtocolError."""
        evaluation = self._running.get(result["version"])
        ticket = result["ticket"]
        if evaluation is None or ticket in evaluation.scores:
            return  # sent twice, or given up
        if ticket not in evaluation.attempts or result["attempt"] > evaluation.attempts[ticket]:
            raise ProtocolError(f"evaluation ticket {ticket} of version {result['version']} was never handed out")
        self._check(result)
        evaluation.leased.pop(ticket, None)
        if ticket in evaluation.open:
            evaluation.open.remove(ticket)
        score = PromptScore(result["data_source"], result["rewards"], result["status"], result["tokens"])
        evaluation.scores[ticket] = score
        self.prompts_done += 1
        self.tokens += score.tokens
        if len(evaluation.scores) == len(self._prompts):
            self._end(evaluation)

    def release(self, leases: Iterable[ReleasedEvaluation]) -> None:
        """Takes back prompts that a generator will not finish."""
        for lease in leases:
            for evaluation in self._running.values():
                held = evaluation.leased.get(lease["ticket"])
                if held is not None and held.attempt == lease["attempt"]:
                    self._reopen(evaluation, lease["ticket"])

    def expire(self, now_s: float) -> None:
        """Takes back prompts leased for longer than `replay.lease_timeout_s`, and gives up evaluations with prompts
        left that no generator will ask for any more."""
        for evaluation in list(self._running.values()):
            for ticket, held in list(evaluation.leased.items()):
                if now_s - held.leased_s > self._config.replay.lease_timeout_s:
                    log.warning("evaluation lease expired", ticket=ticket, generator=held.generator)
                    self._reopen(evaluation, ticket)
            if self._heard and not evaluation.leased and not self._may_come(evaluation.version, now_s):
                self._drop(evaluation, "no generator has the version any more")

    def drop_all(self, reason: str) -> None:
        """Gives up what is due or under way."""
        for evaluation in list(self._running.values()):
            self._drop(evaluation, reason)

    def next_result(self) -> dict[str, Any] | None:
        """The oldest result that was not given out before."""
        return self._unreported.popleft() if self._unreported else None

    def next_metrics(self) -> dict[str, float]:
        """That result as metrics, named `eval/...`; empty when there is none."""
        return eval_metrics(self.next_result() or {})

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

    def _reopen(self, evaluation: Evaluation, ticket: int) -> None:
        del evaluation.leased[ticket]
        evaluation.open.append(ticket)

    def _end(self, evaluation: Evaluation) -> None:
        del self._running[evaluation.version]
        result = {"version": evaluation.version, "at_step": self._step, **score_table(evaluation.scores.values())}
        self.ended.append(result)
        self._unreported.append(result)
        log.info("evaluation done", version=evaluation.version, reward=result["reward"], at_step=self._step)

    def _drop(self, evaluation: Evaluation, reason: str) -> None:
        del self._running[evaluation.version]
        done, total = len(evaluation.scores), len(self._prompts)
        self.dropped.append({"version": evaluation.version, "reason": reason, "done": done, "prompts": total})
        log.warning("evaluation dropped", version=evaluation.version, reason=reason, done=done, prompts=total)


def eval_metrics(result: dict[str, Any]) -> dict[str, float]:
    """A result of `EvalBook.ended` under the names that metrics have."""
    return {f"eval/{name}": float(value) for name, value in result.items()}
