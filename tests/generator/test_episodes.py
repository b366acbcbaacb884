"""Episodes in a real engine: what is trained is what the engine got and sampled, token by token."""

from __future__ import annotations

import copy
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from generator_fakes import FakeClient, FakeReceiver, FakeRewards, lease, lease_reply
from generator_model import make_loop, small_config, weights_of
from transformers import Qwen2ForCausalLM

from asyncrl.generator import episodes
from asyncrl.generator.engine import Engine
from asyncrl.generator.loop import Evaluator, GeneratorLoop
from asyncrl.replay.codec import pack_group
from asyncrl.replay.live_group import refund_reason
from asyncrl.types import Group, Prompt
from asyncrl.wire.service_messages import EpisodeEnded, NextTurn

MakeEngine = Callable[..., Engine]
OBSERVATION = [9, 10, 11]
TURNS = 3
RETRY_PAUSE_S = 0.02


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(episodes, "RETRY_PAUSE_S", RETRY_PAUSE_S)


@dataclass
class FakePool:
    """Says OBSERVATION after each turn, and ends an episode after TURNS; before that it ends it as `fails` says, by the
    number of tries and turns."""

    fails: Callable[[str, int, int], EpisodeEnded | None] = lambda episode, tries, turns: None
    wishes: deque[Any] = field(default_factory=deque)
    turns: dict[str, int] = field(default_factory=dict)
    tries: dict[str, int] = field(default_factory=dict)
    seeds: dict[str, int] = field(default_factory=dict)
    started_s: dict[str, list[float]] = field(default_factory=dict)
    lengths: dict[str, int] = field(default_factory=dict)
    dropped: list[str] = field(default_factory=list)
    delay: int = 0
    """Polls before a wish comes."""
    said_tokens: list[tuple[str, list[int], str]] = field(default_factory=list)

    def start(self, episode: str, prompt: Prompt, *, seed: int, evaluation: bool) -> None:
        self.tries[episode] = self.tries.get(episode, -1) + 1
        self.started_s.setdefault(episode, []).append(time.monotonic())
        self.turns[episode], self.seeds[episode], self.lengths[episode] = 0, seed, len(prompt.tokens)
        self._next(episode, [])

    def said(self, episode: str, tokens: Sequence[int], status: str, *, branch: int) -> None:
        self.said_tokens.append((episode, list(tokens), status))
        self.turns[episode] += 1
        self.lengths[episode] += len(tokens)
        self._next(episode, OBSERVATION)

    def _next(self, episode: str, observation: list[int]) -> None:
        turns = self.turns[episode]
        end = self.fails(episode, self.tries[episode], turns)
        if end is None and turns == TURNS:
            end = EpisodeEnded(episode, "completed", "done", 1.5, {"a": 1.0}, [0.5] * TURNS, [], 0.25, "", b"")
        wish = end or NextTurn(episode, 0, 0, self.lengths[episode], 6, [])
        self.lengths[episode] += len(observation)
        self.wishes.append((self.delay, (wish, np.array(observation, dtype=np.int32))))

    def drop(self, episodes: Iterable[str]) -> None:
        self.dropped += list(episodes)

    def poll(self) -> list[Any]:
        if not self.wishes:
            time.sleep(0.001)  # as a generator that waits for its environments
        due = [wish for delay, wish in self.wishes if delay == 0]
        self.wishes = deque((delay - 1, wish) for delay, wish in self.wishes if delay > 0)
        return due

    def flush(self) -> None: ...

    def close(self) -> None: ...


def failed(episode: str, ended: Any = "environment") -> EpisodeEnded:
    return EpisodeEnded(episode, "failed", ended, 0.0, {}, [], [], 0.1, f"it was {ended}", b"")


@dataclass
class Recording:
    """An engine that remembers the prompt of every request, and what it sampled."""

    engine: Engine
    prompts: dict[str, list[list[int]]] = field(default_factory=dict)
    sampled: dict[str, list[Any]] = field(default_factory=dict)
    priorities: list[tuple[str, int]] = field(default_factory=list)

    def add(self, key: str, prompt: Sequence[int], **options: Any) -> None:
        self.prompts.setdefault(key, []).append(list(np.asarray(prompt).tolist()))
        self.priorities.append((key.partition(".")[0], options["priority"]))
        self.engine.add(key, prompt, **options)

    def step(self) -> list[Any]:
        ended = self.engine.step()
        for completion in ended:
            self.sampled.setdefault(completion.key, []).append(completion)
        return ended

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)


