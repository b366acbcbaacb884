"""A reward that fails is no reward: from the function through queue and journal to the advantages of the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog
import torch
from test_members import FakeRanks

from asyncrl.config.config import Config
from asyncrl.generator.engine import Completion
from asyncrl.generator.groups import GroupInProgress, make_group
from asyncrl.learner.algorithm import make_algorithm
from asyncrl.learner.batch import Batch, collate
from asyncrl.learner.step import ModelScores, estimate
from asyncrl.learner.update import sync_microbatches
from asyncrl.observe.run_metrics import LATEST_GROUPS, FailedRewards
from asyncrl.observe.trace import TraceWriter
from asyncrl.replay.codec import pack_group, unpack_group
from asyncrl.replay.journal import Journal
from asyncrl.replay.queue import ReplayQueue
from asyncrl.rewards.calling import CompletedGroup
from asyncrl.rewards.pool import Scored
from asyncrl.rewards.table import RewardTable
from asyncrl.types import Group, Lease
from tests.helpers.replay import EndlessPrompts, ask_queue, kill_queue, small_config
from tests.helpers.replay import make_group as make_plain_group

LENGTHS = (2, 4, 3, 5)
"""Action tokens of the members of a group."""
JUDGE = """
def judge(solution_str, ground_truth):
    if solution_str == "unreadable":
        raise ValueError("no verdict")
    return None if solution_str == "none" else float(solution_str)
"""


@pytest.fixture
def reward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RewardTable:
    """A judge that gives what the completion says, below 0, and cannot read every completion."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "judge.py").write_text(JUDGE)
    return RewardTable("judge.py:judge")


def scored_group(reward: RewardTable, lease: Lease, texts: list[str], **options: Any) -> Group:
    """The group of a lease with the rewards of these completions, as a generator makes it."""
    scores = reward(CompletedGroup("p", texts, [[1]] * len(texts), "", "test"))
    rewards, parts, errors = zip(*scores, strict=True)
    completions = [
        Completion(str(at), list(range(n)), np.full(n, -0.5, np.float32), np.zeros(n, np.int32), "completed")
        for at, n in enumerate(LENGTHS[: len(texts)])
    ]
    running = GroupInProgress(lease, len(texts), 0, 0.0, completions={at: [one] for at, one in enumerate(completions)})
    scored = Scored((lease.ticket, 0), [reward or 0.0 for reward in rewards], list(parts), list(errors))
    return make_group(running, scored, generator=0, **options)


def open_queue(folder: Path, **options: Any) -> ReplayQueue:
    journal = Journal(folder / "journal", flush="os")
    config = small_config(**{"generator__group_size": 4} | options)
    return ReplayQueue(config, EndlessPrompts(), TraceWriter(folder / "trace.parquet"), (), journal, "launch")


def trained(queue: ReplayQueue) -> tuple[Config, Batch]:
    """The batch of the next step, as a learner packs it."""
    outcome, groups = queue.take(0, 1)
    assert outcome == "shard"
    shard = [unpack_group(header, arrays) for header, arrays in groups]
    return queue.config, collate(shard, queue.config, version=0)


def advantages(config: Config, batch: Batch, values: torch.Tensor | None = None) -> dict[tuple[int, int], float]:
    """The advantage of each packed member's first token."""
    estimates = estimate(make_algorithm(config), batch, ModelScores(values=values), FakeRanks())
    found: dict[tuple[int, int], float] = {}
    for micro in batch.micro_batches:
        own = estimates.advantages[micro.span]
        found |= {name: float(own[micro.seq == at][0]) for at, name in enumerate(micro.names)}
    return found


