"""Evaluations: the prompts of each policy version that are open, leased or scored, and their results.

Every due version (`Config.evaluates`) is evaluated on the same prompts. Only a generator that has that version
loaded leases them, and it keeps that version until no prompt is open; so an evaluation measures exactly one version.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Self

import numpy as np
import structlog
from msgspec import field

from asyncrl.config.config import Config
from asyncrl.errors import ProtocolError
from asyncrl.observe.stats import ReportedStats
from asyncrl.types import Lease, Prompt, Status
from asyncrl.util.durable import Durable
from asyncrl.wire.messages import Evaluated, ReleasedEvaluation

log = structlog.get_logger()

STRANDED = "no generator has the version any more"
CORRECT = 1.0 - 1e-6
"""A completion with at least this reward is correct."""


class PromptScore(Durable):
    """The result of one evaluation prompt."""

    data_source: str
    rewards: list[float]
    """Reward of each completion; 0 for a failed one."""
    status: list[Status]
    tokens: int
    """Tokens of all completions."""

    @classmethod
    def of(cls, result: Evaluated) -> Self:
        """The score of an evaluated prompt."""
        return cls(result.data_source, result.rewards, result.status, result.tokens)

    @property
    def num_correct(self) -> int:
        """Completions with a reward of at least CORRECT."""
        return sum(
            reward >= CORRECT and status != "failed" for reward, status in zip(self.rewards, self.status, strict=True)
        )


class EvalLease(Durable):
    """The lease of one prompt."""

    generator: int
    attempt: int
    session: str
    number: int
    """Number, in its session, of the ask that got the lease."""


class Evaluation(Durable):
    """One version under evaluation; its tickets start at `first`, in the order of the prompts."""

    version: int
    first: int
    open: list[int]
    """Tickets that are not leased."""
    leased: dict[int, EvalLease] = field(default_factory=dict[int, EvalLease])
    attempts: dict[int, int] = field(default_factory=dict[int, int])
    scores: dict[int, PromptScore] = field(default_factory=dict[int, PromptScore])


class EvalRecord(Durable):
    """The stored part of `Evaluations`: those that are due or under way, and the results of the others."""

    running: dict[int, Evaluation] = field(default_factory=dict[int, Evaluation])
    """By version."""
    issued: int = 0
    """Tickets issued so far; the next one's number."""
    unreported_results: list[dict[str, int | float]] = field(default_factory=list[dict[str, int | float]])
    """Results that no commit has reported."""
    step: int = 0
    """Steps committed."""
    ended: list[dict[str, int | float]] = field(default_factory=list[dict[str, int | float]])
    """Results of the complete evaluations: version, at_step, and the metrics of `score_table`."""
    dropped: list[dict[str, int | str]] = field(default_factory=list[dict[str, int | str]])
    """Version and reason of each evaluation that was dropped, and how many of its prompts had been scored."""
    prompts_done: int = 0
    tokens: int = 0
    """Tokens sampled for evaluated prompts."""


