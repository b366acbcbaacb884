"""Evaluations: pass@k, metrics, and the book of what is handed out under random schedules."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from msgspec import structs

from asyncrl.errors import ProtocolError
from asyncrl.replay.evaluation import (
    CORRECT,
    STRANDED,
    Evaluations,
    PromptScore,
    eval_metrics,
    pass_at_k,
    pass_ks,
    score_table,
)
from asyncrl.types import Lease, Prompt
from asyncrl.wire.messages import Evaluated, ReleasedEvaluation
from tests.helpers.replay import small_config

LEASE_S, START_S = 100.0, 30.0


def make_prompts(count: int) -> list[Prompt]:
    return [Prompt(row, np.array([1, 2], dtype=np.int32), str(row), f"source{row % 2}") for row in range(count)]


def make_book(prompts: int = 4, samples: int = 2, every: int | None = 2, steps: int = 6) -> Evaluations:
    config = small_config(
        data__eval="eval.parquet",
        eval__every_steps=every,
        eval__samples=samples,
        steps=steps,
        launch__heartbeat_timeout_s=LEASE_S,
        launch__start_timeout_s=START_S,
    )
    return Evaluations(config=config, prompts=make_prompts(prompts))


def drop_stranded(book: Evaluations, now_s: float) -> None:
    """As the queue does."""
    for version in book.stranded(now_s):
        book.drop(version, STRANDED)


def result_of(lease: Lease, version: int, rewards: Sequence[float] = (0.0, 1.0)) -> Evaluated:
    return Evaluated(
        ticket=lease.ticket,
        attempt=lease.attempt,
        version=version,
        data_source=lease.prompt.data_source,
        rewards=list(rewards),
        status=["completed"] * len(rewards),
        tokens=10,
        recorded=None,
    )


def test_due_versions() -> None:
    config = small_config(data__eval="eval.parquet", eval__every_steps=4, steps=10)
    assert [version for version in range(11) if config.evaluates(version)] == [0, 4, 8, 10]
    config = small_config(data__eval=["a.parquet", "b.parquet"], steps=10)
    assert [version for version in range(11) if config.evaluates(version)] == [0, 10]
    config = small_config(eval__every_steps=1, steps=10)
    assert not any(config.evaluates(version) for version in range(11))


@pytest.mark.parametrize("num_samples", [1, 2, 5, 8])
def test_pass_at_k_is_the_mean_over_all_choices_of_k(num_samples: int) -> None:
    for num_correct, k in itertools.product(range(num_samples + 1), range(1, num_samples + 1)):
        outcomes = [index < num_correct for index in range(num_samples)]
        choices = list(itertools.combinations(outcomes, k))
        expected = sum(any(choice) for choice in choices) / len(choices)
        assert pass_at_k(num_samples, num_correct, k) == pytest.approx(expected)


def test_reported_ks_are_powers_of_two_and_the_number_of_samples() -> None:
    assert [pass_ks(n) for n in (1, 2, 3, 4, 6, 8)] == [[1], [1, 2], [1, 2, 3], [1, 2, 4], [1, 2, 4, 6], [1, 2, 4, 8]]


def test_scores_by_data_source_and_over_all() -> None:
    scores = [
        PromptScore("a", [1.0, CORRECT], ["completed", "truncated"], 6),
        PromptScore("a", [0.5, 0.999], ["completed", "completed"], 4),
        PromptScore("b", [0.0, 1.0], ["failed", "completed"], 20),
    ]
    table = score_table(scores)
    assert (table["a/pass@1"], table["a/pass@2"], table["a/prompts"], table["a/failed"]) == (0.5, 0.5, 2, 0)
    assert (table["b/pass@1"], table["b/pass@2"], table["b/reward"], table["b/failed"]) == (0.5, 1.0, 1.0, 1)
    none = score_table([PromptScore("c", [0.0, 0.0], ["failed", "failed"], 20)])
    assert "reward" not in none and (none["pass@2"], none["failed"]) == (0.0, 2)
    assert table["reward"] == pytest.approx((1.0 + CORRECT + 0.5 + 0.999 + 1.0) / 5)
    assert table["pass@1"] == pytest.approx(0.5)
    assert table["pass@2"] == pytest.approx(2 / 3)
    assert (table["completion_tokens"], table["truncated"], table["prompts"]) == (5.0, pytest.approx(1 / 6), 3)


def test_a_failed_completion_is_never_correct() -> None:
    assert PromptScore("a", [1.0], ["failed"], 1).num_correct == 0


def test_prompts_of_a_version_go_to_generators_that_have_it_only() -> None:
    book = make_book()
    assert book.running
    first = book.lease(0, 0, 3, 1.0)
    assert [lease.prompt.row for lease in first] == [0, 1, 2]
    assert all(lease.evaluation and lease.attempt == 0 for lease in first)
    assert book.left(0)
    assert [lease.prompt.row for lease in book.lease(1, 0, 3, 1.0)] == [3]
    assert not book.left(0)
    book.committed(1, due=False)
    assert book.lease(0, 1, 3, 2.0) == []
    book.committed(2, due=True)
    assert not {lease.ticket for lease in book.lease(0, 2, 9, 3.0)} & {lease.ticket for lease in first}


def test_result_is_complete_counted_once_and_reported_once() -> None:
    book = make_book()
    leases = book.lease(0, 0, 9, 1.0)
    for lease in leases:
        assert book.ended == []
        book.finish(result_of(lease, 0))
        book.finish(result_of(lease, 0))
    (result,) = book.ended
    assert (result["version"], result["at_step"], result["reward"], result["prompts"]) == (0, 0, 0.5, 4)
    assert (result["source0/pass@1"], result["source1/pass@2"]) == (0.5, 1.0)
    assert (book.prompts_done, book.tokens) == (4, 40)
    metrics = eval_metrics(book.unreported_results.pop(0))
    assert (metrics["eval/version"], metrics["eval/reward"], metrics["eval/source1/reward"]) == (0.0, 0.5, 0.5)
    assert book.unreported(0) is None
    book.finish(result_of(leases[0], 0))
    assert book.prompts_done == 4


def test_a_released_prompt_is_handed_out_again_and_the_first_result_counts() -> None:
    book = make_book(prompts=1)
    (first,) = book.lease(0, 0, 9, 1.0)
    book.release([ReleasedEvaluation(first.ticket, 5)])
    assert not book.left(0), "another attempt is not the one that holds the lease"
    book.release([ReleasedEvaluation(first.ticket, 0)])
    (again,) = book.lease(1, 0, 9, 2.0)
    assert (again.ticket, again.attempt, again.prompt.row) == (first.ticket, 1, first.prompt.row)
    book.finish(result_of(first, 0))  # the first attempt comes after all, of the same version
    book.finish(result_of(again, 0, (1.0, 1.0)))
    assert [result["reward"] for result in book.ended] == [0.5]


def test_dropped_with_its_reason_when_no_generator_has_the_version_any_more() -> None:
    book = make_book()
    kept, lost = book.lease(0, 0, 2, 1.0)
    book.finish(result_of(kept, 0))
    book.committed(1, due=False)
    book.lease(1, 1, 9, 2.0)
    drop_stranded(book, 3.0)
    assert book.running, "generator 0 has the version"
    book.lease(0, 1, 9, 4.0)
    drop_stranded(book, 5.0)
    assert book.running, "a prompt is still leased"
    book.release([ReleasedEvaluation(lost.ticket, lost.attempt)])
    drop_stranded(book, 6.0)
    assert not book.running
    reason = "no generator has the version any more"
    assert book.summary()["eval_dropped"] == [{"version": 0, "reason": reason, "done": 1, "prompts": 4}]
    book.finish(result_of(lost, 0))
    assert (book.ended, book.prompts_done) == ([], 1)


def test_a_silent_generator_does_not_hold_an_evaluation_open() -> None:
    book = make_book()
    book.lease(0, 0, 0, 1.0)
    drop_stranded(book, 1.0 + LEASE_S + START_S)
    assert book.running, "a restarted one may still come"
    drop_stranded(book, 1.1 + LEASE_S + START_S)
    assert [one["version"] for one in book.dropped] == [0]


def test_stopping_drops_everything() -> None:
    book = make_book()
    book.drop_all("the run stopped: enough")
    assert not book.running
    assert [one["reason"] for one in book.dropped] == ["the run stopped: enough"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rewards": [1.0]}, "evaluation ticket 0: 1 rewards, expected 2"),
        ({"status": ["completed"] * 3}, "evaluation ticket 0: 3 status, expected 2"),
        ({"rewards": [1.0, float("nan")]}, r"evaluation ticket 0: rewards \[1.0, nan\] are not finite"),
        ({"ticket": 3}, "evaluation ticket 3 of version 0 was never leased"),
        ({"attempt": 1}, "evaluation ticket 0 of version 0 was never leased"),
    ],
)
def test_a_result_that_does_not_fit_is_refused(change: dict, message: str) -> None:  # type: ignore[type-arg]
    book = make_book()
    (lease,) = book.lease(0, 0, 1, 1.0)
    with pytest.raises(ProtocolError, match=message):
        book.finish(structs.replace(result_of(lease, 0), **change))


@dataclass
class Generator:
    """Follows the rules of the generator's loop: no due version is skipped, and none is left too early."""

    index: int
    version: int = -1
    pinned: bool = False
    alive: bool = True
    leases: list[Lease] = field(default_factory=list)

    def load(self, newest: int, book: Evaluations) -> None:
        if not self.alive or self.pinned or self.leases or self.version == newest:
            return
        due = [v for v in range(self.version + 1, newest + 1) if book.config.evaluates(v)]
        self.version = due[0] if due and self.version >= 0 else newest
        self.pinned = book.config.evaluates(self.version)

    def ask(self, count: int, book: Evaluations, now_s: float) -> None:
        if self.alive and self.version >= 0:
            self.leases += book.lease(self.index, self.version, count if self.pinned else 0, now_s)
            self.pinned = self.pinned and book.left(self.version)

    def finish(self, book: Evaluations) -> None:
        if self.alive and self.leases:
            book.finish(result_of(self.leases.pop(), self.version, (float(self.version),) * 2))

    def stop(self, book: Evaluations, *, cleanly: bool) -> None:
        """Ends; its place is taken by a new one that loads whatever is newest."""
        if cleanly:
            book.release(ReleasedEvaluation(lease.ticket, lease.attempt) for lease in self.leases)
        else:  # the launcher reports it lost
            book.release([ReleasedEvaluation(lease.ticket, lease.attempt) for lease, *_ in book.leases_of(self.index)])
        self.leases, self.version, self.pinned = [], -1, False