def episode_loop(
    model_path: str, engine: Any, pool: FakePool, policies: list[Qwen2ForCausalLM], *, groups: int = 2, **options: Any
) -> tuple[GeneratorLoop, FakeClient, FakeReceiver]:
    left = deque(range(groups))

    def answer(version: int, wanted: int) -> Any:
        return lease_reply([lease(left.popleft()) for _ in range(min(wanted, len(left)))], False, "")

    options = {"environment__name": "guess", "environments": pool, **options}
    return make_loop(engine, model_path, answer, policies[:1], index=0, **options)


def finish(
    loop: GeneratorLoop,
    client: FakeClient,
    groups: int,
    each: Callable[[], None] = lambda: None,
    *,
    ticks: int = 2000,
) -> None:
    loop._await_weights()
    for _ in range(ticks):
        if len(client.groups) == groups:
            return
        loop.tick()
        each()
    raise AssertionError(f"{len(client.groups)} of {groups} groups are finished")


def hf_logprobs(policy: Qwen2ForCausalLM, tokens: np.ndarray) -> np.ndarray:
    ids = torch.from_numpy(tokens.astype(np.int64))[None]
    logprobs = policy(ids).logits.float().log_softmax(-1)[0, :-1]
    return logprobs.gather(1, ids[0, 1:, None])[:, 0].numpy()


def test_what_is_trained_is_what_the_engine_got_and_sampled(
    model_path: str, make_engine: MakeEngine, policies: list[Qwen2ForCausalLM]
) -> None:
    engine, pool = Recording(make_engine()), FakePool(delay=2)
    loop, client, _ = episode_loop(model_path, engine, pool, policies, groups=3)
    finish(loop, client, 3)
    turns = 0
    for group in client.groups:
        group.trajectories[0].check()
        for index, member in enumerate(group.trajectories):
            key = f"{group.ticket}.0.{index}"
            assert len(engine.prompts[key]) == len(engine.sampled[key]) == TURNS
            for prompt, completion in zip(engine.prompts[key], engine.sampled[key], strict=True):
                turns += 1
                own = slice(len(prompt), len(prompt) + len(completion.tokens))
                assert member.tokens[: len(prompt)].tolist() == prompt
                assert member.tokens[own].tolist() == completion.tokens and member.action_mask[own].all()
                assert np.array_equal(member.behavior_logprobs[own], completion.logprobs)
            assert member.num_action_tokens == sum(len(one.tokens) for one in engine.sampled[key])
            assert len(member.tokens) == 3 + member.num_action_tokens + (TURNS - 1) * len(OBSERVATION)
            expected = hf_logprobs(policies[0], member.tokens)[member.action_mask[1:]]
            assert np.abs(member.behavior_logprobs[member.action_mask] - expected).max() <= 1e-5
            outcome = member.episode
            assert outcome is not None and (outcome.ended, outcome.tries) == ("done", 0)
            assert outcome.observation_tokens == (TURNS - 1) * len(OBSERVATION)
            assert (member.reward, member.reward_parts, outcome.turn_rewards) == (1.5, {"a": 1.0}, [0.5] * TURNS)
        header, arrays = pack_group(group)
        assert len(header.episodes) == 2 and arrays[0].size == sum(header.lengths)
    assert turns == 3 * 2 * TURNS and loop.stats.samples == 6
    assert loop.stats.tokens == sum(group.num_action_tokens for group in client.groups)
    assert len({pool.seeds[f"0.0.{index}"] for index in range(2)}) == 1, "members of a group have the same task"
    assert len(set(pool.seeds.values())) == 3


def test_a_swap_between_two_turns_changes_the_versions_of_the_later_ones(
    model_path: str, make_engine: MakeEngine, policies: list[Qwen2ForCausalLM]
) -> None:
    engine, pool = Recording(make_engine()), FakePool(delay=8)
    loop, client, receiver = episode_loop(model_path, engine, pool, policies, groups=1)

    def swap_after_the_first_turns() -> None:
        if len(pool.said_tokens) == 2 and not receiver.acknowledged[1:] and not receiver.versions:
            receiver.versions.append((1, weights_of(policies[1])))

    finish(loop, client, 1, swap_after_the_first_turns)
    (group,) = client.groups
    assert (group.start_version, group.end_version) == (0, 1)
    for index, member in enumerate(group.trajectories):
        completions = engine.sampled[f"0.0.{index}"]
        assert [set(one.versions.tolist()) for one in completions] == [{0}, {1}, {1}]
        assert member.versions[member.action_mask].tolist() == [v for one in completions for v in one.versions.tolist()]
        assert member.oldest_version == 0