class Evaluations(EvalRecord, kw_only=True):
    """All evaluations of a run. It reads no clock: methods that need the time get it as `now_s`, seconds of the run."""

    config: Config
    prompts: Sequence[Prompt] = ()
    reported: ReportedStats = field(default_factory=ReportedStats)

    def __post_init__(self) -> None:
        self.committed(0, due=self.config.evaluates(0))

    def committed(self, version: int, *, due: bool) -> None:
        """Registers a new policy version; its evaluation starts now if it is `due`."""
        self.step = version
        if self.prompts and due:
            tickets = range(self.issued, self.issued + len(self.prompts))
            self.running[version] = Evaluation(version, self.issued, list(tickets))
            self.issued += len(tickets)

    def heartbeat(self, generator: int, version: int, now_s: float) -> None:
        """Records that the generator is up and has `version` loaded."""
        self.reported.loaded[generator] = (version, now_s)

    def lease(
        self, generator: int, version: int, num_prompts: int, now_s: float, *, session: str = "", number: int = -1
    ) -> list[Lease]:
        """Leases `next_leases` to a generator that has `version` loaded; `number` counts the asks of its session."""
        self.heartbeat(generator, version, now_s)
        leases = self.next_leases(version, num_prompts)
        for lease in leases:
            evaluation = self.running[version]
            evaluation.open.remove(lease.ticket)
            evaluation.attempts[lease.ticket] = lease.attempt
            evaluation.leased[lease.ticket] = EvalLease(generator, lease.attempt, session, number)
        return leases

    def next_leases(self, version: int, num_prompts: int) -> list[Lease]:
        """The leases that up to `num_prompts` prompts of the version would get."""
        evaluation = self.running.get(version)
        if evaluation is None or not num_prompts:
            return []
        tickets = evaluation.open[:num_prompts]
        return [self._lease(evaluation, ticket, evaluation.attempts.get(ticket, -1) + 1) for ticket in tickets]

    def left(self, version: int) -> bool:
        """True if prompts of this version are open."""
        evaluation = self.running.get(version)
        return evaluation is not None and bool(evaluation.open)

    def leases_of(self, generator: int) -> list[tuple[Lease, str, int]]:
        """The leases that the generator holds, each with the session and number of the ask that got it."""
        return [
            (self._lease(evaluation, ticket, held.attempt), held.session, held.number)
            for evaluation in self.running.values()
            for ticket, held in evaluation.leased.items()
            if held.generator == generator
        ]

    def held(self) -> Iterator[tuple[int, int, int]]:
        """(generator, ticket, attempt) of every prompt that is leased."""
        for evaluation in self.running.values():
            for ticket, held in evaluation.leased.items():
                yield held.generator, ticket, held.attempt

    def wants(self, result: Evaluated) -> bool:
        """False for a repeated result, or one whose evaluation has ended. Raises ProtocolError for a wrong one."""
        evaluation = self.running.get(result.version)
        ticket = result.ticket
        if evaluation is None or ticket in evaluation.scores:
            return False
        if ticket not in evaluation.attempts or result.attempt > evaluation.attempts[ticket]:
            raise ProtocolError(f"evaluation ticket {ticket} of version {result.version} was never leased")
        where, samples = f"evaluation ticket {ticket}", self.config.eval.samples
        for name in ("rewards", "status"):
            if (count := len(getattr(result, name))) != samples:
                raise ProtocolError(f"{where}: {count} {name}, expected {samples}")
        if not all(map(math.isfinite, result.rewards)):
            raise ProtocolError(f"{where}: rewards {result.rewards} are not finite")
        return True

    def finish(self, result: Evaluated) -> None:
        """Counts an evaluated prompt: the first result that arrives for it. Raises ProtocolError for a wrong one."""
        if not self.wants(result):
            return
        evaluation, ticket = self.running[result.version], result.ticket
        evaluation.leased.pop(ticket, None)
        if ticket in evaluation.open:
            evaluation.open.remove(ticket)
        evaluation.scores[ticket] = PromptScore.of(result)
        self.prompts_done += 1
        self.tokens += result.tokens
        if len(evaluation.scores) == len(self.prompts):
            self._end(evaluation)

    def release(self, leases: Iterable[ReleasedEvaluation]) -> None:
        """Takes back prompts that a generator will not finish."""
        for lease in leases:
            for evaluation in self.running.values():
                held = evaluation.leased.get(lease.ticket)
                if held is not None and held.attempt == lease.attempt:
                    del evaluation.leased[lease.ticket]
                    evaluation.open.append(lease.ticket)

    def stranded(self, now_s: float) -> list[int]:
        """Versions under evaluation that no running generator has loaded or can still load."""
        return [
            evaluation.version
            for evaluation in self.running.values()
            if self.reported.loaded and not evaluation.leased and not self._may_come(evaluation.version, now_s)
        ]

    def drop(self, version: int, reason: str) -> None:
        """Drops the evaluation of a version."""
        evaluation = self.running.pop(version)
        done, total = len(evaluation.scores), len(self.prompts)
        self.dropped.append({"version": version, "reason": reason, "done": done, "prompts": total})
        log.warning("evaluation dropped", version=version, reason=reason, done=done, prompts=total)

    def drop_all(self, reason: str) -> None:
        """Drops all evaluations that are due or under way."""
        for version in list(self.running):
            self.drop(version, reason)

    def unreported(self, after: int) -> dict[str, Any] | None:
        """The unreported result that follows `after` others; None if there is none."""
        return self.unreported_results[after] if after < len(self.unreported_results) else None

    def status(self) -> dict[str, Any]:
        """The progress of evaluations, for live views."""
        progress = [
            {"version": evaluation.version, "done": len(evaluation.scores), "prompts": len(self.prompts)}
            for evaluation in self.running.values()
        ]
        last = self.ended[-1] if self.ended else None
        return {"prompts_done": self.prompts_done, "running": progress, "last": last}

    def summary(self) -> dict[str, Any]:
        """The evaluations' part of the run's summary, sorted by version: evaluations may end in another order. Empty
        for a run without evaluation prompts."""
        if not self.prompts:
            return {}
        results = sorted(self.ended, key=lambda result: result["version"])
        return {"eval": results, "eval_tokens": self.tokens, "eval_dropped": self.dropped}

    def _may_come(self, version: int, now_s: float) -> bool:
        """True if a running generator has the version loaded or can still load it."""
        launch = self.config.launch
        limit_s = launch.heartbeat_timeout_s + launch.start_timeout_s  # until a restarted one asks
        loaded = self.reported.loaded.values()
        return any(newest <= version and now_s - heard_s <= limit_s for newest, heard_s in loaded)

    def _lease(self, evaluation: Evaluation, ticket: int, attempt: int) -> Lease:
        return Lease(ticket, attempt, self.prompts[ticket - evaluation.first], evaluation=True)

    def _end(self, evaluation: Evaluation) -> None:
        del self.running[evaluation.version]
        result = {"version": evaluation.version, "at_step": self.step, **score_table(evaluation.scores.values())}
        self.ended.append(result)
        self.unreported_results.append(result)
        log.info("evaluation done", version=evaluation.version, reward=result.get("reward"), at_step=self.step)


