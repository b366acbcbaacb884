"""Both loops of a run with `launch.colocate` in one process: real loops, turns and host memory around a fake card, a
queue of bare counts and an engine that counts tokens. A role dies by an exception at any event, and starts again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from asyncrl.colocate import GeneratorTurn, HostMemory, LearnerTurn
from asyncrl.config.config import Config
from asyncrl.generator.engine import Completion
from asyncrl.generator.loop import GeneratorLoop
from asyncrl.learner.batch import Batch
from asyncrl.learner.distributed import Ranks
from asyncrl.learner.loop import Learner
from asyncrl.rewards.pool import Scored
from asyncrl.types import NO_VERSION, Group, Lease, Prompt, Shard
from asyncrl.weights.background import WeightSyncStats
from asyncrl.weights.staging import StagedWeights
from asyncrl.wire.messages import Committed, Leases

TOKENS = 4
"""Least steps of the engine for a completion."""
BYTES = 4096
DEADLINE_S = 20.0


class Died(Exception):
    """A role ends here without another word, as by SIGKILL."""


class FakeCard:
    """A card that two roles use in turn. It records what happens to it, and raises if both use it."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str]] = []
        self.holder = self.last = self.visitor = ""
        self.wanted: set[str] = set()
        self.used: dict[str, int] = {"generator": 0, "learner": 0}
        self.peak = 0
        self.dies: tuple[str, str, int] | None = None
        """Role, event, and which of its occurrences kills the role."""
        self._lock = threading.RLock()

    def note(self, role: str, event: str) -> None:
        with self._lock:
            self.events.append((role, event))
            if self.dies is not None and self.dies[:2] == (role, event):
                left = self.dies[2] - 1
                self.dies = (role, event, left) if left else None
                if not left:
                    raise Died(f"{role} at {event}")

    def allocate(self, role: str, num_bytes: int) -> None:
        with self._lock:
            visits = self.visitor == role and num_bytes <= BYTES >= self.used["learner"]
            assert self.holder == role or visits, f"{role} uses the card of {self.holder or 'nobody'}"
            self.used[role] = num_bytes
            self.peak = max(self.peak, sum(self.used.values()))

    def bury(self, role: str) -> None:
        """The effect of a process's death."""
        with self._lock:
            self.used[role] = 0
            self.wanted.discard(role)
            if self.holder == role:
                self.holder = ""
            if self.visitor == role:
                self.visitor = ""


class FakeLock:
    """One role's side of the card: the interface of `CardLock`."""

    def __init__(self, card: FakeCard, role: str) -> None:
        self._card, self._role = card, role
        self.held = False

    @property
    def last(self) -> str:
        return self._card.last

    @property
    def is_wanted(self) -> bool:
        return bool(self._card.wanted - {self._role})

    def try_acquire(self) -> bool:
        with self._card._lock:
            if self._card.holder or self._card.visitor not in ("", self._role):
                return False
            self._card.holder = self._card.last = self._role
            self._card.visitor = ""
            self.held = True
        self._card.note(self._role, "acquire")
        return True

    def acquire(self, timeout_s: float, *, in_turn: bool = False, meanwhile: Callable[[], None] = lambda: None) -> None:
        end_s = time.monotonic() + DEADLINE_S
        if not in_turn:
            self._card.wanted.add(self._role)
        while (in_turn and self.last == self._role) or not self.try_acquire():
            assert time.monotonic() < end_s, f"{self._role} waits for {self._card.holder}: {self._card.events[-12:]}"
            time.sleep(0.001)
            meanwhile()
        self._card.wanted.discard(self._role)

    def visit(self, timeout_s: float) -> None:
        self._card.visitor = self._role

    def end_visit(self) -> None:
        self._card.visitor = ""

    def note_progress(self) -> None:
        assert self.held

    def release(self) -> None:
        if self.held:
            self.held = False
            with self._card._lock:
                self._card.events.append((self._role, "release"))
                self._card.holder = ""

    def changed_ns(self) -> int:
        return len(self._card.events)


