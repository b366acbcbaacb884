"""The learner's loop with fakes for the replay queue and the weight sender, in one process and as two real ranks."""

from __future__ import annotations

import json
import shutil
import threading
import uuid
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from worlds import Sender, make_config, make_groups, make_trainer, spawn

from asyncrl.errors import InvariantError, PeerTimeoutError
from asyncrl.learner.batch import Batch
from asyncrl.learner.distributed import Ranks
from asyncrl.learner.loop import Learner
from asyncrl.learner.role import _make_file_sender
from asyncrl.types import Shard
from asyncrl.weights.layout import WeightManifest
from asyncrl.wire.endpoints import Endpoints
from asyncrl.wire.messages import Committed
from asyncrl.wire.store import StoreServer
from tests.helpers.sockets import socket_address


class Batches:
    def __init__(self, last: int = 100, behind: int = 0) -> None:
        self.last, self.behind = last, behind
        self.commits: list[tuple[int, dict[str, float]]] = []
        self.taken = threading.Condition()
        self.takes: list[int] = []
        self.stops_after = 0
        """Step whose commit is answered with the request to stop."""
        self.silent_at = 0
        """Step at which the queue does not answer any more."""
        self.left = [(3, {"eval/version": 2.0}), (4, {"eval/version": 4.0})]

    def take(self, step: int) -> Shard | None:
        with self.taken:
            self.takes.append(step)
            self.taken.notify()
        if step == self.silent_at:
            raise PeerTimeoutError("the replay queue did not answer 'take' within 1 s")
        version = max(step - 1 - self.behind, 0)
        return Shard(step, make_groups(2, seed=step, version=version)) if step <= self.last else None

    def begin(self, step: int) -> int:
        return 0

    def commit(
        self, step: int, metrics: dict[str, float], *, saving: bool = False, checkpoints: Sequence[int] = ()
    ) -> Committed:
        assert not saving and not checkpoints
        self.commits.append((step, metrics))
        return Committed({"replay/ready": 3.0}, b"", False, step == self.stops_after, 0, False)

    def evaluations(self, should_stop: Callable[[], bool]) -> list[tuple[int, dict[str, float]]]:
        return self.left

    def close(self) -> None: ...


class Tracker:
    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self.rows.append((step, metrics))

    log_evaluation = log


World = Callable[..., Learner]


@pytest.fixture
def learner(one_rank: Ranks, tiny_model: Path, tmp_path: Path) -> World:
    def make(batches: Batches, sender: Sender, **learner_settings: object) -> Learner:
        config = make_config(tiny_model, steps=4, learner=learner_settings)
        return Learner(config, make_trainer(config, one_rank), batches, sender, Tracker(), tmp_path)

    return make


def test_a_complete_run(learner: World, tmp_path: Path) -> None:
    batches, sender = Batches(), Sender()
    one = learner(batches, sender, lr_schedule="linear")
    one.run(lambda: False)
    assert list(sender.sent) == [0, 1, 2, 3] and sender.waited == 1
    versions = [weights["model.norm.weight"] for weights in sender.sent.values()]
    assert all(not torch.equal(a, b) for a, b in pairwise(versions))
    assert [step for step, _ in batches.commits] == [1, 2, 3, 4]
    assert isinstance(one.tracker, Tracker)
    for (step, row), (_, committed) in zip(one.tracker.rows, batches.commits, strict=True):
        assert row == committed | {"replay/ready": 3.0}
        assert {"learner/wait_s", "learner/step_s", "learner/sync_s", "learner/write_s", "learner/loss"} <= set(
            committed
        )
        assert committed["learner/lr"] == pytest.approx(1e-3 * (5 - step) / 4)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    for name, weight in one.trainer.policy.weights():
        assert torch.equal(model.get_parameter(name), weight)


def test_the_last_version_is_sent_and_its_results_are_recorded_when_it_is_evaluated(learner: World) -> None:
    batches, sender = Batches(), Sender()
    one = learner(batches, sender)
    data = one.config.data.model_copy(update={"eval": "eval.parquet"})
    one.config = one.config.model_copy(update={"data": data})
    one.run(lambda: False)
    assert list(sender.sent) == [0, 1, 2, 3, 4]
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


def test_the_next_batch_is_taken_while_one_is_trained(learner: World) -> None:
    batches = Batches()
    one = learner(batches, Sender())
    train = one.trainer.train

    def checked(batch: Batch, *, step: int) -> dict[str, float]:
        with batches.taken:
            assert batches.taken.wait_for(lambda: batches.takes[-1] == min(step + 1, 4), timeout=60)
        return train(batch, step=step)

    one.trainer.train = checked  # type: ignore[method-assign]
    one.run(lambda: False)
    assert batches.takes == [1, 2, 3, 4], "no batch is taken for a step after the last"
    assert [step for step, _ in batches.commits] == [1, 2, 3, 4]


def test_a_batch_that_was_taken_ahead_of_a_stop_is_not_trained(learner: World, tmp_path: Path) -> None:
    batches, sender = Batches(), Sender()
    batches.stops_after = 2
    learner(batches, sender).run(lambda: False)
    assert [step for step, _ in batches.commits] == [1, 2]
    with batches.taken:
        assert batches.taken.wait_for(lambda: batches.takes == [1, 2, 3], timeout=60)
    assert (tmp_path / "model" / "config.json").exists()


def test_a_queue_that_is_silent_for_the_next_batch_ends_the_run_when_it_is_needed(learner: World) -> None:
    batches = Batches()
    batches.silent_at = 3
    with pytest.raises(PeerTimeoutError, match="did not answer 'take' within 1 s"):
        learner(batches, Sender()).run(lambda: False)
    assert [step for step, _ in batches.commits] == [1, 2]