def test_a_failed_episode_is_tried_again_and_its_tokens_are_counted(
    model_path: str, make_engine: MakeEngine, policies: list[Qwen2ForCausalLM]
) -> None:
    def fails(episode: str, tries: int, turns: int) -> EpisodeEnded | None:
        return failed(episode) if episode == "0.0.1" and tries == 0 and turns == 2 else None

    engine, pool = Recording(make_engine()), FakePool(fails)
    loop, client, _ = episode_loop(model_path, engine, pool, policies, groups=1)
    finish(loop, client, 1)
    first_s, second_s = pool.started_s["0.0.1"]
    assert second_s - first_s > RETRY_PAUSE_S
    (group,) = client.groups
    first, second = (member.episode for member in group.trajectories)
    lost = sum(len(one.tokens) for one in engine.sampled["0.0.1"][:2])
    assert first is not None and (first.tries, first.lost_tokens) == (0, 0)
    assert second is not None and (second.tries, second.lost_tokens) == (1, lost)
    assert loop.stats.tokens == group.num_action_tokens + lost
    assert all(member.status == "completed" for member in group.trajectories)


@pytest.mark.parametrize(
    ("ended", "tries", "reason"), [("timeout", 1, "timeout"), ("overlong", 0, "overlong"), ("host", 4, "environment")]
)
def test_an_episode_that_fails_again_refunds_its_group(
    model_path: str,
    make_engine: MakeEngine,
    policies: list[Qwen2ForCausalLM],
    ended: str,
    tries: int,
    reason: str,
) -> None:
    def fails(episode: str, tries: int, turns: int) -> EpisodeEnded | None:
        return failed(episode, ended) if episode == "0.0.0" and turns == (0 if ended == "overlong" else 1) else None

    pool = FakePool(fails)
    loop, client, _ = episode_loop(model_path, make_engine(), pool, policies, groups=1)
    finish(loop, client, 1)
    (group,) = client.groups
    bad, good = group.trajectories
    assert (bad.status, bad.error, good.status) == ("failed", f"it was {ended}", "completed")
    assert bad.episode is not None and bad.episode.tries == tries
    header, _ = pack_group(group)
    assert refund_reason(loop.config, header, group_relative=True) == reason


def test_slots_are_free_while_episodes_wait_for_their_environment(
    model_path: str, make_engine: MakeEngine, policies: list[Qwen2ForCausalLM]
) -> None:
    for limit, live in ((None, 20), (6, 6)):
        pool = FakePool(delay=10**6)
        pool.start = lambda episode, prompt, seed, evaluation, pool=pool: (
            FakePool.start(  # type: ignore[method-assign]
                pool, episode, prompt, seed=seed, evaluation=evaluation
            )
            or pool.wishes.append((0, pool.wishes.pop()[1]))
        )
        settings = {} if limit is None else {"environment__max_episodes": limit}
        loop, _, _ = episode_loop(model_path, make_engine(), pool, policies, groups=10, **settings)
        loop._await_weights()
        for _ in range(400):
            loop.tick()
        assert loop.engine.num_running == 0 and len(pool.said_tokens) == live, limit
        loop.release()
        assert len(pool.dropped) == live


def test_an_evaluation_keeps_to_the_limit_of_episodes(
    model_path: str, make_engine: MakeEngine, policies: list[Qwen2ForCausalLM]
) -> None:
    settings = {"environment__name": "guess", "environment__max_episodes": 5, "eval__samples": 2}
    settings |= {"data__eval": "eval.parquet", "generator__max_running_groups": 4}
    engine, pool, live = make_engine(**settings), FakePool(delay=2), list[int]()
    engine.swap(0, weights_of(policies[0]))
    prompts = [lease(number).prompt for number in range(5)]
    work = Evaluator(
        small_config(model_path, **settings), engine, prompts, rewards=None, environments=pool  # type: ignore[arg-type]
    )  # fmt: skip
    for _ in range(2000):
        work.tick()
        assert work._runner.episodes is not None
        live.append(work._runner.episodes.num_live)
        if len(work.results) == len(prompts):
            break
    assert 4 <= max(live) <= 5
    assert sorted(result.ticket for result in work.results) == [0, 1, 2, 3, 4]
    assert {tuple(result.rewards) for result in work.results} == {(1.5, 1.5)}
    assert [group.ticket for group in work.groups] == [result.ticket for result in work.results]