class Queue:
    """Admission, batches and commits by counting; what it knows survives the death of roles."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.size, self.limit = config.replay.groups_per_step, config.replay.max_staleness
        self.steps = self.tickets = 0
        self.returned: list[int] = []
        self.finished: list[int] = []
        self.groups: dict[int, Group] = {}
        self.batches: dict[int, list[int]] = {}
        self.evaluated: dict[int, int] = {}
        """By version: 1 if it was evaluated, 0 while it is."""
        self.dropped: set[int] = set()
        """Versions to evaluate that no generator can have any more."""
        self.sent: tuple[int, Tensor] | None = None
        self.order: list[str] = []
        """Versions as they are sent and loaded."""
        self.lock = threading.RLock()

    @property
    def num_waiting(self) -> int:
        taken = len([step for step in self.batches if step > self.steps])
        return taken + len(self.finished) // self.size if taken else 0

    @property
    def done(self) -> bool:
        wanted = {v for v in range(self.config.steps + 1) if self.config.evaluates(v)}
        return self.steps >= self.config.steps and all(self.evaluated.get(v) or v in self.dropped for v in wanted)

    def drop_stranded(self, version: int) -> None:
        """Drops the evaluations of versions before the one that the only generator has loaded."""
        earlier = range(min(version, self.config.steps + 1))
        self.dropped |= {v for v in earlier if self.config.evaluates(v) and not self.evaluated.get(v)}

    def lease(self, version: int, count: int) -> list[int]:
        tickets: list[int] = []
        while len(tickets) < count and self.steps < self.config.steps:
            if self.returned:
                tickets.append(self.returned.pop(0))
            elif self.tickets < (version + self.limit + 1) * self.size:
                tickets.append(self.tickets)
                self.tickets += 1
            else:
                break
        return tickets

    def compose(self, step: int) -> None:
        if step not in self.batches and len(self.finished) >= self.size and step <= self.steps + 2:
            self.batches[step], self.finished = self.finished[: self.size], self.finished[self.size :]


class Client:
    """The generator's side of the queue."""

    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        self._asked: tuple[int, int, int] | None = None
        self.leased: set[int] = set()

    @property
    def outstanding(self) -> bool:
        return self._asked is not None

    def ask(self, version: int, num_groups: int, stats: Any, *, num_evaluations: int = 0) -> None:
        self._asked = version, num_groups, num_evaluations

    def poll(self, timeout_s: float = 0.0) -> Leases | None:
        time.sleep(0.0005)
        if self._asked is None:
            return None
        (version, groups, evaluations), self._asked = self._asked, None
        queue = self._queue
        with queue.lock:
            queue.drop_stranded(version)
            tickets = queue.lease(version, groups)
            self.leased.update(tickets)
            leases = [_lease(ticket) for ticket in tickets]
            left = queue.config.evaluates(version) and version not in queue.evaluated
            if left and evaluations:
                queue.evaluated[version], left = 0, False
                leases.append(_lease(version, evaluation=True))
            return Leases(
                leases=leases, done=queue.done, leave=False, reason="", evaluations_left=left, progress=0,
                batches=queue.num_waiting, pause_s=0.0, weights="", stored=None,
            )  # fmt: skip

    def finish(self, group: Group) -> None:
        with self._queue.lock:
            self.leased.discard(group.ticket)
            self._queue.groups[group.ticket] = group
            self._queue.finished.append(group.ticket)

    def evaluated(self, result: Any, rows: Any) -> None:
        with self._queue.lock:
            self._queue.evaluated[result.version] = 1
            self._queue.order.append(f"evaluated {result.version}")

    def release(self, leases: Any, *, evaluations: Any = ()) -> None:
        """The run is over."""

    def bury(self) -> None:
        """The queue notices the death of the generator."""
        with self._queue.lock:
            self._queue.returned += sorted(self.leased)
            self._queue.evaluated = {v: done for v, done in self._queue.evaluated.items() if done}


def _lease(ticket: int, *, evaluation: bool = False) -> Lease:
    return Lease(ticket, 0, Prompt(ticket, np.array([5, 6], dtype=np.int32), "", "test"), evaluation=evaluation)


class Receiver:
    """Has every version that was sent, once; a new one of a restarted generator has the last version."""

    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        self._seen: Any = None

    @property
    def has_version(self) -> bool:
        return self._queue.sent is not None and self._queue.sent is not self._seen

    def round(self) -> None:
        """Versions come complete."""

    def staged(self) -> StagedWeights | None:
        sent = self._queue.sent
        if sent is None or sent is self._seen:
            return None
        self._seen = sent
        return StagedWeights(sent[0], 0, [("w", sent[1])])

    def loaded(self, staged: StagedWeights) -> None:
        self._queue.order.append(f"loaded {staged.version}")

    def hold(self) -> None:
        """Nothing waits for it."""

    def locate(self, address: str) -> None:
        """There is no sender."""

    def following(self) -> None:
        """There is no store."""


