"""The loop with fakes for the replay queue and the weight sender, in one process and as two real ranks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from worlds import make_config, make_groups, make_trainer, spawn

from asyncrl.errors import InvariantError, PeerTimeoutError
from asyncrl.learner.distributed import Ranks
from asyncrl.learner.loop import Learner
from asyncrl.types import Shard


class Batches:
    def __init__(self, last: int = 100, behind: int = 0) -> None:
        self.last, self.behind = last, behind
        self.commits: list[tuple[int, dict[str, float]]] = []
        self.left = [(3, {"eval/version": 2.0}), (4, {"eval/version": 4.0})]

    def take(self, step: int) -> Shard | None:
        version = max(step - 1 - self.behind, 0)
        return Shard(step, make_groups(2, seed=step, version=version)) if step <= self.last else None

    def commit(self, step: int, metrics: dict[str, float]) -> dict[str, float]:
        self.commits.append((step, metrics))
        return {"replay/ready": 3.0}

    def evaluations(self, should_stop: Callable[[], bool]) -> list[tuple[int, dict[str, float]]]:
        return self.left


class Sender:
    def __init__(self, lost: bool = False) -> None:
        self.sent: list[tuple[int, dict[str, Tensor]]] = []
        self.lost = lost
        self.stats = SimpleNamespace(count=0, broadcast_s=0.0)
        self.waited = 0

    def send(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> None:
        self.sent.append((version, {name: weight.clone() for name, weight in weights}))

    def wait(self) -> None:
        self.waited += 1
        if self.lost:
            raise PeerTimeoutError("generator 0 is gone")


class Tracker:
    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self.rows.append((step, metrics))


World = Callable[..., Learner]


@pytest.fixture
def learner(one_rank: Ranks, tiny_model: Path, tmp_path: Path) -> World:
    def make(batches: Batches, sender: Sender, **learner_settings: object) -> Learner:
        config = make_config(tiny_model, steps=4, learner=learner_settings)
        return Learner(config, make_trainer(config, one_rank), batches, sender, Tracker(), tmp_path)

    return make


def test_a_whole_run(learner: World, tmp_path: Path) -> None:
    batches, sender = Batches(), Sender()
    one = learner(batches, sender, save_every_steps=2, lr_schedule="linear")
    one.run(lambda: False)
    assert [version for version, _ in sender.sent] == [0, 1, 2, 3] and sender.waited == 1
    versions = [weights["model.norm.weight"] for _, weights in sender.sent]
    assert all(not torch.equal(a, b) for a, b in pairwise(versions))
    assert [step for step, _ in batches.commits] == [1, 2, 3, 4]
    assert isinstance(one.tracker, Tracker)
    for (step, row), (_, committed) in zip(one.tracker.rows, batches.commits, strict=True):
        assert row == committed | {"replay/ready": 3.0}
        assert {"learner/wait_s", "learner/step_s", "learner/sync_s", "learner/loss"} <= set(committed)
        assert committed["learner/lr"] == pytest.approx(1e-3 * (5 - step) / 4)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    for name, weight in one.trainer.policy.weights():
        assert torch.equal(model.get_parameter(name), weight)
    saved = load_file(tmp_path / "checkpoints" / "step-000002" / "model.safetensors")
    assert torch.equal(saved["model.norm.weight"], versions[2])
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-000002", "step-000004"]


def test_the_last_version_is_sent_and_its_results_are_recorded_when_it_is_evaluated(learner: World) -> None:
    batches, sender = Batches(), Sender()
    one = learner(batches, sender)
    data = one.config.data.model_copy(update={"eval": "eval.parquet"})
    one.config = one.config.model_copy(update={"data": data})
    one.run(lambda: False)
    assert [version for version, _ in sender.sent] == [0, 1, 2, 3, 4]
    assert isinstance(one.tracker, Tracker)
    assert one.tracker.rows[4:] == batches.left


def test_no_more_batches_end_the_run_cleanly(learner: World, tmp_path: Path) -> None:
    batches, sender = Batches(last=2), Sender(lost=True)
    learner(batches, sender).run(lambda: False)
    assert [step for step, _ in batches.commits] == [1, 2]
    assert (tmp_path / "model" / "config.json").exists() and sender.waited == 1


def test_a_stop_is_heard_before_the_next_step(learner: World, tmp_path: Path) -> None:
    batches, sender = Batches(), Sender()
    learner(batches, sender).run(lambda: len(batches.commits) == 1)
    assert [step for step, _ in batches.commits] == [1]
    assert (tmp_path / "model" / "config.json").exists()


def test_a_batch_that_is_too_old_or_of_another_step_ends_the_run(learner: World) -> None:
    batches = Batches(behind=3)
    with pytest.raises(InvariantError, match=r"3 steps later; replay.max_staleness = 2"):
        learner(batches, Sender()).run(lambda: False)
    assert [step for step, _ in batches.commits] == [1, 2, 3]
    one = learner(Batches(), Sender())
    with pytest.raises(InvariantError, match="step 1: took the shard of step 2"):
        one.prepare(Shard(2, []), 1)


def test_run_learner_as_two_ranks(tiny_model: Path, tmp_path: Path, free_port: Callable[[], int]) -> None:
    codes = spawn("run_two.py", tiny_model, tmp_path, free_port(), ranks=2, timeout_s=90)
    assert codes == [0, 0], (tmp_path / "0.log").read_text()[-2000:] + (tmp_path / "1.log").read_text()[-2000:]
    sent = load_file(tmp_path / "sent.safetensors")
    assert {name.partition("/")[0] for name in sent} == {"0", "1"}
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    start = AutoModelForCausalLM.from_pretrained(tiny_model)
    for name, weight in start.named_parameters():
        assert torch.equal(sent[f"0/{name}"], weight), name
        assert weight.shape == model.get_parameter(name).shape == sent[f"1/{name}"].shape
        if name.endswith("norm.weight"):
            assert not torch.equal(sent[f"0/{name}"], sent[f"1/{name}"])
            assert not torch.equal(sent[f"1/{name}"], model.get_parameter(name))
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2] and all(row["replay/ready"] == 1.0 for row in rows)
    assert (tmp_path / "closed-0").exists() and (tmp_path / "closed-1").exists()
