"""The metrics of a real training, from its queue, learner and critic, are those of docs/metrics.md."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from worlds import GAE_CONFIG, Sender, critic_endpoints, make_config, running

from asyncrl.colocate import DeviceLock, LearnerTurn, device_path
from asyncrl.config.config import Config
from asyncrl.learner.algorithm import make_algorithm
from asyncrl.learner.checkpoint import Checkpoints
from asyncrl.learner.critic import RemoteCritic
from asyncrl.learner.distributed import Ranks
from asyncrl.learner.loop import Learner
from asyncrl.learner.step import Trainer
from asyncrl.observe.document import CHARTS
from asyncrl.observe.trace import TraceWriter
from asyncrl.observe.trackers import make_trackers
from asyncrl.replay.codec import pack_group, unpack_group
from asyncrl.replay.queue import ReplayQueue
from asyncrl.types import EpisodeOutcome, Lease, Prompt, Shard
from asyncrl.wire.messages import Committed, Evaluated, GeneratorStats
from tests.helpers.metric_names import undocumented, unwritten
from tests.helpers.replay import EndlessPrompts, ask_queue, make_group

RUN = {"sources": ["test"], "parts": ["exact"]}
STATS = GeneratorStats.of(
    tokens=40, samples=8, working_s=1.0, engine_s=0.75, costs=[0.01, 0.001, 0.002, 0.1], stall_ms=[2.0],
    peak_memory_bytes=1 << 30, engine_cpu_s=0.5, recomputed_tokens=9,
)  # fmt: skip


class QueueBatches:
    """The batches of a queue, whose groups appear when they are taken."""

    def __init__(self, config: Config, folder: Path) -> None:
        prompts = [Prompt(row, np.array([1, 2], dtype=np.int32), "1", "test") for row in range(2)]
        self.queue = ReplayQueue(
            config, EndlessPrompts(), TraceWriter(folder / "trace.parquet"), prompts, group_relative=False
        )
        self.size = config.generator.group_size
        self.committed = threading.Condition()
        """Steps are taken by another thread than they are committed by."""

    def begin(self, step: int) -> int:
        return self.queue.begin(0, step)

    def take(self, step: int) -> Shard | None:
        with self.committed:
            assert self.committed.wait_for(lambda: self.queue.ledger.steps == step - 1, timeout=120)
            return self._take(step)

    def _take(self, step: int) -> Shard | None:
        self.queue.state.reported.note_memory("reward_model", 1 << 30)
        leases, _ = ask_queue(self.queue, 0, step - 1, 100, 100, stats=STATS)
        for lease in leases:
            self.finish(lease, step - 1)
        outcome, groups = self.queue.take(0, step)
        return Shard(step, [unpack_group(header, arrays) for header, arrays in groups]) if outcome == "shard" else None

    def finish(self, lease: Lease, version: int) -> None:
        rewards = [float(number % 2) for number in range(self.size)]
        if lease.evaluation:
            status, samples = ["completed"], [1.0]
            self.queue.evaluated(
                Evaluated(lease.ticket, lease.attempt, version, "test", samples, status, tokens=3, recorded=None)
            )  # type: ignore[arg-type]
            return
        group = make_group(lease, version, rewards=rewards, completion_tokens=range(1, self.size + 1))
        for member in group.trajectories:
            member.episode = EpisodeOutcome("done", [1.0], 0, 0.5, 0, 0, wait_s=0.5)
        self.queue.finish(*pack_group(replace(group, greedy_reward=1.0, greedy_tokens=2)))

    def commit(
        self, step: int, metrics: dict[str, float], *, saving: bool = False, checkpoints: Sequence[int] = ()
    ) -> Committed:
        with self.committed:
            self.committed.notify()
            return self.queue.commit(step, metrics, saving=saving, checkpoints=checkpoints)

    def evaluations(self, should_stop: Callable[[], bool]) -> Iterator[tuple[int, dict[str, float]]]:
        return iter(())

    def close(self) -> None:
        self.queue.store.close()


class Lock(DeviceLock):
    """Of a card that no generator wants."""

    last = ""  # type: ignore[assignment]


@pytest.fixture(scope="module")
def run_dir(
    tiny_model: Path, one_rank: Ranks, free_port: Callable[[], int], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The folder of a training with a reference policy, a critic of its own, evaluations, checkpoints and a profile.
    Its card is shared."""
    out = tmp_path_factory.mktemp("run")
    port = free_port()
    endpoints = critic_endpoints(port)
    config = make_config(
        tiny_model,
        **GAE_CONFIG
        | {"algorithm": {**GAE_CONFIG["algorithm"], "kl_reward_coef": 0.1, "kl_loss_coef": 0.1, "max_divergence": 1.0}},
        data={"eval": "none.parquet"},
        environment={"name": "guess"},
        eval={"every_steps": 1},
        checkpoint={"every_steps": 1},
        observe={"profile": [2]},
        steps=4,
    )
    batches = QueueBatches(config, out)
    with running("run_critic.py", tiny_model, out, port, "1"):
        critic = RemoteCritic(config, 0, endpoints)
        trainer = Trainer(config, one_rank, make_algorithm(config), critic)
        checkpoints = Checkpoints(config, out / "checkpoints", one_rank, others=critic.parts)
        trackers = make_trackers(config, out)
        card = LearnerTurn(config, one_rank, Lock(device_path(out, 0), "learner-0"))
        learner = Learner(config, trainer, batches, Sender(), trackers, out, checkpoints, card=card)
        learner.peak_flops = 1e12
        learner.run(lambda: False)
        for part in (trackers, checkpoints, critic, batches):
            part.close()
    return out


def test_metrics_are_documented_and_documented_ones_are_written(run_dir: Path) -> None:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    written = {name for row in rows for name in row}
    assert undocumented(written, **RUN) == []
    assert unwritten(written, **RUN) == []


def test_charts_draw_documented_metrics() -> None:
    drawn = {name for charts in CHARTS.values() for names in charts.values() for name in names.split()}
    assert undocumented(drawn - {"tokens_per_s"}, **RUN) == [], "a chart of a metric that does not exist"


def test_only_the_steps_to_profile_have_a_trace(run_dir: Path) -> None:
    (file,) = (run_dir / "profile").iterdir()
    assert file.name == "step-000002.rank-0.json.gz"
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    names = {event["name"] for event in events if event.get("ph") == "X"}
    assert {"aten::mm", "aten::embedding"} <= names or {"aten::addmm", "aten::embedding"} <= names
    assert file.stat().st_size < 4 << 20