# --- metrics


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Unbiased estimate of the probability that one of k samples is correct: 1 - C(n - c, k) / C(n, k)
    (arXiv:2107.03374 eq. 1)."""
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def pass_ks(num_samples: int) -> list[int]:
    """The values of k that are reported: 1, 2, 4, ... and the number of samples."""
    return [*(1 << i for i in range(num_samples.bit_length()) if 1 << i < num_samples), num_samples]


def score_table(scores: Iterable[PromptScore]) -> dict[str, float]:
    """`reward`, `pass@k`, `completion_tokens` (mean), `truncated` (fraction of completions), `failed` (completions
    without a reward; they are not correct, and `reward` is the mean of the others) and `prompts`; over all prompts,
    each with the same weight, and again for each data source as `<data source>/<name>`. Without any reward there is no
    `reward`."""
    scores = list(scores)
    table = _table(scores)
    for source in sorted({score.data_source for score in scores}):
        of_source = _table([score for score in scores if score.data_source == source])
        table |= {f"{source}/{name}": value for name, value in of_source.items()}
    return table


def _table(scores: Sequence[PromptScore]) -> dict[str, float]:
    num_samples = len(scores[0].rewards)
    completions = num_samples * len(scores)
    pairs = [pair for score in scores for pair in zip(score.rewards, score.status, strict=True)]
    status = [status for _, status in pairs]
    rewards = [reward for reward, status in pairs if status != "failed"]
    passes = {
        f"pass@{k}": float(np.mean([pass_at_k(num_samples, score.num_correct, k) for score in scores]))
        for k in pass_ks(num_samples)
    }
    return {
        **({"reward": float(np.mean(rewards))} if rewards else {}),
        **passes,
        "completion_tokens": sum(score.tokens for score in scores) / completions,
        "truncated": status.count("truncated") / completions,
        "failed": float(status.count("failed")),
        "prompts": float(len(scores)),
    }


def eval_metrics(result: dict[str, Any]) -> dict[str, float]:
    """The result of an evaluation as metrics named `eval/...`."""
    return {f"eval/{name}": float(value) for name, value in result.items()}
