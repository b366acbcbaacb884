"""Evaluation in the generator's loop, with a real engine: pinned to one version, during training, released."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from generator_fakes import FakeClient, FakeRewards, lease, lease_reply
from generator_model import make_loop, run_all, weights_of
from transformers import Qwen2ForCausalLM

from asyncrl.generator.engine import Completion, Engine
from asyncrl.generator.groups import GroupInProgress, make_evaluated
from asyncrl.rewards.pool import Scored
from asyncrl.types import NO_VERSION, Lease
from asyncrl.wire.messages import Leases

Policies = list[Qwen2ForCausalLM]

EVALUATING = {"data__eval": "eval.parquet", "eval__every_steps": 2, "eval__samples": 3, "steps": 100}


@pytest.fixture
def engine(make_engine: Callable[..., Engine]) -> Engine:
    engine = make_engine(**EVALUATING, eval__sampling={"temperature": 0.0})
    engine.abort(list(engine._requests))
    engine.version = NO_VERSION
    return engine


def eval_lease(ticket: int) -> Lease:
    given = lease(ticket, [3 + ticket % 50, 9, 4])
    return Lease(ticket, 0, given.prompt, evaluation=True)


@dataclass
class Queue:
    """Training leases without end, and a number of evaluation prompts of each version."""

    evaluations: dict[int, int]
    client: FakeClient | None = None
    issued: int = 0
    open: dict[int, deque[Lease]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for version, count in self.evaluations.items():
            self.open[version] = deque(eval_lease(1000 * version + index) for index in range(count))

    def __call__(self, version: int, num_groups: int) -> Leases:
        assert self.client is not None
        waiting = self.open.get(version, deque())
        leases = [waiting.popleft() for _ in range(min(self.client.num_evaluations, len(waiting)))]
        for _ in range(num_groups):
            leases.append(lease(self.issued, [3 + self.issued % 50, 9, 4, 17]))
            self.issued += 1
        return lease_reply(leases, False, "", evaluations_left=bool(waiting))


def evaluating_loop(engine: Engine, model_path: str, queue: Queue, policies: Policies, **overrides: Any) -> Any:
    queue.client = FakeClient(queue)
    return make_loop(engine, model_path, queue.client, policies, **EVALUATING, **overrides)


def test_due_version_stays_until_its_evaluation_is_done_and_training_goes_on(
    engine: Engine, model_path: str, policies: Policies
) -> None:
    queue = Queue({0: 12, 2: 5})
    loop, client, receiver = evaluating_loop(engine, model_path, queue, policies)
    loop._swap_staged()
    beside: list[int] = []
    while len(client.evaluations) < 12:
        loop.tick()
        if engine.version == 0:
            beside.append(sum(not group.lease.evaluation for group in loop.groups.running.values()))
    share = sum(groups > 0 for groups in beside) / len(beside)
    assert share > 0.5, "training waits for the evaluation"  # for a moment all groups may have ended at once
    assert any(group.start_version == 0 for group in client.groups)
    while len(client.evaluations) < 17:
        loop.tick()
    assert receiver.acknowledged[:3] == [0, 1, 2]
    assert receiver.holds > 10
    assert [result.version for result in client.evaluations] == [0] * 12 + [2] * 5
    tickets = sorted(result.ticket for result in client.evaluations)
    assert tickets == [*range(12), *range(2000, 2005)]
    for result in client.evaluations:
        assert (len(result.rewards), result.data_source) == (3, "test")
        assert sum(result.rewards) == result.tokens > 0
    assert isinstance(loop.groups.rewards, FakeRewards)
    assert sorted(key[0] for key in loop.groups.rewards.evaluated) == tickets
    assert loop.stats.tokens >= sum(group.num_action_tokens for group in client.groups)


@pytest.mark.parametrize("sampling", [{"top_k": 1}, {"min_p": 1.0}])
def test_the_sampling_of_evaluation_is_that_of_the_config(
    make_engine: Callable[..., Engine], policies: Policies, sampling: dict[str, float]
) -> None:
    """A cut that leaves only the likeliest token is greedy."""
    engine = make_engine(**EVALUATING, eval__sampling=sampling)
    engine.swap(0, weights_of(policies[0]))
    for index in range(3):
        engine.add(f"cut {index}", [5, 6, 7], kind="evaluation")
    engine.add("greedy", [5, 6, 7], kind="greedy")
    done = run_all(engine)
    assert len({tuple(done[f"cut {index}"].tokens) for index in range(3)}) == 1
    assert done["cut 0"].tokens == done["greedy"].tokens


def test_a_queue_without_prompts_does_not_hold_a_version(engine: Engine, model_path: str, policies: Policies) -> None:
    loop, _, receiver = evaluating_loop(engine, model_path, Queue({}), policies)
    loop._swap_staged()
    for _ in range(6):
        loop.tick()
    assert receiver.acknowledged == [0, 1, 2]


def test_evaluation_takes_half_of_the_engine_and_all_when_training_may_not_start(
    engine: Engine, model_path: str, policies: Policies
) -> None:
    queue = Queue({0: 100})
    loop, client, _ = evaluating_loop(engine, model_path, queue, policies[:1], generator__max_running_groups=8)
    loop._swap_staged()

    def highest(ticks: int) -> int:
        seen = 0
        for _ in range(ticks):
            loop.tick()
            seen = max(seen, loop.groups.num_evaluating)
        return seen

    assert 4 <= highest(40) <= 8, "at most half of 16"
    queue_of = client.answer
    client.answer = lambda version, num_groups: queue_of(version, 0)
    while any(not group.lease.evaluation for group in loop.groups.running.values()):
        loop.tick()
    assert 8 < highest(40) <= 16


def test_stopping_gives_evaluation_prompts_back(engine: Engine, model_path: str, policies: Policies) -> None:
    loop, client, _ = evaluating_loop(engine, model_path, Queue({0: 100}), policies[:1])
    loop._swap_staged()
    for _ in range(3):
        loop.tick()
    evaluated = {(group.lease.ticket, 0) for group in loop.groups.running.values() if group.lease.evaluation}
    trained = {(group.lease.ticket, 0) for group in loop.groups.running.values() if not group.lease.evaluation}
    assert evaluated and trained
    loop.release()
    assert set(client.released_evaluations) == evaluated
    assert {(ticket, attempt) for ticket, attempt, _ in client.released} == trained
    assert engine.num_running == 0


def test_a_failed_reward_is_0_and_marked() -> None:
    running = GroupInProgress(eval_lease(7), 2, 4, 0.0)
    for index in range(2):
        logprobs, versions = np.zeros(1, dtype=np.float32), np.array([4], dtype=np.int32)
        running.completions[index] = [Completion("x", [1], logprobs, versions, "truncated")]
    result = make_evaluated(running, Scored("x", [float("nan"), 1.0], [{}, {}], ["it broke", ""]))
    assert (result.rewards, result.status, result.tokens) == ([0.0, 1.0], ["failed", "truncated"], 2)
