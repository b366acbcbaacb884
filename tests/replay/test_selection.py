"""The choice of rows by their history: its rule, its bounds, that it is a function of records, and is unbiased."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import structlog

from asyncrl.replay.codec import pack_group
from asyncrl.replay.journal.writer import Journal
from asyncrl.replay.metrics.rewards import RewardsSinceStep
from asyncrl.replay.metrics.stats import ExactMean
from asyncrl.replay.metrics.trace import TraceWriter
from asyncrl.replay.prompts.pass_rates import PassRates, RowOutcome
from asyncrl.replay.prompts.selection import MAX_INTERVALS, ChosenOutcome, RowChoice, RowSelection, SelectionRecord
from asyncrl.replay.queue import ReplayQueue
from asyncrl.types import Lease, Prompt, RowPlace
from asyncrl.util.durable import of_plain, to_plain
from tests.helpers.replay import EndlessPrompts, ask_queue, kill_queue, make_group, small_config


@pytest.fixture(scope="module", autouse=True)
def quick_disk() -> Iterator[None]:
    """No process of these tests is cut from its disk, so that nothing needs to reach it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


HERE = RowPlace(0, None)


def make_selection(num_rows: int, **rule: Any) -> RowSelection:
    return RowSelection(config=small_config(data__selection=rule or "on"), rows=PassRates(num_rows))


def finish(selection: RowSelection, row: int, choice: RowChoice, rewards: np.ndarray, *, trained: bool = True) -> None:
    ends = float(rewards.min()), float(rewards.max())
    seen = RowOutcome(row, row, "sums", float(rewards.mean()), *ends)
    selection.outcomes.append(ChosenOutcome(seen, choice, trained))


def solve(selection: RowSelection, row: int, times: int) -> None:
    for _ in range(times):
        finish(selection, row, RowChoice(), np.ones(2))
    selection.committed()


def test_a_row_is_kept_by_its_streak_with_a_floor() -> None:
    selection = make_selection(6, strength=0.5, floor=0.1)
    for row in range(6):
        solve(selection, row, times=row)
    visits = 4000
    kept: Counter[int] = Counter()
    for _ in range(visits):
        for row in range(6):
            if selection.keeps(row):
                kept[row] += 1
                assert selection.choice(0, HERE).probability in (1.0, max(0.5**row, 0.1))
            selection.choice(0, HERE)
    assert [kept[row] / visits for row in range(4)] == pytest.approx([1.0, 0.5, 0.25, 0.125], abs=0.03)
    assert kept[5] / visits == pytest.approx(0.1, abs=0.02)
    assert selection.skipped == 6 * visits - kept.total()
    off = RowSelection(config=small_config(), rows=selection.rows)
    assert all(off.keeps(5) for _ in range(100)) and off.draws == 0