@pytest.mark.parametrize(("delay", "waits_s", "slow"), [(0, 0.05, 0), (3, 0.2, 3)])
def test_the_time_that_episodes_wait_for_their_environment_is_counted(
    model_path: str,
    make_engine: MakeEngine,
    policies: list[Qwen2ForCausalLM],
    monkeypatch: pytest.MonkeyPatch,
    delay: int,
    waits_s: float,
    slow: int,
) -> None:
    """A poll of the environments takes 50 ms of the clock that episodes see."""
    pool, clock = FakePool(delay=delay), count(1)
    polls = [0]
    poll = pool.poll

    def count_poll() -> list[Any]:
        polls[0] = next(clock)
        return poll()

    pool.poll = count_poll  # type: ignore[method-assign]
    monkeypatch.setattr(episodes, "time", SimpleNamespace(monotonic=lambda: polls[0] * 0.05))
    loop, client, _ = episode_loop(model_path, make_engine(), pool, policies, groups=1)
    live, waiting = set[int](), set[int]()

    def look() -> None:
        loop._next_ask_s = 0.0  # the next tick asks again, however fast the engine is
        assert loop.groups.episodes is not None
        live.add(loop.groups.episodes.num_live)
        waiting.add(loop.groups.episodes.num_waiting)

    finish(loop, client, 1, look)
    for member in client.groups[0].trajectories:
        outcome = member.episode
        assert outcome is not None and outcome.slow_turns == slow
        assert (outcome.reset_s, outcome.wait_s) == pytest.approx((waits_s, TURNS * waits_s))
    assert max(live) == 2 and min(live) == 0 and waiting >= ({0, 2} if delay else {0})
    seconds = loop._watch.seconds()
    assert (seconds["environments"] > 0) == (delay > 0), seconds
    assert {stats.live_episodes for _, _, stats in client.asks} >= {0, 2}


@pytest.mark.parametrize("ahead", [False, True], ids=["", "async scheduling"])
@pytest.mark.parametrize(("environment", "first"), [("guess", "old"), (None, "young")])
def test_the_turn_of_the_oldest_group_takes_the_first_free_place(
    make_engine: MakeEngine, policies: list[Qwen2ForCausalLM], environment: str | None, first: str, ahead: bool
) -> None:
    """Without an environment the first come is the first served."""
    engine = make_engine(environment__name=environment, generator__max_running_groups=1, ahead=ahead)
    if engine.version < 0:
        engine.swap(0, weights_of(policies[0]))
    for key, priority in {"a": 5, "b": 6, "young": 9, "old": 1}.items():
        engine.add(key, [5, 6, 7], priority=priority)
        engine.step()  # two places are taken, so the others wait
    assert not engine.num_generated("young") and not engine.num_generated("old")
    began, left = list[str](), {"young", "old"}
    for _ in range(200):
        began += [key for key in sorted(left) if key not in engine._requests or engine.num_generated(key)]
        left -= set(began)
        if not engine.num_running:
            break
        engine.step()
    assert began[0] == first and len(began) == 2


def test_released_leases_report_the_tokens_of_all_turns(
    model_path: str, make_engine: MakeEngine, policies: list[Qwen2ForCausalLM]
) -> None:
    engine, pool = Recording(make_engine()), FakePool()
    loop, client, _ = episode_loop(model_path, engine, pool, policies, groups=1)
    loop._await_weights()
    while len(pool.said_tokens) < 3:
        loop.tick()
    running = sum(engine.num_generated(key) for key in list(engine._requests))
    loop.release()
    ((ticket, attempt, tokens),) = client.released
    assert (ticket, attempt) == (0, 0)
    assert tokens == sum(len(said) for _, said, _ in pool.said_tokens) + running
    assert sorted(pool.dropped) == ["0.0.0", "0.0.1"] and engine.num_running == 0


