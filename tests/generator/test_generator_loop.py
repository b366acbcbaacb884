"""The loop with a real engine: complete groups with exact arrays, swaps in flight, asking, stopping."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from generator_fakes import FakeClient, FakeRewards, lease, lease_reply
from generator_model import EOS, make_loop, reference_logprobs, small_config, weights_of
from transformers import Qwen2ForCausalLM

from asyncrl.config.config import Config
from asyncrl.errors import PeerTimeoutError
from asyncrl.generator import loop as loop_module
from asyncrl.generator.engine import Engine
from asyncrl.generator.loop import _DENIED_IDLE_S, GroupRunner, StepCosts
from asyncrl.types import NO_VERSION, Lease
from asyncrl.wire.messages import Leases

Policies = list[Qwen2ForCausalLM]


@pytest.fixture
def engine(make_engine: Callable[..., Engine]) -> Engine:
    engine = make_engine(weights__kv_cache="recompute")
    engine.abort(list(engine._requests))
    engine.version = NO_VERSION
    return engine


class PromptLeases:
    """Hands out `total` leases of different prompts, then none; done when all have been finished."""

    def __init__(self, total: int) -> None:
        self.leases = [lease(ticket, [3 + ticket % 50, 9, 4, 17][: 2 + ticket % 3]) for ticket in range(total)]
        self._left = iter(self.leases)
        self.client: FakeClient | None = None

    def __call__(self, version: int, num_groups: int) -> Leases:
        done = self.client is not None and len(self.client.groups) == len(self.leases)
        return lease_reply(list(itertools.islice(self._left, num_groups)), done, "")


def test_groups_come_back_whole_and_exact(engine: Engine, model_path: str, policies: Policies) -> None:
    leases = PromptLeases(12)
    loop, client, receiver = make_loop(engine, model_path, leases, policies[:1])
    leases.client = client
    loop.run()
    assert sorted(group.ticket for group in client.groups) == list(range(12))
    assert client.released == []
    assert receiver.acknowledged == [0]
    for group in client.groups:
        given = leases.leases[group.ticket]
        assert (group.row, group.data_source, group.generator, group.attempt) == (given.prompt.row, "test", 3, 0)
        assert (group.start_version, group.end_version) == (0, 0)
        assert 0 < group.started_s < group.finished_s
        assert len(group.trajectories) == 2
        for trajectory in group.trajectories:
            assert_exact(trajectory, given, policies[0])


def assert_exact(trajectory: Any, given: Lease, policy: Qwen2ForCausalLM) -> None:
    start = len(given.prompt.tokens)
    assert np.array_equal(trajectory.tokens[:start], given.prompt.tokens)
    assert not trajectory.action_mask[:start].any()
    assert trajectory.action_mask[start:].all()
    assert np.all(trajectory.versions[:start] == NO_VERSION)
    assert np.all(trajectory.versions[start:] == 0)
    assert (trajectory.tokens.dtype, trajectory.behavior_logprobs.dtype) == (np.int32, np.float32)
    actions = trajectory.tokens[start:].tolist()
    expected = reference_logprobs(policy, given.prompt.tokens.tolist(), actions, 1.0)
    assert np.abs(trajectory.behavior_logprobs[start:] - expected).max() < 1e-4
    assert np.all(trajectory.behavior_logprobs[:start] == 0)
    assert trajectory.status == ("completed" if actions[-1] in EOS else "truncated")
    assert trajectory.reward == len(actions)  # of the right member of the group
    assert trajectory.reward_parts == {"length": len(actions)}


def test_weights_are_swapped_while_groups_run(engine: Engine, model_path: str, policies: Policies) -> None:
    leases = PromptLeases(4)
    loop, client, receiver = make_loop(engine, model_path, leases, policies[:1])
    leases.client = client
    loop._swap_staged()
    for _ in range(4):
        loop.tick()
    receiver.versions.append((1, weights_of(policies[1])))
    while len(client.groups) < 4:
        loop.tick()
    assert receiver.acknowledged == [0, 1]
    mixed = [group for group in client.groups if (group.start_version, group.end_version) == (0, 1)]
    assert mixed
    for group in mixed:
        for trajectory in group.trajectories:
            versions = trajectory.versions[trajectory.action_mask]
            assert np.all(np.diff(versions) >= 0)
            assert versions[0] == 0
    assert any(group.oldest_version == 0 for group in mixed)
    # The tags do not just follow the clock: each part has the log-probs of its own version.
    for trajectory in mixed[0].trajectories:
        start = trajectory.num_prompt_tokens
        for version in np.unique(trajectory.versions[start:]):
            here = trajectory.versions[start:] == version
            tokens = trajectory.tokens.tolist()
            expected = reference_logprobs(policies[version], tokens[:start], tokens[start:], 1.0)
            assert np.abs(trajectory.behavior_logprobs[start:] - expected)[here].max() < 1e-4
    stalls = [stall_ms for _, _, stats in client.asks for stall_ms in stats.stall_ms] + loop.stats.stall_ms
    assert len(stalls) == 2  # each is reported once
    assert min(stalls) > 0


class SlowRound:
    """A round whose sender begins late, and fails."""

    version, committed, waits = 1, None, 0

    def accept(self) -> None:
        """The engine stands still."""

    def take(self, seconds: float) -> None:
        self.waits += 1

    @property
    def has_failed(self) -> bool:
        return self.waits > 5


def test_an_engine_that_stands_still_for_the_next_version_gets_no_groups_of_its_own(
    engine: Engine, model_path: str, policies: Policies
) -> None:
    loop, client, receiver = make_loop(engine, model_path, PromptLeases(4), policies[:1])
    loop._swap_staged()
    slow = SlowRound()
    receiver.round = lambda: None if slow.has_failed else slow  # type: ignore[method-assign]
    loop._swap_staged()
    assert slow.has_failed and client.asks and not any(groups for _, groups, _ in client.asks)
    loop.tick()
    loop.tick()
    assert client.asks[-1][1] and len(loop.groups.running) == 4


def test_a_group_without_rewards_travels_whole_as_failed(engine: Engine, model_path: str, policies: Policies) -> None:
    leases = PromptLeases(3)
    loop, client, _ = make_loop(engine, model_path, leases, policies[:1], rewards=FakeRewards(failing={1}))
    leases.client = client
    loop.run()
    by_ticket = {group.ticket: group for group in client.groups}
    assert len(by_ticket) == 3
    for trajectory in by_ticket[1].trajectories:
        assert (trajectory.status, trajectory.error) == ("failed", "no reward")
        assert trajectory.reward == 0.0
        assert trajectory.num_action_tokens > 0
    assert all(t.status != "failed" and t.error == "" for k in (0, 2) for t in by_ticket[k].trajectories)
    assert loop.stats.rewards_failed == 2


@pytest.mark.parametrize("how", ["done", "should_stop"])
def test_stopping_gives_back_every_unfinished_lease(
    engine: Engine, model_path: str, policies: Policies, how: str
) -> None:
    stop = False
    leases = PromptLeases(100)

    def answer(version: int, num_groups: int) -> Leases:
        return lease_reply([], True, "") if stop and how == "done" else leases(version, num_groups)

    loop, client, _ = make_loop(
        engine, model_path, answer, policies[:1], should_stop=lambda: stop and how == "should_stop"
    )
    loop._swap_staged()
    for _ in range(6):
        loop.tick()
    running = {key: loop.groups.num_tokens(group) for key, group in loop.groups.running.items()}
    stop = True
    loop._heartbeat_s = 0.0
    loop.run()
    finished = {(group.ticket, group.attempt) for group in client.groups}
    released = {(ticket, attempt): tokens for ticket, attempt, tokens in client.released}
    assert engine.num_running == 0
    assert loop.groups.running == loop.groups.scoring == {}
    assert len(running) >= 2
    assert running.keys() <= released.keys() | finished
    assert not finished & released.keys()
    for key in running.keys() & released.keys():
        assert released[key] >= running[key]
    assert sum(tokens > 0 for tokens in running.values()) >= 2
    assert sum(released.values()) + sum(group.num_action_tokens for group in client.groups) >= loop.stats.tokens


def test_the_engine_is_kept_full_of_group_members(engine: Engine, model_path: str, policies: Policies) -> None:
    leases = PromptLeases(60)
    loop, client, _ = make_loop(engine, model_path, leases, policies[:1])
    leases.client = client
    loop.run()
    assert client.asks[0][:2] == (0, 5)  # one waits
    assert max(asked for _, asked, _ in client.asks) <= 5
    assert len(client.groups) == 60
    assert loop.stats.tokens == sum(group.num_action_tokens for group in client.groups)
    assert loop.stats.working_s > 0


def test_a_denied_ask_is_repeated_with_a_pause_and_at_once_after_new_weights(
    engine: Engine, model_path: str, policies: Policies
) -> None:
    loop, client, receiver = make_loop(engine, model_path, lambda *_: lease_reply([], False, "staleness"), policies[:1])
    loop._swap_staged()
    start = time.monotonic()
    while len(client.asks) < 50:
        assert time.monotonic() - start < 20.0
        loop.tick()
        time.sleep(0.001)
    assert len(client.asks) <= (time.monotonic() - start) / _DENIED_IDLE_S + 2
    assert loop.stats.waiting_s > 0.5 * (loop.stats.waiting_s + loop.stats.working_s + loop.stats.writing_s)
    loop._next_ask_s = time.monotonic() + 60.0
    receiver.versions.append((1, weights_of(policies[1])))
    asks = len(client.asks)
    loop.tick()
    loop.tick()
    assert client.asks[asks][0] == 1


def test_a_denied_ask_waits_as_long_as_the_queue_says(engine: Engine, model_path: str, policies: Policies) -> None:
    reply = lease_reply([], False, "staleness", pause_s=60.0)
    loop, client, _ = make_loop(engine, model_path, lambda *_: reply, policies[:1])
    loop._swap_staged()
    start = time.monotonic()
    while time.monotonic() - start < 0.2:
        loop.tick()
    assert len(client.asks) == 1


def test_a_full_generator_still_speaks_and_hears_that_the_run_is_over(
    engine: Engine, model_path: str, policies: Policies
) -> None:
    leases = PromptLeases(100)
    loop, client, _ = make_loop(engine, model_path, leases, policies[:1], generator__max_running_groups=1)
    loop._swap_staged()
    loop.tick()
    asks = len(client.asks)
    loop.tick()
    assert len(client.asks) == asks
    loop._heartbeat_s = 0.0
    loop.tick()
    assert [asked for _, asked, _ in client.asks[asks:]] == [0]


def test_missing_first_weights_are_an_error_that_names_the_learner(engine: Engine, model_path: str) -> None:
    loop, client, _ = make_loop(engine, model_path, lambda *_: lease_reply([], False, ""), launch__start_timeout_s=0.1)
    with pytest.raises(PeerTimeoutError, match=r"generator 3: learner rank 0 did not send the first weights .* 0.1 s"):
        loop.run()
    assert [ask[:2] for ask in client.asks] == [(NO_VERSION, 0)]


def test_a_generator_without_weights_speaks_each_second_and_waits_while_the_learners_go_on(
    engine: Engine, model_path: str, policies: Policies, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop_module, "_HEARTBEAT_S", 0.2)
    weights = [(7, weights_of(policies[0]))]

    def answer(version: int, num_groups: int) -> Leases:
        number = len(client.asks)
        if number == 8:
            receiver.versions.extend(weights)
        return lease_reply([], version != NO_VERSION, "", progress=number)

    loop, client, receiver = make_loop(engine, model_path, answer, launch__start_timeout_s=1.4)
    loop.run()
    assert [ask[:2] for ask in client.asks[:8]] == [(NO_VERSION, 0)] * 8
    assert client.asks[8][0] == 7


@pytest.mark.parametrize("stop_timeout_s", [30.0, 1e-6])
def test_a_generator_that_leaves_finishes_what_it_has_time_for(
    engine: Engine, model_path: str, policies: Policies, stop_timeout_s: float
) -> None:
    leases = PromptLeases(100)
    leaving = False

    def answer(version: int, num_groups: int) -> Leases:
        return lease_reply([], False, "", leave=True) if leaving else leases(version, num_groups)

    loop, client, _ = make_loop(engine, model_path, answer, policies[:1], launch__stop_timeout_s=stop_timeout_s)
    loop._swap_staged()
    for _ in range(3):
        loop.tick()
    has = {lease.ticket for lease in leases.leases[: 100 - len(list(leases._left))]}
    asks = len(client.asks)
    leaving, loop._heartbeat_s = True, 0.0
    loop.run()
    assert all(asked == 0 for _, asked, _ in client.asks[asks + 1 :])
    finished, released = {group.ticket for group in client.groups}, {ticket for ticket, _, _ in client.released}
    assert finished | released == has
    assert not finished & released
    assert not released if stop_timeout_s == 30.0 else released
    assert engine.num_running == 0


def free_capacity(
    config: Config, *, running: int, evaluating: int | None = None, denied: bool = False
) -> tuple[int, int]:
    runner = GroupRunner(config, SimpleNamespace(num_running=running), rewards=None, environments=None)  # type: ignore[arg-type]
    runner.num_evaluating = evaluating or 0
    return runner.free_capacity(evaluates=evaluating is not None, denied=denied)


@pytest.mark.parametrize(("running", "groups"), [(0, 18), (16, 10), (31, 2), (32, 2), (33, 1), (35, 0), (36, 0)])
def test_an_eighth_more_groups_than_run_wait_in_the_engine(model_path: str, running: int, groups: int) -> None:
    config = small_config(model_path, generator__max_running_groups=16)  # of 2
    assert free_capacity(config, running=running) == (groups, 0)


def test_evaluation_gets_half_of_the_places_and_none_of_those_that_wait(model_path: str) -> None:
    config = small_config(model_path, generator__max_running_groups=16, eval__samples=4)
    assert free_capacity(config, running=0, evaluating=0) == (10, 4)
    assert free_capacity(config, running=36, evaluating=16) == (0, 0)
    assert free_capacity(config, running=16, evaluating=16, denied=True) == (2, 4)


def test_costs_are_found_again() -> None:
    dice, costs = np.random.default_rng(0), StepCosts()
    for _ in range(500):
        running, changed = int(dice.integers(1, 64)), int(dice.integers(0, 9))
        noise = 1 + 0.1 * dice.standard_normal()
        costs.step((0.01 + 2e-4 * running + 1e-3 * changed) * noise, running=running, changed=changed)
    base_s, sequence_s, request_s = costs.solve()
    assert base_s == pytest.approx(0.01, rel=0.1)
    assert sequence_s == pytest.approx(2e-4, rel=0.1)
    assert request_s == pytest.approx(2e-3, rel=0.1), "a sequence begins once and ends once"


def test_steps_of_few_sequences_are_not_forgotten() -> None:
    costs = StepCosts()
    for running in [2, 8] * 40 + [64] * 20_000:
        costs.step(0.01 + 2e-4 * running, running=running, changed=0)
    assert costs.solve() == pytest.approx([0.01, 2e-4, 0.0])


def test_no_cost_is_negative() -> None:
    costs = StepCosts()
    for running in range(1, 65):
        costs.step(0.1 - 1e-3 * running, running=running, changed=0)
    base_s, *others = costs.solve()
    assert others == [0.0, 0.0] and 0.03 < base_s < 0.1