class CountingEngine:
    """Samples the number of its step; must have the card for that, and must have been filled after it slept."""

    def __init__(self, card: FakeCard) -> None:
        self._card = card
        self.version = NO_VERSION
        self.window_tokens = 64
        self.loader: Any = SimpleNamespace(updating=False)
        self.recomputed_tokens = 0
        self.versions: dict[str, list[int]] = {}
        self._awake = {"weights": True, "cache": True}
        card.allocate("generator", 2 * BYTES)

    @property
    def num_running(self) -> int:
        return len(self.versions)

    def add(self, key: str, prompt: Any, **options: Any) -> None:
        self.versions[key] = []

    def step(self) -> list[Completion]:
        assert self._card.holder == "generator" and all(self._awake.values()), "steps without the card"
        ended: list[Completion] = []
        for key, versions in list(self.versions.items()):
            versions.append(self.version)
            length = TOKENS + int(key.split(".")[-3]) % 3
            if len(versions) == length:
                del self.versions[key]
                logprobs = np.zeros(length, dtype=np.float32)
                ended.append(Completion(key, [1] * length, logprobs, np.array(versions, dtype=np.int32), "completed"))
        self._card.note("generator", "step")
        return ended

    def num_generated(self, key: str) -> int:
        return len(self.versions[key])

    def abort(self, keys: Iterable[str]) -> None:
        for key in list(keys):
            del self.versions[key]

    def swap(self, version: int, tensors: Any) -> float:
        assert self._awake["weights"], "loads into memory that it does not have"
        assert not torch.isnan(tensors[0][1]).any()
        self.version = version
        self._card.note("generator", "swap")
        return 0.0

    def sleep(self, level: int) -> None:
        self._card.note("generator", "sleep")
        self._awake = {"weights": False, "cache": False}
        self._card.allocate("generator", 0)

    def wake(self, what: str) -> None:
        self._awake[what] = True
        self._card.allocate("generator", BYTES * sum(self._awake.values()))
        self._card.note("generator", f"wake {what}")

    def peak_memory_bytes(self) -> int:
        return 2 * BYTES


class Rewards:
    """Every completion has the reward 1."""

    def __init__(self) -> None:
        self._done: list[Scored] = []

    def submit(self, key: Any, completions: Any, *others: Any, **options: Any) -> None:
        count = len(completions)
        self._done.append(Scored(key, [1.0] * count, [{}] * count, [""] * count, environment_weight=1.0))

    def collect(self) -> list[Scored]:
        done, self._done = self._done, []
        return done


class Batches:
    """The learner's side of the queue."""

    def __init__(self, queue: Queue, is_over: threading.Event) -> None:
        self._queue, self._is_over = queue, is_over

    def begin(self, step: int) -> int:
        return self._queue.steps

    def take(self, step: int) -> Shard | None:
        while not self._is_over.is_set():
            with self._queue.lock:
                self._queue.compose(step)
                if (tickets := self._queue.batches.get(step)) is not None:
                    return Shard(step, [self._queue.groups[ticket] for ticket in tickets])
            time.sleep(0.0005)
        return None

    def commit(self, step: int, metrics: dict[str, float], *, saving: bool = False, checkpoints: Any = ()) -> Committed:
        queue = self._queue
        with queue.lock:
            queue.steps = max(queue.steps, step)
            if step < queue.config.steps:
                queue.compose(step + 1)  # the learner asks for it while it trains, which takes no time here
            return Committed({}, b"", False, False, queue.num_waiting, False)

    def evaluations(self, should_stop: Callable[[], bool]) -> list[Any]:
        return []

    def close(self) -> None:
        """Nothing is open."""


class Sender:
    """Gives a copy of the weights to the receiver."""

    is_missed = False
    stats = WeightSyncStats()

    def __init__(self, queue: Queue, card: FakeCard) -> None:
        self._queue, self._card = queue, card
        self._sending: tuple[int, list[tuple[str, Tensor]]] | None = None

    def send(self, version: int, weights: Iterable[tuple[str, Tensor]], *, copy_later: bool = False) -> None:
        self.copied()
        self._card.note("learner", "send")
        self._sending = version, list(weights)

    def copied(self) -> None:
        sending, self._sending = self._sending, None
        if sending is not None:
            self._queue.order.append(f"sent {sending[0]}")
            self._queue.sent = sending[0], sending[1][0][1].clone()

    def wait(self) -> None:
        self.copied()


