"""The queue continues from its journal, wherever it died."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack
import msgspec
import pyarrow.parquet as pq
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from asyncrl.config.config import Config
from asyncrl.errors import ConfigError, JournalError, ProtocolError, RunError
from asyncrl.observe.trace import TraceWriter
from asyncrl.replay.codec import FORMAT, pack_group
from asyncrl.replay.journal import Journal, read_journal, segments_of
from asyncrl.replay.ledger import State
from asyncrl.replay.queue import SUSPECT_S, ReplayQueue
from asyncrl.replay.state import EVENTS, KINDS, Event, Snapshot
from asyncrl.types import Lease
from asyncrl.wire.messages import Evaluated, GeneratorStats, ReleasedEvaluation, ReleasedLease
from tests.helpers.examples import examples
from tests.helpers.journal import record_with
from tests.helpers.replay import EndlessPrompts, ask_queue, kill_queue, make_group, saved_state, small_config

SEGMENT_BYTES = 16 << 10
"""So small that a few steps fill one."""


@pytest.fixture(scope="module", autouse=True)
def quick_disk() -> Iterator[None]:
    """No process of these tests is cut from its disk, so that nothing needs to reach it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


def open_queue(
    folder: Path,
    config: Config,
    *,
    run_id: str = "launch",
    prompts: int = 0,
    checkpoint: bytes = b"",
) -> ReplayQueue:
    journal = Journal(folder / "journal", flush="os", segment_bytes=SEGMENT_BYTES)
    trace = TraceWriter(folder / "trace.parquet")
    evaluated = [EndlessPrompts().prompt(row) for row in range(prompts)]
    return ReplayQueue(config, EndlessPrompts(), trace, evaluated, journal, run_id, checkpoint)


def finish(queue: ReplayQueue, lease: Lease, version: int, **options: Any) -> None:
    queue.finish(*pack_group(make_group(lease, version, **options)))


def train(queue: ReplayQueue, step: int, **options: Any) -> dict[str, float]:
    """A step of a generator and a learner that do nothing else."""
    for lease in ask_queue(queue, 0, step - 1, 100)[0]:
        finish(queue, lease, step - 1)
    assert queue.take(0, step)[0] == "shard"
    metrics = queue.commit(step, {"learner/wait_s": 0.1}, **options).metrics
    queue.store.write()
    return metrics


def names(leases: list[Lease]) -> list[tuple[int, int, bool]]:
    return sorted((lease.ticket, lease.attempt, lease.evaluation) for lease in leases)


def frames(groups: list[Any]) -> list[tuple[Any, list[bytes]]]:
    return [(header, [array.tobytes() for array in arrays]) for header, arrays in groups]