@pytest.mark.parametrize("advantage", ["grpo", "dr_grpo", "rloo", "opo", "reinforce_plus_plus_baseline", "gae"])
def test_a_group_with_one_failed_member_trains_the_others_only(
    advantage: str, reward: RewardTable, tmp_path: Path
) -> None:
    options = {"algorithm__advantage": advantage}
    found: list[dict[tuple[int, int], float]] = []
    for size, texts in ((4, ["-2.35", "unreadable", "-2.3", "-2.75"]), (3, ["-2.35", "-2.3", "-2.75"])):
        folder = tmp_path / str(size)
        queue = open_queue(folder, generator__group_size=size, **options)
        leases = ask_queue(queue, 0, 0, 2)[0]
        for lease in leases:
            group = scored_group(reward, lease, texts)
            if size == 3:  # the same completions
                kept = scored_group(reward, lease, ["-2.35", "0", "-2.3", "-2.75"])
                for row, other in zip(group.trajectories, np.delete(np.array(kept.trajectories), 1), strict=True):
                    for name in ("tokens", "action_mask", "behavior_logprobs", "versions"):
                        setattr(row, name, getattr(other, name))
                group.arrays = None
            queue.finish(*pack_group(group))
        queue.store.write()
        kill_queue(queue)
        queue = open_queue(folder, generator__group_size=size, **options)
        queue.begin(0, 0)
        config, batch = trained(queue)
        assert (len(batch.rewards), batch.num_members) == (6, [2 * size])
        values = torch.zeros(batch.num_tokens) if advantage == "gae" else None
        found.append(advantages(config, batch, values))
        (minibatch,) = sync_microbatches(batch.minibatches, batch.num_members, FakeRanks(), 1)
        assert minibatch.num_tokens == 2 * (2 + 3 + 5)
        metrics = queue.commit(1, {}).metrics
        assert metrics["reward/mean"] == pytest.approx(np.mean([-2.35, -2.3, -2.75]))
        assert metrics["reward/failed_fraction"] == (0.25 if size == 4 else 0.0)
        assert queue.summary()["ledger"]["refunded"] == {}
        queue.store.close()
    with_failed, without = found
    assert (0, 1) not in with_failed and (1, 1) not in with_failed
    assert list(with_failed.values()) == pytest.approx(list(without.values()))


@pytest.mark.parametrize(
    ("texts", "failed", "reason"),
    [
        (["-1", "unreadable", "unreadable", "unreadable"], "exclude", "failed"),
        (["unreadable"] * 4, "zero", "failed"),
        (["-1", "unreadable", "-1", "-1"], "exclude", "zero_variance"),
        (["-1", "unreadable", "-2", "-1"], "refund", "failed"),
        (["-1", "unreadable", "-2", "-1"], "exclude", ""),
        (["-1", "unreadable", "-1", "-1"], "zero", ""),
    ],
)
def test_a_group_is_refunded_by_its_members_with_a_reward(
    texts: list[str], failed: Any, reason: str, reward: RewardTable, tmp_path: Path
) -> None:
    queue = open_queue(tmp_path, replay__failed=failed)
    (lease,) = ask_queue(queue, 0, 0, 1)[0]
    queue.finish(*pack_group(scored_group(reward, lease, texts, failed=failed)))
    assert list(queue.ledger.refunded) == ([reason] if reason else [])
    queue.store.close()


def test_many_failed_rewards_are_a_warning_with_examples_each_time_that_they_become_many() -> None:
    rewards = FailedRewards()

    def add(*errors: str) -> None:
        group = make_plain_group(
            Lease(0, 0, EndlessPrompts().prompt(0)), 0, rewards=[0.0] * 8, completion_tokens=[1] * 8
        )
        for trajectory, error in zip(group.trajectories, errors, strict=False):
            trajectory.error, trajectory.status = error, "failed"
        rewards.add(pack_group(group)[0], refunded=False)

    with structlog.testing.capture_logs() as logs:
        for number in range(LATEST_GROUPS):
            add(*[f"judge raised {number}"] * (number % 25 == 0))
        assert {line["event"] for line in logs} == {"rewards failed"}, "4 of 800"
        for number in range(60):
            add(f"judge is down {number % 4}", "judge is down")
        for _ in range(LATEST_GROUPS):
            add()
        for _ in range(10):
            add(*["it hangs"] * 8)
    many = [line for line in logs if line["event"] == "many rewards fail"]
    assert [(line["failed"], line["rewards"]) for line in many] == [(41, 800), (48, 800)]
    assert len(many[0]["examples"]) == 3 and many[1]["examples"] == ["it hangs"]