class FakeTrainer:
    """Adds 1 to its weights in each step, for which they must be on the card."""

    def __init__(self, card: FakeCard) -> None:
        self._card = card
        self.ranks = Ranks(0, 1, torch.device("cpu"))
        self.phases = SimpleNamespace(metrics=dict)
        self.critic = None
        self.weight, self.moment = torch.zeros(BYTES // 4), torch.zeros(BYTES // 4)
        self.policy = SimpleNamespace(excluded=None, replay=None, sent_slices=lambda: [("w", self.weight)])
        self.staleness: list[int] = []
        card.allocate("learner", 2 * BYTES)

    def tensors(self) -> Iterator[Tensor]:
        yield self.weight
        yield self.moment

    def train(self, groups: Any, *, step: int) -> dict[str, float]:
        self._card.allocate("learner", 2 * BYTES)
        for tensor in self.tensors():
            assert tensor.untyped_storage().nbytes() == BYTES, "trains without its states"
        self.weight += 1
        assert float(self.weight[0]) == step
        for group in groups:
            for trajectory in group.trajectories:
                self.staleness.append(step - 1 - int(trajectory.versions[trajectory.action_mask].min()))
        self._card.note("learner", "train")
        return {"learner/tokens": 1.0, "learner/flops": 0.0}


class Memory(HostMemory):
    """Moves memory also on a CPU, and accounts for it."""

    def __init__(self, card: FakeCard) -> None:
        super().__init__(torch.device("cpu"), always=True)
        self._card = card

    def offload(self, tensors: Iterable[Tensor], keep: Iterable[Tensor] = ()) -> int:
        keep = list(keep)
        moved = super().offload(tensors, keep)
        assert moved == (BYTES if keep else 2 * BYTES)
        self._card.allocate("learner", 2 * BYTES - moved)
        self._card.note("learner", "offload")
        return moved

    def reload(self) -> None:
        super().reload()
        self._card.allocate("learner", 2 * BYTES)
        self._card.note("learner", "reload")


class QuickLearner(Learner):
    """Does not pack batches, and saves no model."""

    def prepare(self, shard: Shard, step: int) -> Batch:
        return shard.groups  # type: ignore[return-value]

    def _save_models(self) -> None:
        self.trainer._card.note("learner", "save")  # type: ignore[attr-defined]
        assert self.trainer.weight.untyped_storage().nbytes() == BYTES  # type: ignore[attr-defined]


class World:
    """A run whose roles share a card."""

    def __init__(self, config: Config, run_dir: Path, dies: tuple[str, str, int] | None = None) -> None:
        self.config, self.run_dir = config, run_dir
        self.card, self.queue = FakeCard(), Queue(config)
        self.card.dies = dies
        self.over = threading.Event()
        self.errors: list[BaseException] = []
        self.deaths = 0
        self.staleness: list[int] = []

    def run(self) -> None:
        """Runs both roles to the end, and starts one that died again."""
        thread = threading.Thread(target=self._role, args=(self._generate,), daemon=True)
        thread.start()
        self._role(self._learn)
        thread.join(DEADLINE_S)
        assert not self.errors, self.errors
        assert not thread.is_alive(), f"the generator hangs: {self.card.events[-12:]}"

    def _role(self, start: Callable[[], None]) -> None:
        try:
            while True:
                try:
                    return start()
                except Died:
                    self.deaths += 1
        except BaseException as error:
            self.errors.append(error)
            self.over.set()

    def _generate(self) -> None:
        client = Client(self.queue)
        try:
            lock: Any = FakeLock(self.card, "generator")
            lock.acquire(DEADLINE_S)
            engine: Any = CountingEngine(self.card)
            turn = GeneratorTurn(self.config, engine, [lock])
            others: Any = {"rewards": Rewards(), "receiver": Receiver(self.queue), "client": client}
            GeneratorLoop(
                self.config, index=0, engine=engine, turn=turn, should_stop=self.over.is_set, **others
            ).run()  # fmt: skip
        except Died:
            client.bury()
            raise
        finally:
            self.card.bury("generator")

    def _learn(self) -> None:
        over = threading.Event()
        try:
            lock: Any = FakeLock(self.card, "learner")
            card = LearnerTurn(self.config, Ranks(0, 1, torch.device("cpu")), lock)
            card._memory = Memory(self.card)
            trainer: Any = FakeTrainer(self.card)
            self.staleness = trainer.staleness
            batches, sender = Batches(self.queue, over), Sender(self.queue, self.card)
            QuickLearner(self.config, trainer, batches, sender, None, self.run_dir, card=card).run(self.over.is_set)
        finally:
            over.set()
            self.card.bury("learner")

    def turns(self) -> list[list[str]]:
        """The events of each holder from its acquisition on, without the engine's steps; those at the start left
        out."""
        found: list[list[str]] = []
        for role, event in self.card.events:
            if event == "acquire":
                found.append([role])
            elif event != "step" and found:
                found[-1].append(event)
        return found[2:]