@pytest.mark.parametrize("deaths", [False, True])
@pytest.mark.parametrize("seed", range(30))
def test_any_schedule_ends_with_every_due_version_complete_or_dropped(seed: int, deaths: bool) -> None:
    rng = random.Random(seed)
    steps, prompts = rng.randint(1, 12), rng.randint(1, 9)
    every = rng.choice([None, 1, 2, 5])
    book = make_book(prompts, every=every, steps=steps)
    generators = [Generator(index) for index in range(rng.randint(1, 4))]
    newest, now_s = 0, 0.0
    for _ in range(10_000):
        now_s += rng.random() * 3
        one = rng.choice(generators)
        one.load(newest, book)
        one.ask(rng.randint(0, 4), book, now_s)
        for _ in range(rng.randint(0, 3)):
            one.finish(book)
        if newest < steps and rng.random() < 0.2:
            newest += 1
            book.committed(newest, due=newest == steps or (every is not None and newest % every == 0))
        if deaths and rng.random() < 0.05:
            one.stop(book, cleanly=rng.random() < 0.5)
            one.alive = rng.random() < 0.7 or sum(g.alive for g in generators) == 1
        drop_stranded(book, now_s)
        if newest == steps and not book.running:
            break
    assert not book.running, "an evaluation hangs"
    due = [version for version in range(steps + 1) if book.config.evaluates(version)]
    outcomes = [one["version"] for one in book.ended] + [one["version"] for one in book.dropped]
    assert sorted(outcomes) == due
    for result in book.ended:
        assert result["reward"] == result["version"], "completions of another version are among them"
        assert result["prompts"] == prompts
    if not deaths:
        assert book.dropped == []
    assert book.tokens == 10 * book.prompts_done