def test_deterministic_turns_have_seeds_of_their_own(
    model_path: str, make_engine: MakeEngine, policies: list[Qwen2ForCausalLM]
) -> None:
    def run(groups: int) -> list[Group]:
        settings = {"deterministic": True, "replay__max_staleness": 0}
        engine = make_engine(**settings)
        loop, client, _ = episode_loop(model_path, engine, FakePool(), policies, groups=groups, **settings)
        finish(loop, client, groups)
        return sorted(client.groups, key=lambda group: group.ticket)

    alone, both = run(1), run(2)
    for one, other in zip(alone[0].trajectories, both[0].trajectories, strict=True):
        assert np.array_equal(one.tokens, other.tokens)
        assert np.array_equal(one.behavior_logprobs, other.behavior_logprobs)
    assert copy.copy(both[0].trajectories[0].tokens.tolist()) != both[0].trajectories[1].tokens.tolist()


def test_a_rewritten_conversation_is_a_row_of_its_own_and_what_nobody_read_is_lost(
    model_path: str, make_engine: MakeEngine, policies: list[Qwen2ForCausalLM]
) -> None:
    """Turn 0 in branch 0; turn 1 behind a rewritten prompt; turn 2 behind the first, in two branches; turn 3 unread."""

    class Rewriting(FakePool):
        def start(self, episode: str, prompt: Prompt, *, seed: int, evaluation: bool) -> None:
            self.lengths[episode] = self.turns[episode] = 0
            self._ask(episode, [], len(prompt.tokens), 0, 0)

        def _ask(self, episode: str, said: list[int], keep: int, branch: int, source: int) -> None:
            self.wishes.append((0, (NextTurn(episode, branch, source, keep, 6, []), np.array(said, dtype=np.int32))))

        def said(self, episode: str, tokens: Sequence[int], status: str, *, branch: int) -> None:
            self.turns[episode] += 1
            first = self.lengths[episode] = self.lengths[episode] or 3 + len(tokens)
            match self.turns[episode]:
                case 1:
                    self._ask(episode, [5, 6], 0, 1, 0)
                case 2:
                    self._ask(episode, OBSERVATION, first, 0, 0)
                    self._ask(episode, [7], first, 2, 0)
                case 4:
                    rewards, unused = [1.0, 2.0, 3.0, 4.0], [3]
                    end = EpisodeEnded(episode, "completed", "done", 1.5, {}, rewards, unused, 0.25, "", b"")
                    self.wishes.append((0, (end, np.zeros(0, dtype=np.int32))))

    engine, pool, rewards = Recording(make_engine()), Rewriting(), FakeRewards()
    loop, client, _ = episode_loop(model_path, engine, pool, policies, groups=2, rewards=rewards)
    finish(loop, client, 2)
    for group in client.groups:
        assert [row.member for row in group.trajectories] == [0, 0, 1, 1]
        for member in range(2):
            key = f"{group.ticket}.0.{member}"
            rows = [row for row in group.trajectories if row.member == member]
            first, second = engine.sampled[key]
            (other,) = engine.sampled[f"{key}/1"]
            (unread,) = engine.sampled[f"{key}/2"]
            said, episode = rewards.episodes[group.ticket, 0][member]
            assert said == [*first.tokens, *other.tokens, *second.tokens], "in the order in which they were said"
            assert episode.turn_tokens == [len(one.tokens) for one in (first, other, second)]
            assert (episode.reward, rows[0].reward) == (1.5, len(said)), "the reward is that of the reward workers"
            assert engine.prompts[f"{key}/2"] == [[*engine.prompts[key][0], *first.tokens, 7]]
            assert rows[0].tokens.tolist() == [*engine.prompts[key][1], *second.tokens]
            assert rows[1].tokens.tolist() == [5, 6, *other.tokens]
            assert rows[1].action_mask.tolist() == [False] * 2 + [True] * len(other.tokens)
            outcomes = [row.episode for row in rows]
            assert [one.turn_rewards for one in outcomes if one] == [[1.0, 3.0], [2.0]]
            assert [one.lost_tokens for one in outcomes if one] == [len(unread.tokens), 0]
            assert [one.environment_s for one in outcomes if one] == [0.25, 0.0]
            for row in rows:
                expected = hf_logprobs(policies[0], row.tokens)[row.action_mask[1:]]
                assert np.abs(row.behavior_logprobs[row.action_mask] - expected).max() <= 1e-5
        pack_group(group)
    lost = sum(len(one.tokens) for key, ended in engine.sampled.items() for one in ended if key.endswith("/2"))
    assert loop.stats.tokens == sum(group.num_action_tokens for group in client.groups) + lost