def test_a_batch_that_is_too_old_or_of_another_step_ends_the_run(learner: World) -> None:
    batches = Batches(behind=3)
    with pytest.raises(InvariantError, match=r"3 steps later; replay.max_staleness = 2"):
        learner(batches, Sender()).run(lambda: False)
    assert [step for step, _ in batches.commits] == [1, 2, 3]
    one = learner(Batches(), Sender())
    with pytest.raises(InvariantError, match="step 1: took the shard of step 2"):
        one.prepare(Shard(2, []), 1)


def run_two(model: Path, out: Path, port: int) -> dict[str, Tensor]:
    """Runs `run_two.py` and returns the weights it sent, by version and name."""
    spawn("run_two.py", model, out, port, ranks=2, timeout_s=220)
    return sent_by_two(out) if (out / "sent-0.safetensors").exists() else {}


def sent_by_two(out: Path) -> dict[str, Tensor]:
    """The weights that both ranks sent slices of, by version and name."""
    shapes, slices = (
        json.loads((out / "shapes.json").read_text()),
        [load_file(out / f"sent-{rank}.safetensors") for rank in (0, 1)],
    )
    assert slices[0].keys() == slices[1].keys()
    return {name: torch.cat([one[name] for one in slices]).view(shapes[name.partition("/")[2]]) for name in slices[0]}


@pytest.fixture(scope="module")
def two(tiny_model: Path, free_port: Callable[[], int], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the results of `run_two.py`."""
    out = tmp_path_factory.mktemp("run_two")
    run_two(tiny_model, out, free_port())
    return out


@pytest.fixture
def copied(two: Path, tmp_path: Path) -> Path:
    """A copy of that folder."""
    shutil.copytree(two, tmp_path, dirs_exist_ok=True)
    return tmp_path


def test_run_learner_as_two_ranks(tiny_model: Path, two: Path) -> None:
    sent = sent_by_two(two)
    assert {name.partition("/")[0] for name in sent} == {"0", "1", "2", "3"}
    model = AutoModelForCausalLM.from_pretrained(two / "model")
    start = AutoModelForCausalLM.from_pretrained(tiny_model)
    for name, weight in start.named_parameters():
        assert torch.equal(sent[f"0/{name}"], weight), name
        assert weight.shape == model.get_parameter(name).shape == sent[f"1/{name}"].shape
        if name.endswith("norm.weight"):
            assert not torch.equal(sent[f"0/{name}"], sent[f"1/{name}"])
            assert not torch.equal(sent[f"3/{name}"], model.get_parameter(name))
    rows = read_rows(two)
    assert [row["step"] for row in rows] == [1, 2, 3, 4] and all(row["replay/ready"] == 1.0 for row in rows)
    assert (two / "closed-0").exists() and (two / "closed-1").exists()
    said = [(two / f"{rank}.log").read_text().count("engine computes a model of type qwen2") for rank in (0, 1)]
    assert said == [1, 0]


def test_a_checkpoint_of_two_ranks(two: Path) -> None:
    assert checkpoints_of(two) == ["step-000002", "step-000004"]
    checkpoint = two / "checkpoints" / "step-000002"
    assert sorted(str(path.relative_to(checkpoint)) for path in checkpoint.rglob("*") if path.is_file()) == [
        "checkpoint.json", "model/config.json", "model/generation_config.json", "model/model.safetensors",
        "model/tokenizer.json", "model/tokenizer_config.json", "policy/rank-0.safetensors",
        "policy/rank-1.safetensors", "queue.msgpack", "random/rank-0.safetensors", "random/rank-1.safetensors",
        "trainer.json",
    ]  # fmt: skip
    sent = sent_by_two(two)
    saved = load_file(checkpoint / "model" / "model.safetensors")
    assert all(torch.equal(weight, sent[f"2/{name}"]) for name, weight in saved.items())
    last = two / "checkpoints" / "step-000004"
    assert (last / "queue.msgpack").read_bytes() == b"the queue"
    model = "model/model.safetensors"
    assert (last / model).read_bytes() == (two / model).read_bytes()


def test_two_ranks_restart(tiny_model: Path, two: Path, copied: Path, free_port: Callable[[], int]) -> None:
    (copied / "begin.json").write_text("3")
    shutil.rmtree(copied / "checkpoints" / "step-000004")
    again = run_two(tiny_model, copied, free_port())
    assert [(copied / f"begun-{rank}").read_text() for rank in (0, 1)] == ["2", "2"]
    assert {name.partition("/")[0] for name in again} == {"3"}
    sent = sent_by_two(two)
    assert all(torch.equal(weight, sent[name]) for name, weight in again.items())
    model = "model/model.safetensors"
    assert (copied / model).read_bytes() == (two / model).read_bytes()
    assert read_rows(copied) == read_rows(two)


def checkpoints_of(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def read_rows(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_rank_that_writes_versions_waits_for_the_start_of_rank_0(cleanup: list, tmp_path: Path) -> None:
    """Rank 0 begins its trackers first, which may take longer than a phase of a version."""
    address = socket_address(f"weights-{uuid.uuid4().hex[:8]}")
    config = make_config(tmp_path, weights={"transport": "files", "timeout_s": 0.3})
    stores: list[StoreServer] = []
    late = threading.Timer(1.0, lambda: stores.append(StoreServer(address, "shares", run_id="run-0f")))
    late.start()
    cleanup += [lambda: stores[0].close(), late.join]
    manifest, ranks = WeightManifest.of([("a", torch.bfloat16, (8,))]), SimpleNamespace(rank=1, count=2, device="cpu")
    given: Any = config, ranks, manifest, Endpoints("run-0f", "", address, ""), tmp_path
    with ExitStack() as parts:
        cleanup.append(_make_file_sender(*given, parts).close)