@dataclass
class Run:
    """A queue under random events and deaths, and what must be true of it whatever happens."""

    folder: Path
    config: Config
    queue: ReplayQueue = field(init=False)
    launch: int = 0
    number: int = 0
    session: int = 0
    leases: list[Lease] = field(default_factory=list)
    """The leases of the generator, according to the answers that it got."""
    orphans: list[Lease] = field(default_factory=list)
    """Leases of former sessions: their groups may still arrive."""
    versions: dict[tuple[int, int], int] = field(default_factory=dict)
    """That each attempt was leased at."""
    generated: dict[tuple[int, int], int] = field(default_factory=dict)
    """Tokens that the queue was first told of each attempt."""
    ahead_s: float = 0.0
    """Simulated time that has passed."""
    sent: list[tuple[Lease, int]] = field(default_factory=list)
    batches: dict[int, list[Any]] = field(default_factory=dict)
    """The groups served for each step."""
    metrics: dict[int, dict[str, float]] = field(default_factory=dict)
    rows: dict[int, int] = field(default_factory=dict)
    """Prompt row of each ticket."""
    attempts: set[tuple[int, int]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._open()

    def _open(self) -> None:
        self.queue = open_queue(self.folder, self.config, run_id=f"launch-{self.launch}", prompts=2)
        now = self.queue.clock.now
        self.queue.clock.now = lambda: now() + self.ahead_s  # type: ignore[method-assign]

    @property
    def steps(self) -> int:
        return self.queue.ledger.steps

    def do(self, event: str, pick: int) -> None:
        getattr(self, event)(pick)
        if event not in ("die", "die_unwritten", "relaunch"):
            self.queue.store.write()
        self.queue.ledger.check()
        assert self.queue.ledger.generated.tokens == sum(self.generated.values()), "tokens are in no box or in two"

    def ask(self, pick: int) -> None:
        self.number += 1
        first = self._ask(pick)
        if pick % 3 == 0:  # the answer is lost with the process, or only late
            if pick % 2:
                self.die(pick)
            assert names(self._ask(pick)) == names(first), "asked again, other leases came"
        self._note(first)
        self.leases += first

    def _note(self, leases: list[Lease]) -> None:
        """Notes what was leased, and checks that it is new."""
        for lease in leases:
            if lease.evaluation:
                continue
            assert (lease.ticket, lease.attempt) not in self.attempts, "an attempt was leased twice"
            self.attempts.add((lease.ticket, lease.attempt))
            self.versions[lease.ticket, lease.attempt] = self.queue.ledger.live[lease.ticket].start_version
            assert self.rows.setdefault(lease.ticket, lease.prompt.row) == lease.prompt.row
            assert lease.prompt.row == lease.ticket

    def _ask(self, pick: int) -> list[Lease]:
        version = max(0, self.steps - pick % 2)
        leases, _ = ask_queue(
            self.queue, 0, version, 1 + pick % 4, pick % 2, session=f"session {self.session}", number=self.number
        )
        self.queue.store.write()
        return leases

    def finish(self, pick: int) -> None:
        if not self.leases:
            return
        lease = self.leases.pop(pick % len(self.leases))
        if lease.evaluation:
            self._evaluated(lease)
            return
        version = self.versions[lease.ticket, lease.attempt]
        self.sent.append((lease, version))
        self._send(lease, version, zero_variance=pick == 7)

    def late(self, pick: int) -> None:
        """A group of a session that is over arrives."""
        if not self.orphans:
            return
        lease = self.orphans.pop(pick % len(self.orphans))
        if lease.evaluation:
            self._evaluated(lease)
            return
        ticket = self.queue.ledger.live.get(lease.ticket)
        waits = ticket is not None and ticket.state in (State.LEASED, State.RETURNED)
        version = self.versions[lease.ticket, lease.attempt]
        in_time = self.queue.ledger.accepts(lease.ticket, version)
        self._send(lease, version)
        if waits and in_time:
            assert self.queue.held[lease.ticket].finished.attempt == lease.attempt, "the first that came is not used"

    def _send(self, lease: Lease, version: int, *, zero_variance: bool = False) -> None:
        rewards = (1.0, 1.0) if zero_variance else (0.0, 1.0)
        tokens = (1 + lease.ticket % 5, 4 + lease.attempt)
        self.generated.setdefault((lease.ticket, lease.attempt), sum(tokens))
        finish(self.queue, lease, version, rewards=rewards, completion_tokens=tokens)

    def silence(self, pick: int) -> None:
        """The generator is silent while another gets some of its leases; then it continues with its session."""
        is_current = self.queue.ledger.is_current
        held = [lease for lease in self.leases if not lease.evaluation and is_current(lease.ticket, lease.attempt)]
        self.number += 1
        ask_queue(self.queue, 0, self.steps, 0, session=f"session {self.session}", number=self.number)
        for _ in range(round(SUSPECT_S) + 2):
            self.ahead_s += 1.0
            self.queue.check_silence()
        version = max(0, self.steps - pick % 2)
        got, _ = ask_queue(self.queue, 1, version, pick % 5)
        self._note(got)
        passed = {lease.ticket for lease in got}
        for lease in held:
            assert is_current(lease.ticket, lease.attempt) == (lease.ticket not in passed)
        self.orphans += [lease for lease in self.leases if not lease.evaluation and lease.ticket in passed]
        self.leases = [lease for lease in self.leases if lease.evaluation or lease.ticket not in passed]
        for lease in got[: pick % 3]:
            self.orphans.append(lease)
            self.late(-1)
        self.orphans += got[pick % 3 :]
        self.queue.lost(1)

    def _evaluated(self, lease: Lease) -> None:
        for one in self.queue.evaluation.running.values():
            if one.first <= lease.ticket < one.first + 2:
                result = Evaluated(lease.ticket, lease.attempt, one.version, "test", [1.0], ["completed"], 3, None)
                self.queue.evaluated(result)
                return

    def send_again(self, pick: int) -> None:
        if self.sent:
            self._send(*self.sent[pick % len(self.sent)])

    def release(self, pick: int) -> None:
        if self.leases:
            lease = self.leases.pop(pick % len(self.leases))
            for _ in range(2):
                if lease.evaluation:
                    self.queue.release(0, [], [ReleasedEvaluation(lease.ticket, lease.attempt)])
                else:
                    self.generated.setdefault((lease.ticket, lease.attempt), pick)
                    self.queue.release(0, [ReleasedLease(lease.ticket, lease.attempt, pick)])

    def lose(self, pick: int) -> None:
        """The generator dies; its messages may still arrive."""
        if pick % 2:
            self.queue.lost(0)
        self.session, self.orphans, self.leases = self.session + 1, self.orphans + self.leases, []
        self.ask(1)
        assert self.queue.state.leased_by[0] == sum(not lease.evaluation for lease in self.leases)

    def step(self, pick: int) -> None:
        step = self.steps + 1
        if not self._take(step):
            return
        if pick % 3:
            self._take(step + 1)
        if pick % 4 == 2:
            self.die(pick)
        if pick % 2:
            checkpoints = [max(0, step - 2)] if step > 2 else []
            self.metrics[step] = self.queue.commit(step, {"learner/wait_s": 0.5}, checkpoints=checkpoints).metrics
            self.queue.store.write()
            again = self.queue.commit(step, {"learner/wait_s": 9.0}).metrics
            assert again == self.metrics[step], "committed again, other metrics came"

    def _take(self, step: int) -> bool:
        outcome, groups = self.queue.take(0, step)
        self.queue.store.write()
        if outcome == "shard":
            assert frames(groups) == self.batches.setdefault(step, frames(groups)), "another batch was served again"
        return outcome == "shard"

    def catch_up(self, pick: int) -> None:
        """The learner starts again from the last checkpoint that the queue was told of."""
        begin = max(0, self.steps - 2)
        if begin <= 0 or self.steps < 3:
            return
        before = saved_state(self.queue)
        assert self.queue.begin(0, begin) == self.steps
        for step in range(begin + 1, self.steps + 1):
            assert frames(self.queue.take(0, step)[1]) == self.batches[step]
            saved = self.queue.commit(step, {}, saving=True)
            assert saved.metrics == self.metrics[step]
            if step < self.steps:
                assert not saved.state, "the state at an earlier step is gone"
                continue
            stored = Snapshot.of_checkpoint(saved.state)
            assert stored.queue.ledger.steps == step and msgspec.msgpack.encode(stored) == saved.state
            trace, evaluated = TraceWriter(self.folder / "other.parquet"), [EndlessPrompts().prompt(0)] * 2
            again = ReplayQueue(self.config, EndlessPrompts(), trace, evaluated, checkpoint=saved.state)
            assert again.ledger.count(State.RETURNED) == len(again.ledger.live) and not again.state.taken
            again.ledger.check()
            again.store.close()
        assert saved_state(self.queue) == before

    def die(self, _: int) -> None:
        before = saved_state(self.queue)
        kill_queue(self.queue)
        self._open()
        assert saved_state(self.queue) == before

    def die_unwritten(self, pick: int) -> None:
        """Dies before the answer: what it had decided has not happened."""
        before = saved_state(self.queue)
        ask_queue(self.queue, 0, 0, 4, session=f"session {self.session}", number=self.number + 1)
        self.queue.take(0, self.steps + 1)
        kill_queue(self.queue)
        self._open()
        assert saved_state(self.queue) == before

    def relaunch(self, _: int) -> None:
        issued, charged = self.queue.ledger.issued, self.queue.ledger.charged
        kill_queue(self.queue)
        self.launch, self.session, self.leases, self.orphans = self.launch + 1, self.session + 1, [], []
        self._open()
        assert (self.queue.ledger.issued, self.queue.ledger.charged) == (issued, charged)
        assert self.queue.ledger.count(State.LEASED) == 0


WEIGHTS = {"ask": 3, "finish": 5, "step": 3}
"""Relative frequency of events; 1 for the others."""
NAMES = [
    "ask", "finish", "step", "send_again", "release", "lose", "late", "silence", "catch_up", "die",
    "die_unwritten", "relaunch",
]  # fmt: skip
SCHEDULES = st.lists(
    st.tuples(st.sampled_from([name for name in NAMES for _ in range(WEIGHTS.get(name, 1))]), st.integers(0, 11)),
    min_size=20,
    max_size=150,
)


@settings(max_examples=examples(60), phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(events=SCHEDULES, max_staleness=st.integers(0, 2))
def test_any_schedule_with_deaths_loses_nothing(events: list[tuple[str, int]], max_staleness: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        config = small_config(
            replay__max_staleness=max_staleness,
            data__eval="eval.parquet",
            eval__every_steps=2,
            steps=1000,
            launch__generators=2,
        )
        run = Run(Path(name), config)
        for event, pick in events:
            run.do(event, pick)
        goal = run.steps + max_staleness + 2
        for _ in range(200):
            if run.steps >= goal:
                break
            for event, pick in (("ask", 4), ("finish", 0), ("finish", 0), ("step", 1)):
                run.do(event, pick)
            if not run.leases and run.queue.ledger.count(State.LEASED):
                run.lose(1)
        assert run.steps >= goal, "the run is stuck"
        run.die(0)
        run.queue.store.close()
        rows = pq.read_table(Path(name) / "trace.parquet").to_pylist()
        trained = [row["ticket"] for row in rows if row["outcome"] == "trained"]
        assert len(trained) == len(set(trained)) == 2 * run.steps
        served = {header.ticket for step, batch in run.batches.items() if step <= run.steps for header, _ in batch}
        assert set(trained) == served
        assert all(0 <= row["started_s"] <= row["finished_s"] for row in rows)
        ages = [row["train_version"] - row["start_version"] for row in rows if row["outcome"] == "trained"]
        assert max(ages) <= max_staleness


class RecordedError(Exception):
    """Raised in place of a record."""


def test_nothing_changes_before_its_record(tmp_path: Path) -> None:
    queue = open_queue(tmp_path, small_config(data__eval="eval.parquet", eval__samples=1, steps=9), prompts=2)
    record, kinds = queue.store.record, []

    def do(kind: str, call: Callable[[], Any]) -> Any:
        """The call, first with a store that dies when it is to record the event of this kind."""

        def die(event: Event, *_: object) -> None:
            raise RecordedError(KINDS[type(event)])

        before = saved_state(queue)
        queue.store.record = die  # type: ignore[method-assign]
        with pytest.raises(RecordedError, match=f"^{kind}$"):
            call()
        assert saved_state(queue) == before, f"{kind} changed something before it was recorded"
        queue.store.record = record  # type: ignore[method-assign]
        kinds.append(kind)
        return call()

    asked = do("lease", lambda: ask_queue(queue, 0, 0, 100, 9))[0]
    evaluation, *groups = (one for one in asked if not (one.evaluation and one.ticket))
    result = Evaluated(evaluation.ticket, 0, 0, "test", [1.0], ["completed"], 3, None)
    do("evaluated", lambda: queue.evaluated(result))
    do("group", lambda: finish(queue, groups[0], 0))
    finish(queue, groups[1], 0)
    do("take", lambda: queue.take(0, 1))
    do("commit", lambda: queue.commit(1, {}))
    do("return", lambda: queue.lost(0))
    again = ask_queue(queue, 0, 1, 2)[0]
    finish(queue, again[0], 1)
    do("lose", lambda: finish(queue, groups[2], 0))
    do("drop", queue.check_silence)
    do("scale", lambda: queue.scale(2))
    do("stop", lambda: queue.stop("enough"))
    assert {*kinds, "state"} == set(EVENTS)
    queue.store.close()


def test_restart_within_a_launch_keeps_leases_and_another_launch_takes_them_back(tmp_path: Path) -> None:
    config = small_config(launch__heartbeat_timeout_s=10)
    queue = open_queue(tmp_path, config)
    first, second, *_ = ask_queue(queue, 0, 0, 100)[0]
    finish(queue, first, 0)
    queue.scale(3)
    queue.store.write()
    kill_queue(queue)
    queue = open_queue(tmp_path, config)
    assert queue.ledger.is_current(second.ticket, 0)
    assert queue.state.generators_wanted == 3
    queue.stop("interrupted")
    queue.store.write()
    kill_queue(queue)
    queue = open_queue(tmp_path, config, run_id="another")
    assert (queue.state.stop_reason, queue.state.generators_wanted) == ("", 1)
    (again, *_) = ask_queue(queue, 0, 0, 1, session="new")[0]
    assert (again.ticket, again.attempt, again.prompt.row) == (second.ticket, 1, second.prompt.row)
    assert ask_queue(queue, 0, 0, 100, session="new")[1] == "staleness"
    assert queue.ledger.charged == 4
    queue.store.close()


def test_batches_that_are_taken_and_not_trained_are_those_of_the_next_launch(tmp_path: Path) -> None:
    config = small_config(launch__learners=2, replay__groups_per_step=4, replay__zero_variance="drop")
    queue = open_queue(tmp_path, config)
    for lease in ask_queue(queue, 0, 0, 100)[0]:
        finish(queue, lease, 0, rewards=(1.0, 1.0) if lease.ticket == 6 else (0.0, 1.0))
    batches = {(step, rank): frames(queue.take(rank, step)[1]) for step in (1, 2) for rank in (0, 1)}
    assert [len(shard) for shard in batches.values()] == [2, 2, 2, 1], "ticket 6 is dropped"
    for steps in (0, 1):
        queue.store.write()
        kill_queue(queue)
        queue = open_queue(tmp_path, config, run_id=f"launch after {steps} steps")
        assert batches == {(step, rank): frames(queue.take(rank, step)[1]) for step, rank in batches}
        assert queue.ledger.taken() == [4 * steps + number for number in range(4)]
        queue.commit(steps + 1, {})
    assert (queue.ledger.steps, queue.state.taken) == (2, [])
    queue.store.close()


NEVER_ABOVE_0 = (-1.0, 1.0)
"""Rewards of groups with which an alarm ends a run."""


@pytest.mark.parametrize("how", ["warn", "stop", "rollback"])
def test_a_launch_does_not_go_on_from_a_step_that_stopped_the_run(tmp_path: Path, how: str) -> None:
    """The launcher was killed before it had read why the run stopped."""
    config = small_config(steps=9, learner__on_collapse=how)
    queue = open_queue(tmp_path, config)
    saved = b""
    for step in (1, 2, 3, 4, 5):
        for lease in ask_queue(queue, 0, step - 1, 100)[0]:
            finish(queue, lease, step - 1, rewards=NEVER_ABOVE_0)
        assert queue.take(0, step)[0] == queue.take(0, step + 1)[0] == "shard"
        saved = queue.commit(step, {"correction/behavior_kl": 1.0 if step > 2 else 0.0}, saving=True).state
        queue.store.write()
    stops = how != "warn"
    for run_id in ("launch", "another launch", "a third one"):
        kill_queue(queue)
        queue = open_queue(tmp_path, config, run_id=run_id)
        assert (queue.done, queue.summary()["collapse"]["stopped"]) == (stops, stops)
        assert queue.take(0, 6)[0] == ("stop" if stops else "shard")
        assert bool(ask_queue(queue, 0, 5, 100)[0]) != stops
    kill_queue(queue)
    shutil.rmtree(tmp_path / "journal")
    assert open_queue(tmp_path, config, run_id="without", checkpoint=saved).done == stops
    shutil.rmtree(tmp_path / "journal")
    warned = open_queue(tmp_path, small_config(steps=9), run_id="it may go on", checkpoint=saved)
    assert not warned.done and ask_queue(warned, 0, 5, 100)[0]


def test_a_run_that_went_on_after_an_alarm_is_recovered_as_it_was_whatever_is_wanted_now(tmp_path: Path) -> None:
    def config(on_collapse: str) -> Config:
        own = {"data__eval": "eval.parquet", "eval__every_steps": 1, "eval__samples": 1}
        return small_config(steps=9, learner__on_collapse=on_collapse, **own)

    queue = open_queue(tmp_path, config("warn"), prompts=1)
    for step in (1, 2, 3, 4, 5):
        for lease in ask_queue(queue, 0, step - 1, 100)[0]:
            finish(queue, lease, step - 1, rewards=NEVER_ABOVE_0)
        assert queue.take(0, step)[0] == "shard"
        queue.commit(step, {"correction/behavior_kl": 1.0 if step > 2 else 0.0})
        evaluate(queue, step)
    ended = [one["version"] for one in queue.evaluation.ended]
    assert len(queue.summary()["collapse"]["alarms"]) == 1 and 5 in ended
    kill_queue(queue)
    again = open_queue(tmp_path, config("stop"), prompts=1, run_id="another launch")
    assert [one["version"] for one in again.evaluation.ended] == ended and again.done
    again.store.close()


def test_segments_go_when_checkpoints_cover_them(tmp_path: Path) -> None:
    config = small_config(steps=200, replay__max_staleness=0)
    queue = open_queue(tmp_path, config)
    for step in range(1, 101):
        train(queue, step, checkpoints=[(step - 1) // 10 * 10] if step > 10 else [])
    kept = segments_of(tmp_path / "journal")
    assert kept[0] > 1, "nothing was dropped"
    assert len(kept) <= 6
    queue.begin(0, 90)
    for step in range(91, 101):
        assert queue.take(0, step)[0] == "shard"
    with pytest.raises(ProtocolError, match=r"step 3 is no longer in the journal .*; resume from the newest"):
        queue.take(0, 3)
    kill_queue(queue)
    queue = open_queue(tmp_path, config)
    assert queue.ledger.steps == 100
    train(queue, 101)
    queue.store.close()


def test_segments_stay_while_the_snapshot_of_the_current_one_refers_to_their_groups(tmp_path: Path) -> None:
    config = small_config(steps=200)
    queue = open_queue(tmp_path, config)
    for lease in ask_queue(queue, 0, 0, 2)[0]:
        finish(queue, lease, 0)
    queue.store.write()
    kill_queue(queue)
    queue = open_queue(tmp_path, config, run_id="next launch")
    assert queue.store.journal is not None and queue.store.journal.current == 2
    train(queue, 1, checkpoints=[1])
    assert segments_of(tmp_path / "journal") == [1, 2], "the snapshot in segment 2 refers to groups in segment 1"
    before = saved_state(queue)
    kill_queue(queue)
    queue = open_queue(tmp_path, config, run_id="next launch")
    assert saved_state(queue) == before
    queue.store.close()
    queue = open_queue(tmp_path, config, run_id="third launch")
    for step in range(2, 60):
        train(queue, step, checkpoints=[step])
    assert segments_of(tmp_path / "journal")[0] > 2
    queue.store.close()


def test_keep_all_drops_nothing(tmp_path: Path) -> None:
    queue = open_queue(tmp_path, small_config(steps=200, replay__max_staleness=0, journal__retention="all"))
    for step in range(1, 61):
        assert not queue.commit(step - 1, {}).checkpoint_wanted if step > 1 else True
        train(queue, step, checkpoints=[step])
    segments = segments_of(tmp_path / "journal")
    assert segments == list(range(1, len(segments) + 1))
    assert len(segments) > 3
    takes = [record for _, record in read_journal(tmp_path / "journal") if record.kind == "take"]
    assert len(takes) == 60
    queue.store.close()


def test_a_journal_that_grows_asks_for_checkpoints_and_stops_leases_at_its_ceiling(tmp_path: Path) -> None:
    config = small_config(steps=20_000, replay__max_staleness=4, journal__max_bytes=1 << 20)
    queue = open_queue(tmp_path, config)
    journal = queue.store.journal
    assert journal is not None
    step = wanted = 0
    while journal.num_bytes < config.journal.max_bytes:
        step += 1
        for lease in ask_queue(queue, 0, step - 1, 100)[0]:
            finish(queue, lease, step - 1, completion_tokens=(2000, 2000))
        queue.take(0, step)
        told = queue.commit(step, {})
        queue.store.write()
        assert not told.checkpoint_wanted or journal.num_bytes > config.journal.max_bytes / 2
        wanted += told.checkpoint_wanted
    assert 1 <= wanted <= 9
    leases, reason = ask_queue(queue, 0, step, 100)
    assert reason == "journal"
    for lease in leases:
        finish(queue, lease, step, completion_tokens=(2000, 2000))
    queue.take(0, step + 1)
    queue.commit(step + 1, {}, checkpoints=[step])
    queue.store.write()
    assert journal.num_bytes < config.journal.max_bytes / 2
    queue.store.close()


def test_begin_ahead_of_the_journal_names_both_and_the_way_out(tmp_path: Path) -> None:
    queue = open_queue(tmp_path, small_config())
    train(queue, 1)
    with pytest.raises(ProtocolError, match=r"of step 7, the journal ends at step 1.*--discard-journal"):
        queue.begin(0, 7)
    queue.store.close()


def test_checkpoint_without_journal_takes_every_ticket_back(tmp_path: Path) -> None:
    config = small_config(steps=100)
    (tmp_path / "before").mkdir()
    queue = open_queue(tmp_path / "before", config)
    for step in (1, 2):
        train(queue, step)
    saved = queue.commit(2, {}, saving=True).state
    live = {number: held.prompt.row for number, held in queue.held.items()}
    train(queue, 3)
    queue.store.close()
    (tmp_path / "after").mkdir()
    queue = open_queue(tmp_path / "after", config, run_id="another", checkpoint=saved)
    assert (queue.ledger.steps, queue.begin(0, 2)) == (2, 2)
    queue.ledger.check()
    leases = ask_queue(queue, 0, 2, 100)[0]
    assert {lease.ticket: lease.prompt.row for lease in leases} == live | {6: 6, 7: 7}
    assert [lease.attempt for lease in leases] == [1, 1, 0, 0]
    for lease in leases:
        finish(queue, lease, 2)
    assert queue.take(0, 3)[0] == "shard"
    assert queue.summary()["ledger"]["trajectories"]["returned"] == 2 * len(live)
    queue.store.write()
    kill_queue(queue)
    queue = open_queue(tmp_path / "after", config, run_id="another", checkpoint=b"not read")
    assert queue.ledger.steps == 2
    queue.store.close()
    with pytest.raises(RunError, match=r"queue\.msgpack of the checkpoint cannot be read"):
        ReplayQueue(config, EndlessPrompts(), queue.store.trace, checkpoint=b"\xc1rubbish")


def test_a_checkpoint_of_another_format_is_refused_with_the_way_out(tmp_path: Path) -> None:
    queue = open_queue(tmp_path, small_config())
    saved = msgpack.unpackb(queue.store.snapshot(), strict_map_key=False)
    queue.store.close()
    for body, number in (
        (saved | {"format": FORMAT + 1}, FORMAT + 1),
        ({name: saved[name] for name in saved if name != "format"}, 2),
    ):
        with pytest.raises(
            RunError, match=f"is of format {number}; this version of asyncrl reads format {FORMAT}: resume"
        ):
            ReplayQueue(small_config(), EndlessPrompts(), queue.store.trace, checkpoint=msgpack.packb(body) or b"")


def test_a_record_that_the_queue_does_not_write_is_an_error_of_the_journal(tmp_path: Path) -> None:
    queue = open_queue(tmp_path, small_config())
    assert queue.store.journal is not None
    queue.store.journal.append(record_with("group", refunded="", signal=True))
    queue.store.write()
    kill_queue(queue)
    with pytest.raises(
        JournalError,
        match=r"row 0: the 'group' there cannot be read: .*required field `header`; the journal is damaged: resume",
    ):
        open_queue(tmp_path, small_config())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"replay__groups_per_step": 4}, "replay.groups_per_step = 4: the run was started with 2; resume it with that"),
        ({"replay__max_staleness": 0}, "replay.max_staleness = 0: the run was started with 1; resume it with that"),
        ({"generator__group_size": 3}, "generator.group_size = 3: the run was started with 2"),
    ],
)
def test_settings_that_do_not_fit_the_journal_are_refused(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    queue = open_queue(tmp_path, small_config())
    queue.store.close()
    with pytest.raises(ConfigError, match=message):
        open_queue(tmp_path, small_config(**change), run_id="another")


@pytest.mark.parametrize("ranks", [1, 4, 2])
def test_another_number_of_learners_trains_each_ticket_once(tmp_path: Path, ranks: int) -> None:
    """Two ranks have trained two steps and taken two more when the queue dies; `ranks` train them again and on, and the
    queue dies once more."""

    def taken(config: Config, *, steps: int) -> dict[tuple[int, int], Any]:
        learners = range(config.launch.learners)
        outcomes = {(step, rank): queue.take(rank, step) for step in range(1, steps + 1) for rank in learners}
        assert {outcome for outcome, _ in outcomes.values()} == {"shard"}, outcomes
        return {where: frames(groups) for where, (_, groups) in outcomes.items()}

    shared = {"replay__groups_per_step": 4, "replay__zero_variance": "drop", "steps": 6}
    before, now = small_config(launch__learners=2, **shared), small_config(launch__learners=ranks, **shared)
    queue = open_queue(tmp_path, before)
    for step in (1, 2):
        train(queue, step)
    for lease in ask_queue(queue, 0, 2, 100)[0]:
        length = 1 + 7 * lease.ticket % 5
        finish(queue, lease, 2, rewards=(1.0, 1.0) if lease.ticket == 14 else (0.0, 1.0), completion_tokens=(length, 2))
    batches = taken(before, steps=4)
    tickets = {
        step: {group.ticket for (s, _), shard in batches.items() if s == step for group, _ in shard}
        for step in (1, 2, 3, 4)
    }
    queue.store.write()
    dealt: list[dict[tuple[int, int], Any]] = []
    for launch in ("another", "yet another"):
        kill_queue(queue)
        queue = open_queue(tmp_path, now, run_id=launch)
        assert [queue.begin(rank, 0) for rank in range(ranks)] == [2] * ranks
        dealt.append(taken(now, steps=4))
    assert dealt[0] == dealt[1]
    assert (dealt[0] == batches) == (ranks == 2)
    for step, expected in tickets.items():
        shards = [[group.ticket for group, _ in dealt[0][step, rank]] for rank in range(ranks)]
        assert sorted(number for shard in shards for number in shard) == sorted(expected)
        assert max(map(len, shards)) == -(-len(expected) // ranks)
    for step in (3, 4):
        queue.commit(step, {})
    train(queue, 5)
    queue.ledger.check()
    assert (queue.ledger.steps, queue.ledger.trained.groups) == (5, 20)
    queue.store.close()
    trace = pq.read_table(tmp_path / "trace.parquet").to_pylist()
    trained = [row["ticket"] for row in trace if row["outcome"] == "trained"]
    assert sorted(trained) == list(range(20))


def test_a_new_session_gives_back_what_the_former_held_and_the_former_is_told_to_leave(tmp_path: Path) -> None:
    queue = open_queue(tmp_path, small_config(data__eval="eval.parquet"), prompts=2)
    assert len(ask_queue(queue, 0, 0, 100, 9, session="a", number=1)[0]) == 6
    again = ask_queue(queue, 0, 0, 100, 9, session="b", number=1)[0]
    assert [lease.attempt for lease in again] == [1] * 6
    assert ask_queue(queue, 0, 0, 100, session="a", number=2) == ([], "session")
    assert (queue.leaves(0, "a"), queue.leaves(0, "b")) == (True, False)
    queue.lost(0)
    assert queue.status()["generators"] == {}
    assert len(ask_queue(queue, 0, 0, 100, session="b", number=2)[0]) == 4
    queue.store.close()


def test_scaling_down_lets_the_last_leave_and_shares_among_the_others(tmp_path: Path) -> None:
    queue = open_queue(tmp_path, small_config(launch__generators=4))
    assert queue._share == 1
    queue.scale(2)
    assert (queue._share, queue.leaves(1, ""), queue.leaves(2, "")) == (2, False, True)
    assert ask_queue(queue, 2, 0, 5) == ([], "scale")
    with pytest.raises(ProtocolError, match="scale to 0 generators"):
        queue.scale(0)
    assert queue.status()["generators_wanted"] == 2
    queue.store.close()


def test_statistics_of_a_repeated_ask_count_once_and_sessions_add_up(tmp_path: Path) -> None:
    queue = open_queue(tmp_path, small_config())
    told = GeneratorStats.of(tokens=10, recomputed_tokens=3, stall_ms=[5.0])
    for _ in range(3):
        ask_queue(queue, 0, 0, 1, session="a", number=1, stats=told)
    more = GeneratorStats.of(tokens=4, recomputed_tokens=2, stall_ms=[7.0])
    ask_queue(queue, 0, 0, 1, session="b", number=1, stats=more)
    assert queue.measure.generators[0].stats.tokens == 14
    assert queue.summary()["weight_sync"]["stall_ms_mean"] == 6.0
    assert queue.summary()["recomputed_tokens"] == 5
    train(queue, 1)
    kill_queue(queue)
    queue = open_queue(tmp_path, small_config())
    assert queue.measure.generators[0].stats.tokens == 14
    queue.store.close()


def evaluate(queue: ReplayQueue, version: int) -> None:
    for lease in ask_queue(queue, 0, version, 0, 9)[0]:
        queue.evaluated(Evaluated(lease.ticket, lease.attempt, version, "test", [1.0], ["completed"], 3, None))
    queue.store.write()


@pytest.mark.parametrize(("before", "after"), [((None, 3), (None, 6)), ((2, 3), (2, 6)), ((4, 4), (1, 4))])
def test_what_was_evaluated_stays_so_when_steps_and_evaluations_are_set_otherwise(
    tmp_path: Path, before: tuple[int | None, int], after: tuple[int | None, int]
) -> None:
    def config(every_steps: int | None, steps: int) -> Config:
        return small_config(data__eval="eval.parquet", eval__every_steps=every_steps, eval__samples=1, steps=steps)

    queue = open_queue(tmp_path, config(*before), prompts=1)
    for version in range(4):
        if version:
            train(queue, version)
        evaluate(queue, version)
    ended = [one["version"] for one in queue.evaluation.ended]
    kill_queue(queue)
    queue = open_queue(tmp_path, config(*after), run_id="another launch", prompts=1)
    assert [one["version"] for one in queue.evaluation.ended] == ended
    assert not queue.evaluation.running
    train(queue, 4)
    assert bool(queue.evaluation.running) == config(*after).evaluates(4)
    queue.store.close()


def fill_journal(queue: ReplayQueue, tokens: int = 2000) -> list[Lease]:
    """Trains until the journal is at its ceiling; returns the leases that the generator works on then."""
    leases: list[Lease] = []
    while not queue.store.above_ceiling:
        version = queue.ledger.steps
        leases += ask_queue(queue, 0, version, 100)[0]
        for _ in range(2):
            finish(queue, leases.pop(0), version, completion_tokens=(tokens, tokens))
        assert queue.take(0, version + 1)[0] == "shard"
        queue.commit(version + 1, {})
        queue.store.write()
    return leases


@pytest.mark.parametrize("how", ["the generator dies", "all die"])
def test_prompts_that_came_back_are_handed_out_at_the_ceiling(tmp_path: Path, how: str) -> None:
    config = small_config(steps=20_000, replay__max_staleness=4, journal__max_bytes=1 << 20)
    queue = open_queue(tmp_path, config)
    assert fill_journal(queue)
    if how == "the generator dies":
        queue.lost(0)
    else:
        kill_queue(queue)
        queue = open_queue(tmp_path, config, run_id="another launch")
    version = queue.ledger.steps
    for lease in ask_queue(queue, 0, version, 100, session="another")[0]:
        finish(queue, lease, version)
    assert queue.take(0, version + 1)[0] == "shard", "the run stands still for ever"
    queue.store.close()


@pytest.mark.parametrize("ceiling", ["journal__max_bytes", "replay__max_bytes"])
def test_batches_that_are_held_back_are_filled_at_the_ceiling(tmp_path: Path, ceiling: str) -> None:
    config = small_config(steps=100, replay__max_staleness=2, replay__min_staleness=1, **{ceiling: 1 << 20})
    queue = open_queue(tmp_path, config)
    for step in range(1, 30):
        while queue.take(0, step)[0] == "wait":
            leases, reason = ask_queue(queue, 0, step - 1, 1)
            assert leases, f"stands still at step {step}: {reason}"
            finish(queue, leases[0], step - 1, completion_tokens=(10_000, 10_000))
        queue.commit(step, {})
        queue.store.write()
    queue.store.close()


def test_a_catch_up_reads_what_it_needs_only(tmp_path: Path) -> None:
    queue = open_queue(tmp_path, small_config(steps=100, journal__retention="all"))
    for step in range(1, 41):
        train(queue, step)
    assert queue.store.journal is not None
    segments = queue.store.journal.segments
    needed = queue.state.coverage.of_steps_from(38)
    assert needed and set(needed) <= set(segments[-3:])
    groups = {step: frames(queue.take(0, step)[1]) for step in range(38, 41)}
    assert all(len(one) == 2 for one in groups.values())
    for path in (tmp_path / "journal").glob("0*.arrow"):
        if int(path.stem) not in needed:
            path.write_bytes(b"")
    queue.store._history = None
    assert {step: frames(queue.take(0, step)[1]) for step in range(38, 41)} == groups
    queue.store.close()


def test_the_trace_of_a_run_without_its_journal_is_of_the_line_that_goes_on(tmp_path: Path) -> None:
    config = small_config(steps=4, replay__max_staleness=2)
    queue = open_queue(tmp_path, config)
    train(queue, 1)
    leases = ask_queue(queue, 0, 1, 100)[0]
    saved = queue.store.snapshot()
    for lease in leases:
        finish(queue, lease, 1)
    for step in (2, 3):
        assert queue.take(0, step)[0] == "shard"
        queue.commit(step, {})
    queue.store.write()
    queue.store.close()
    shutil.rmtree(tmp_path / "journal")
    for _ in range(2):  # the second time it was killed before the journal had anything
        shutil.rmtree(tmp_path / "journal", ignore_errors=True)
        queue = open_queue(tmp_path, config, run_id="another launch", checkpoint=saved)
        kill_queue(queue)
    shutil.rmtree(tmp_path / "journal")
    queue = open_queue(tmp_path, config, run_id="another launch", checkpoint=saved)
    for step in (2, 3, 4):
        train(queue, step)
    queue.store.close()
    rows = pq.read_table(tmp_path / "trace.parquet").to_pylist()
    trained = [row for row in rows if row["outcome"] == "trained"]
    assert sorted(row["train_version"] for row in trained) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert len({row["ticket"] for row in rows}) == len(rows)


def test_a_limit_that_moves_goes_on_from_the_journal(tmp_path: Path) -> None:
    config = small_config(replay__max_staleness=2, algorithm__max_divergence=0.1, steps=20)
    queue = open_queue(tmp_path, config)
    limits: list[float] = []
    for step in range(1, 12):
        for lease in ask_queue(queue, 0, step - 1, 100)[0]:
            finish(queue, lease, step - 1)
        queue.take(0, step)
        limits.append(queue.commit(step, {"learner/lr_fraction": 0.2}).metrics["replay/staleness_limit"])
        queue.store.write()
    assert (limits[0], queue.ledger.max_staleness) == (2, 2)
    assert queue.ledger.admission_limit == 1
    kill_queue(queue)
    again = open_queue(tmp_path, config)
    assert again.ledger.admission_limit == queue.ledger.admission_limit
    assert saved_state(again) == saved_state(queue)