@pytest.fixture
def unlucky(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draws that keep no row."""
    monkeypatch.setattr(RowSelection, "_draw", lambda self: 0.999)


@pytest.mark.usefixtures("unlucky")
def test_no_row_is_left_out_for_ever() -> None:
    selection = make_selection(1, floor=0.1)
    solve(selection, 0, times=20)
    rounds = []
    for _ in range(3):
        skips = 0
        while not selection.keeps(0):
            skips += 1
            selection.choice(0, HERE)  # each time for another lease
        assert selection.choice(0, HERE).probability == 1.0, "it is kept for sure, so that it weighs 1"
        rounds.append(skips)
    assert rounds == [MAX_INTERVALS / 0.1] * 3


@pytest.mark.usefixtures("unlucky")
def test_a_lease_ends_when_all_rows_are_solved() -> None:
    selection = make_selection(1000, floor=0.1)
    for row in range(1000):
        solve(selection, row, times=9)
    prompts = EndlessPrompts(1000)
    for lease in range(5):
        prompt, place = prompts.next_kept(selection.keeps)
        assert selection.choice(prompt.row, place).probability == 1.0
        assert prompt.row == 41 * (lease + 1) - 1


def test_what_selection_sees_changes_at_commits_only() -> None:
    selection = make_selection(1)
    finish(selection, 0, RowChoice(), np.ones(2))
    assert selection.rows.streaks[0] == 0
    selection.committed()
    assert selection.rows.streaks[0] == 1 and not selection.outcomes


def test_a_record_has_everything() -> None:
    selection = make_selection(9, unbiased=True)
    solve(selection, 3, times=4)
    while selection.keeps(3):
        selection.choice(0, HERE)
    selection.choice(0, HERE)
    finish(selection, 2, RowChoice(0.25, 1), np.arange(2))
    selection.committed()
    finish(selection, 4, RowChoice(0.5, 1), np.arange(2), trained=False)
    again = make_selection(9, unbiased=True)
    again.load(of_plain(SelectionRecord, to_plain(SelectionRecord, selection)))
    assert to_plain(SelectionRecord, again) == to_plain(SelectionRecord, selection)
    assert [again.keeps(3) for _ in range(50)] == [selection.keeps(3) for _ in range(50)]
    assert again.weight_in_loss(RowChoice(0.5, 1)) == selection.weight_in_loss(RowChoice(0.5, 1)) == 0.5


class ShuffledPrompts(EndlessPrompts):
    """Each epoch in another order."""

    def __init__(self, num_rows: int, seed: int) -> None:
        super().__init__(num_rows)
        self.seed, self.epoch = seed, -1

    def next_kept(self, keeps: Callable[[int], bool]) -> tuple[Prompt, RowPlace]:
        _, place = super().next_kept(lambda row: keeps(self.shuffled(row)))
        return self.prompt(self.shuffled(self.row % self.num_rows)), place

    def shuffled(self, row: int) -> int:
        if self.row // self.num_rows != self.epoch:
            self.epoch = self.row // self.num_rows
            self.order = np.random.default_rng((self.seed, self.epoch)).permutation(self.num_rows)
        return int(self.order[row])


class Simulated:
    """A policy that does not learn on rows of fixed pass rates, of which most are solved or hopeless."""

    def __init__(self, selection: RowSelection, seed: int, *, refunds: bool) -> None:
        self.random = np.random.default_rng(seed)
        num_rows = selection.rows.num_rows
        solved_or_hopeless = self.random.choice([0.0, 0.02, 0.98, 1.0], num_rows, p=[0.15, 0.05, 0.2, 0.6])
        self.rates = np.where(self.random.random(num_rows) < 0.8, solved_or_hopeless, self.random.random(num_rows))
        self.gradients = self.random.normal(1.0, 1.0, num_rows) + 2 * (self.rates > 0.9)
        self.selection, self.refunds = selection, refunds
        self.prompts = ShuffledPrompts(num_rows, seed)
        self.weighted: list[float] = []
        self.all_rows: list[float] = []
        self.plain: list[float] = []
        self.gradient: list[float] = []

    def step(self, groups: int, size: int = 8) -> None:
        since, plain, trained = RewardsSinceStep(), ExactMean(), 0
        while trained < groups:
            prompt, place = self.prompts.next_kept(self.selection.keeps)
            choice = self.selection.choice(prompt.row, place)
            rewards = (self.random.random(size) < self.rates[prompt.row]).astype(float)
            lease = Lease(0, 0, prompt)
            header, _ = pack_group(make_group(lease, 0, rewards=rewards.tolist(), completion_tokens=[1] * size))
            since.add(header, [1] * size, choice)
            plain.add(rewards.tolist())
            is_trained = not self.refunds or rewards.min() < rewards.max()
            finish(self.selection, prompt.row, choice, rewards, trained=is_trained)
            if is_trained:
                trained += 1
                self.gradient.append(self.selection.weight_in_loss(choice) * self.gradients[prompt.row])
        self.selection.committed()
        self.weighted.append(since.table()["reward/test"])
        self.plain.append(plain.mean)
        self.all_rows.append(since.table()["reward/all_rows"])

    def expected_gradient(self, size: int = 8) -> float:
        signal = 1 - self.rates**size - (1 - self.rates) ** size if self.refunds else np.ones(len(self.rates))
        return float((signal * self.gradients).sum() / signal.sum())


@pytest.mark.parametrize("refunds", [False, True])
def test_the_reward_of_all_rows_and_the_expected_gradient_are_those_without_selection(refunds: bool) -> None:
    simulated = Simulated(make_selection(200, floor=0.1, unbiased=True), seed=3, refunds=refunds)
    for _ in range(150):
        simulated.step(32)
    truth, late = float(simulated.rates.mean()), slice(30, None)
    assert abs(np.mean(simulated.plain[late]) - truth) > 0.05, "the mean of what was generated says something else"
    assert np.mean(simulated.all_rows[late]) == pytest.approx(truth, abs=0.01)
    assert np.mean(simulated.weighted[late]) == pytest.approx(truth, abs=0.02)
    assert np.std(simulated.all_rows[late]) < np.std(simulated.weighted[late])
    assert np.mean(simulated.gradient[1000:]) == pytest.approx(simulated.expected_gradient(), rel=0.06)
    biased = Simulated(make_selection(200, floor=0.1), seed=3, refunds=refunds)
    for _ in range(150):
        biased.step(32)
    assert abs(np.mean(biased.gradient[1000:]) / biased.expected_gradient() - 1) > 0.1


def test_the_reward_of_all_rows_is_unbiased_in_steps_of_few_groups() -> None:
    simulated = Simulated(make_selection(100, floor=0.1), seed=5, refunds=False)
    for _ in range(1000):
        simulated.step(2)
    late = slice(200, None)
    assert np.mean(simulated.all_rows[late]) == pytest.approx(float(simulated.rates.mean()), abs=0.015)


@pytest.mark.parametrize("rule", ["off", "on"])
def test_the_reward_of_all_rows_is_that_of_the_present_policy(rule: str) -> None:
    """Also within an epoch, when some rows have been seen in it and the others have not."""
    selection = RowSelection(config=small_config(data__selection=rule), rows=PassRates(640))
    simulated = Simulated(selection, seed=7, refunds=False)
    final, errors, of_rows = simulated.rates, [], []
    for step in range(200):  # an epoch without selection is 20 steps
        simulated.rates = final * min(1.0, 0.2 + step / 100)
        simulated.step(32)
        errors.append(simulated.all_rows[-1] - simulated.rates.mean())
        of_rows.append(selection.pools[0].rows.mean - simulated.rates.mean())
    for start in range(25, 200, 25):
        assert abs(np.mean(errors[start : start + 25])) < 0.025
    assert np.mean(of_rows[25:75]) < -0.06, "the mean of the rows' own means lags"
    simulated.rates = final * 0.5
    for _ in range(10):
        simulated.step(32)
    assert np.mean(simulated.all_rows[-10:]) == pytest.approx(float(simulated.rates.mean()), abs=0.08), (
        "and if it falls"
    )


def test_weights_are_of_a_files_own_rows() -> None:
    """Where the rows of one file are skipped, it does not outweigh the other."""
    selection = make_selection(2, unbiased=True)
    for _ in range(40):
        finish(selection, 0, RowChoice(0.1, 0), np.arange(2))
        finish(selection, 1, RowChoice(1.0, 1), np.arange(2))
        selection.committed()
    selection._probability = 0.1
    assert selection.choice(0, RowPlace(0, None)).weight == pytest.approx(1.0)
    selection._probability = 1.0
    assert selection.choice(1, RowPlace(1, None)).weight == pytest.approx(1.0)
    weight = selection.weight_in_loss
    assert (weight(RowChoice(0.1, 0)), weight(RowChoice(1.0, 1))) == pytest.approx((1.0, 1.0))
    assert selection.weight_in_loss(RowChoice(1.0, 0)) == pytest.approx(0.1)


# --- in the queue


def rewards_of(row: int) -> tuple[float, float]:
    return (0.0, 1.0) if row % 3 else (1.0, 1.0)


def open_queue(folder: Path, run_id: str = "launch", **options: Any) -> ReplayQueue:
    options = {"data__selection": "on", "replay__max_staleness": 0, "steps": 1000, "seed": 5} | options
    journal = Journal(folder / "journal", flush="os", segment_bytes=8 << 10)
    trace = TraceWriter(folder / "trace.parquet")
    return ReplayQueue(small_config(**options), EndlessPrompts(10), trace, (), journal, run_id)


def train(queue: ReplayQueue, steps: int, order: Callable[[list[Lease]], None], rows: dict[int, int]) -> None:
    """Steps with groups that arrive in this order."""
    for _ in range(steps):
        step, leases = queue.ledger.steps + 1, list[Lease]()
        while queue.take(0, step)[0] == "wait":
            leases += ask_queue(queue, 0, step - 1, 100)[0]
            rows |= {lease.ticket: lease.prompt.row for lease in leases}
            order(leases)
            lease = leases.pop()
            queue.finish(*pack_group(make_group(lease, step - 1, rewards=rewards_of(lease.prompt.row))))
        queue.commit(step, {})
        queue.write()


def test_rows_do_not_depend_on_the_order_in_which_groups_arrive_or_on_restarts(tmp_path: Path) -> None:
    found = []
    for number in range(3):
        rows: dict[int, int] = {}
        folder = tmp_path / str(number)
        folder.mkdir()
        queue, dice = open_queue(folder), random.Random(number)
        for _ in range(4):
            train(queue, 10, dice.shuffle if number else list[Lease].reverse, rows)
            if number == 2:
                before = queue.state.snapshot()
                kill_queue(queue)
                queue = open_queue(folder)
                assert queue.state.snapshot() == before
        found.append((rows, to_plain(SelectionRecord, queue.state.selection), queue.measure.step_rewards))
        summary = queue.summary()["prompts"]
        assert (summary["solved"], summary["learning"], summary["unseen"]) == (4, 6, 0)
        assert summary["skipped"] > 20
        assert summary["by_source"] == {"test": {"learning": 6, "solved": 4, "hopeless": 0}}
    assert found[0] == found[1] == found[2]


def test_the_reward_of_a_step_is_that_of_all_rows(tmp_path: Path) -> None:
    queue = open_queue(tmp_path, replay__groups_per_step=4)
    train(queue, 80, list[Lease].reverse, {})
    truth = float(np.mean([np.mean(rewards_of(row)) for row in range(10)]))
    metrics = queue.measure.last_metrics
    assert metrics["reward/mean"] == metrics["reward/all_rows"] == pytest.approx(truth)
    assert queue.summary()["reward_last"] == pytest.approx(truth)
    generated = queue.measure.outcomes
    count = {name: one.summary() for name, one in generated.items()}
    assert count["zero_variance"]["reward_mean"] == 1.0
    assert metrics["prompts/skipped"] == queue.state.selection.skipped
    queue.close()


def test_the_weight_travels_to_the_learner_and_is_served_again(tmp_path: Path) -> None:
    queue = open_queue(tmp_path, data__selection={"unbiased": True}, replay__zero_variance="train")
    served = {}
    for step in range(1, 40):
        leases, _ = ask_queue(queue, 0, step - 1, 100)
        choices = {lease.ticket: queue.held[lease.ticket].choice for lease in leases}
        for lease in leases:
            queue.finish(*pack_group(make_group(lease, step - 1, rewards=rewards_of(lease.prompt.row))))
        _, groups = queue.take(0, step)
        served[step] = [group.header.weight for group in groups]
        mean = queue.state.selection.pools[0].trained.value if step > 1 else 1.0
        assert served[step] == [1 / choices[group.header.ticket].probability / mean for group in groups]
        queue.commit(step, {})
        queue.write()
    assert len({weight for weights in served.values() for weight in weights}) > 5
    assert max(max(weights) for weights in served.values()) <= 10.0
    kill_queue(queue)
    queue = open_queue(tmp_path, data__selection={"unbiased": True}, replay__zero_variance="train")
    queue.begin(0, 20)
    assert [group.header.weight for group in queue.take(0, 30)[1]] == served[30]


def test_a_group_without_its_rewards_says_nothing_of_its_row(tmp_path: Path) -> None:
    queue = open_queue(tmp_path)
    (lease, other), _ = ask_queue(queue, 0, 0, 100)
    queue.finish(*pack_group(make_group(lease, 0, status="failed")))
    queue.finish(*pack_group(make_group(other, 0)))
    assert [one.of_row.row for one in queue.state.selection.outcomes] == [other.prompt.row]
    queue.close()


@pytest.mark.parametrize(("steps", "says"), [(5, True), (6, False)])
def test_it_is_said_once_that_no_row_is_seen_again(steps: int, says: bool, tmp_path: Path) -> None:
    with structlog.testing.capture_logs() as logs:
        open_queue(tmp_path, steps=steps).close()
    found = [line for line in logs if "data.selection does nothing" in line["event"]]
    assert len(found) == says
    if says:
        assert (found[0]["groups_to_train"], found[0]["rows"]) == (10, 10)


def test_a_snapshot_of_the_selection_goes_through_msgpack(tmp_path: Path) -> None:
    queue = open_queue(tmp_path)
    train(queue, 30, list[Lease].reverse, {})
    stored = msgspec.msgpack.encode(to_plain(SelectionRecord, queue.state.selection))
    again = of_plain(SelectionRecord, msgspec.msgpack.decode(stored))
    assert msgspec.msgpack.encode(to_plain(SelectionRecord, again)) == stored
    queue.close()
