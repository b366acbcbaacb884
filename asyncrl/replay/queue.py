"""The replay queue's state and rules, without sockets: who may start, what is finished, who gets which groups."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import structlog

from asyncrl.config import Config
from asyncrl.errors import ProtocolError, RunError
from asyncrl.replay.evaluation import EvalBook, eval_metrics
from asyncrl.replay.held import Held, PromptSource, Step
from asyncrl.replay.ledger import Ledger, State, balance
from asyncrl.replay.measure import RunMeasure
from asyncrl.replay.messages import GroupMeta, ReleasedLease
from asyncrl.replay.trace import TraceWriter
from asyncrl.replay.wire import Array, check_group
from asyncrl.types import Lease, Prompt

log = structlog.get_logger()

SAME_REWARD = 1e-6
"""Rewards of a group that differ by less carry no signal."""


class ReplayQueue:
    """Hands out leases by admission, keeps finished groups, deals batches, counts everything.

    Every method is one message of the wire; the server calls them one at a time.
    """

    def __init__(
        self, config: Config, prompts: PromptSource, trace: TraceWriter, eval_prompts: Sequence[Prompt] = ()
    ) -> None:
        self.config = config
        self.evaluation = EvalBook(config, eval_prompts)
        self.prompts = prompts
        self.trace = trace
        self.measure = RunMeasure(config)
        self.ledger = Ledger(
            groups_per_step=config.replay.groups_per_step,
            max_staleness=config.replay.max_staleness,
            in_order=config.replay.order == "ticket",
        )
        self.held: dict[int, Held] = {}
        self.held_bytes = 0
        self.leased_by: Counter[int] = Counter()
        """Unfinished leases of each generator."""
        self.step: Step | None = None
        self.stop_reason = ""
        self.refunds_in_a_row = 0
        self.duplicates = 0

    @property
    def share(self) -> int:
        """Leases that one generator may hold, so that the first to ask does not leave the others idle."""
        admitted = (self.config.replay.max_staleness + 1) * self.config.replay.groups_per_step
        return -(-admitted // self.config.launch.generators)

    @property
    def trained(self) -> bool:
        """No more groups are wanted: all steps are committed, or the run was asked to stop."""
        return bool(self.stop_reason) or self.ledger.steps >= self.config.steps

    @property
    def done(self) -> bool:
        """Generators have nothing left to do."""
        return self.trained and not self.evaluation.running

    def ask(
        self, generator: int, version: int, num_groups: int, stats: dict[str, Any], num_evaluations: int = 0
    ) -> tuple[list[Lease], str]:
        """Leases for a generator that has `version` loaded, those of evaluation prompts first, and what limits the
        number of the others ("" when nothing does)."""
        if version > self.ledger.steps:
            raise ProtocolError(
                f"generator {generator} claims version {version}, the learner is at {self.ledger.steps}"
            )
        self.measure.heard(generator, version, stats)
        leases = self.evaluation.lease(generator, version, num_evaluations, time.monotonic())
        for _ in range(0 if self.trained else num_groups):
            if not self.ledger.can_lease(version):
                return leases, "staleness"
            if self.leased_by[generator] >= self.share:
                return leases, "share"
            if self._full():
                return leases, "bytes"
            leases.append(self._lease(generator, version))
        return leases, ""

    def finish(self, meta: GroupMeta, arrays: list[Array]) -> None:
        """Keeps a finished group, or refunds it; a group that arrives twice counts once."""
        check_group(meta, arrays, group_size=self.config.generator.group_size)
        newest = int(arrays[3].max())
        if newest > self.ledger.steps:
            raise ProtocolError(f"ticket {meta['ticket']} has version {newest}, the learner is at {self.ledger.steps}")
        tokens = int(arrays[1].sum())
        held = self.held.get(meta["ticket"])
        if held is None or not self.ledger.is_current(meta["ticket"], meta["attempt"]):
            self._superseded(meta, held, tokens)
            return
        if meta["row"] != held.prompt.row:
            raise ProtocolError(f"ticket {meta['ticket']} is for row {held.prompt.row}, not {meta['row']}")
        self.ledger.finish(meta["ticket"], trajectories=len(meta["lengths"]), tokens=tokens)
        self.leased_by[held.generator] -= 1
        held.meta, held.arrays = meta, arrays
        reason = self._refund_reason(meta)
        if reason != "failed":
            self.measure.scored(meta, arrays)
        if reason:
            self._refund(meta["ticket"], reason)
        else:
            self.refunds_in_a_row = 0
            self.held_bytes += held.num_bytes

    def release(self, generator: int, leases: list[ReleasedLease]) -> None:
        """Takes back what a generator will not finish, with the tokens that are lost by it."""
        for lease in leases:
            number, attempt, tokens = lease["ticket"], lease["attempt"], lease["tokens"]
            if self.ledger.is_current(number, attempt):
                self._give_back(number, tokens)
                log.info("lease returned", ticket=number, attempt=attempt, generator=generator, tokens=tokens)

    def expire(self, now_s: float) -> None:
        """Returns leases older than `replay.lease_timeout_s`."""
        self.evaluation.expire(now_s)
        limit_s = self.config.replay.lease_timeout_s
        for number, held in self.held.items():
            if now_s - held.leased_s > limit_s and self.ledger.is_current(number, held.attempt):
                self._give_back(number, 0)
                log.warning("lease expired", ticket=number, generator=held.generator, limit_s=limit_s)

    def take(self, rank: int, step: int) -> tuple[str, list[Held]]:
        """("shard", groups), ("wait", []) while the batch is not complete, or ("stop", []) when none will come.

        Asked again for the same step, a rank gets the same groups.
        """
        if not 0 <= rank < self.config.launch.learners:
            raise ProtocolError(f"learner rank {rank} of {self.config.launch.learners}")
        self.measure.learners.add(rank)
        if step != self.ledger.steps + 1:
            raise ProtocolError(f"learner rank {rank} takes step {step}, the next one is {self.ledger.steps + 1}")
        if self.step is None:
            if self.trained:
                return "stop", []
            self.step = self._compose(step)
            if self.step is None:
                return "wait", []
        return "shard", [self.held[number] for number in self.step.shards[rank]]

    def commit(self, step: int, metrics: dict[str, float]) -> dict[str, float]:
        """Ends the step in progress: its groups are trained. Gives the step's metrics of this side, with those of an
        evaluation that ended."""
        if self.step is None or step != self.step.number:
            raise ProtocolError(f"commit of step {step}, in progress is {self.step and self.step.number}")
        now_s = time.monotonic()
        numbers = self.ledger.commit()
        groups = [self.held.pop(number) for number in numbers]
        for held in groups:
            self.held_bytes -= held.num_bytes
            self._record(held, "trained", trained_s=now_s, train_version=step - 1)
        self.step = None
        self.ledger.check()
        queue = {
            "replay/finished_groups": float(self.ledger.count(State.FINISHED)),
            "replay/leased_groups": float(self.ledger.count(State.LEASED)),
            "replay/held_bytes": float(self.held_bytes),
            "replay/refunded_groups": float(sum(a.groups for a in self.ledger.refunded.values())),
        }
        arrays = [held.arrays for held in groups]
        self.evaluation.committed(step)
        own = queue | self.measure.committed(step, arrays, metrics, self.ledger)
        return own | self.evaluation.next_metrics()

    def next_evaluation(self) -> tuple[str, int, dict[str, float]]:
        """("ended", step, metrics) of an evaluation that no commit has reported, ("wait", 0, {}) while more are to
        come, or ("none", 0, {})."""
        result = self.evaluation.next_result()
        if result is not None:
            return "ended", result["at_step"], eval_metrics(result)
        return "none" if self.done else "wait", 0, {}

    def stop(self, reason: str) -> None:
        self.stop_reason = self.stop_reason or reason
        self.evaluation.drop_all(f"the run stopped: {reason}")
        log.info("stopping", reason=reason)

    def status(self) -> dict[str, Any]:
        """What a live view shows."""
        status = self.measure.status(self.ledger) | {"done": self.done, "duplicates": self.duplicates}
        status["eval"] = self.evaluation.status()
        for index, generator in status["generators"].items():
            generator["leased"] = self.leased_by[int(index)]
        return status

    def summary(self) -> dict[str, Any]:
        """The queue's part of the run's summary."""
        return self.measure.summary(self.ledger) | {
            "duplicates": self.duplicates,
            "skipped_rows": self.prompts.skipped_rows,
            **self.evaluation.summary(),
        }

    def close(self) -> None:
        """Writes what is in flight to the trace and closes it."""
        for held in self.held.values():
            if held.meta is not None:
                self._record(held, "in_flight")
        self.trace.close()

    def _give_back(self, number: int, tokens: int) -> None:
        self.ledger.give_back(number, tokens=tokens)
        self.leased_by[self.held[number].generator] -= 1

    def _full(self) -> bool:
        """Above the ceiling only what the next batch needs may still start."""
        over = self.held_bytes >= self.config.replay.max_bytes
        return over and len(self.ledger.live) >= self.config.replay.groups_per_step

    def _lease(self, generator: int, version: int) -> Lease:
        ticket = self.ledger.lease(version)
        held = self.held.get(ticket.number)
        prompt = held.prompt if held is not None else next(self.prompts)
        self.leased_by[generator] += 1
        self.held[ticket.number] = Held(prompt, time.monotonic(), generator, ticket.attempt)
        return Lease(ticket.number, ticket.attempt, prompt)

    def _superseded(self, meta: GroupMeta, held: Held | None, tokens: int) -> None:
        if held is not None and held.attempt == meta["attempt"] and held.meta is not None:
            self.duplicates += 1
            return
        if held is None or meta["attempt"] >= held.attempt:
            self.duplicates += 1
            log.warning("group of an unknown ticket", ticket=meta["ticket"], attempt=meta["attempt"])
            return
        self.ledger.lose(tokens)
        log.warning("group of a lease that was handed on", ticket=meta["ticket"], attempt=meta["attempt"])

    def _refund_reason(self, meta: GroupMeta) -> str:
        if "failed" in meta["status"]:
            return "failed"
        if self.config.algorithm.truncated == "mask" and set(meta["status"]) == {"truncated"}:
            return "truncated"
        if self.config.refunds_no_signal and np.ptp(meta["rewards"]) < SAME_REWARD:
            return "no_signal"
        return ""

    def _refund(self, number: int, reason: str) -> None:
        self.ledger.refund(number, reason)
        held = self.held.pop(number)
        self._record(held, reason)
        if reason == "failed":
            errors = [error for error in held.finished["errors"] if error]
            log.warning("group failed", ticket=number, row=held.prompt.row, error=errors[0] if errors else "")
        self.refunds_in_a_row += 1
        limit = self.config.replay.max_refunds_in_a_row
        if self.refunds_in_a_row >= limit:
            counts = {name: amount.groups for name, amount in self.ledger.refunded.items()}
            raise RunError(
                f"the last {limit} groups gave no training signal (refunded so far: {counts}): rewards are all equal "
                "or failing; look at the reward function and the difficulty of the data, or set "
                "replay.no_signal=train or a higher replay.max_refunds_in_a_row"
            )

    def _compose(self, step: int) -> Step | None:
        settings = self.config.replay
        if self.ledger.count(State.FINISHED) < (settings.held_steps + 1) * settings.groups_per_step:
            return None
        numbers = self.ledger.select()
        if numbers is None:
            return None
        self.ledger.take(numbers)
        now_s = time.monotonic()
        costs: list[int] = []
        for number in numbers:
            held = self.held[number]
            held.taken_s = now_s
            costs.append(sum(held.finished["lengths"]))
        shards = balance(costs, self.config.launch.learners)
        return Step(step, [[numbers[index] for index in shard] for shard in shards])

    def _record(self, held: Held, outcome: str, *, trained_s: float = float("nan"), train_version: int = -1) -> None:
        self.trace.add(
            held.finished,
            held.arrays[1],
            outcome=outcome,
            taken_s=held.taken_s or float("nan"),
            trained_s=trained_s,
            train_version=train_version,
            origin_s=self.measure.origin_s,
        )
