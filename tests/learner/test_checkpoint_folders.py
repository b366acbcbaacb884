"""The checkpoints of a run: written completely, found again, damaged, kept and removed."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from worlds import make_config

from asyncrl.errors import PeerTimeoutError, RunError
from asyncrl.learner.checkpoint import (
    ALARM_STEPS,
    Checkpoints,
    Files,
    await_parts,
    bytes_file,
    finished_steps,
    newest_checkpoint,
    sum_of,
)
from asyncrl.learner.distributed import Ranks

Make = Callable[..., Checkpoints]


@pytest.fixture
def make(one_rank: Ranks, tmp_path: Path) -> Iterator[Make]:
    made: list[Checkpoints] = []

    def make(others: tuple[str, ...] = (), *, on_collapse: str = "warn", **settings: Any) -> Checkpoints:
        learner, launch = {"on_collapse": on_collapse}, {"progress_timeout_s": 0.3}
        config = make_config(tmp_path, checkpoint=settings, learner=learner, launch=launch)
        made.append(Checkpoints(config, tmp_path / "checkpoints", one_rank, others=others))
        return made[-1]

    yield make
    for checkpoints in made:
        checkpoints.close()


def content(step: int, num_bytes: int = 1000) -> Callable[[Path], Files]:
    return lambda folder: {
        "policy/rank-0.safetensors": bytes_file(bytes([step]) * num_bytes),
        "queue.msgpack": bytes_file(b"queue"),
    }


def save(checkpoints: Checkpoints, *steps: int, rewards: dict[int, float] | None = None, num_bytes: int = 1000) -> None:
    for step in steps:
        checkpoints.save(step, content(step, num_bytes), reward=(rewards or {}).get(step))
        checkpoints.finish()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def test_a_checkpoint_contains_the_snapshot(make: Make, tmp_path: Path) -> None:
    checkpoints = make()
    assert checkpoints.newest() == 0 and checkpoints.recent == []
    save(checkpoints, 50, rewards={50: 0.25})
    path = tmp_path / "checkpoints" / "step-000050"
    assert sorted(str(p.relative_to(path)) for p in path.rglob("*")) == [
        "checkpoint.json", "policy", "policy/rank-0.safetensors", "queue.msgpack",
    ]  # fmt: skip
    manifest = json.loads((path / "checkpoint.json").read_text())
    files = {name: sum_of(path / name) for name in ("policy/rank-0.safetensors", "queue.msgpack")}
    assert manifest == {"step": 50, "reward": 0.25, "evaluated": False, "files": files}
    assert files["queue.msgpack"] == {"bytes": 5, "xxh3": "8016b745568d6034"}
    assert (path / "queue.msgpack").read_bytes() == b"queue"
    assert checkpoints.recent == [50] and checkpoints.path(50) == path
    assert checkpoints.metrics()["checkpoint/write_s"] > 0 and checkpoints.metrics() == {}
    assert make().newest() == 50


def test_the_newest_and_the_best_are_kept(make: Make, tmp_path: Path) -> None:
    checkpoints = make(keep_last=2)
    rewards = {1: 0.1, 2: 0.9, 3: 0.2, 4: 0.3, 5: 0.4}
    save(checkpoints, 1, 2, 3, 4, 5, rewards=rewards)
    assert names(tmp_path) == ["step-000002", "step-000004", "step-000005"]
    assert checkpoints.recent == [4, 5]
    again = make(keep_last=1)
    assert again.newest() == 5 and again.recent == [5]
    save(again, 6, rewards={6: 0.9})
    assert names(tmp_path) == ["step-000006"]  # of equal reward, and newer
    last = make(keep_last=1, keep_best=False)
    last.newest()
    save(last, 7, rewards={7: 0.0})
    assert names(tmp_path) == ["step-000007"]


@pytest.mark.parametrize(("every", "keep_last"), [(1, 1), (5, 1), (5, 3), (13, 1), (20, 2)])
def test_the_newest_from_before_a_collapse_is_kept_for_a_rollback(make: Make, every: int, keep_last: int) -> None:
    checkpoints = make(keep_last=keep_last, keep_best=False, on_collapse="rollback")
    for step in range(every, 4 * ALARM_STEPS + 4 * every, every):
        save(checkpoints, step)
        kept = finished_steps(checkpoints.folder)
        assert len(kept) <= max(keep_last, (ALARM_STEPS + 2) // every + 2)
        for onset in range(max(every, step - ALARM_STEPS) + 1, step + 1):  # of an alarm that is raised after this step
            assert max(other for other in kept if other < onset) == (onset - 1) // every * every, f"step {step}: {kept}"
    checkpoints.alarmed = True
    end = step + 4 * every
    for later in range(step + every, end + 1, every):
        save(checkpoints, later)
        assert set(kept) <= set(finished_steps(checkpoints.folder)), "they stay while the alarm is active"
    checkpoints.alarmed = False
    for later in range(end + every, end + 4 * ALARM_STEPS, every):
        save(checkpoints, later)
    assert not set(kept) & set(finished_steps(checkpoints.folder))


def test_an_evaluation_ranks_above_training_rewards(make: Make, tmp_path: Path) -> None:
    checkpoints = make(keep_last=1)
    save(checkpoints, 1, rewards={1: 0.9})
    checkpoints.evaluated(1, 0.2)
    checkpoints.save(2, content(2), reward=0.1)
    checkpoints.evaluated(2, 0.3)  # while the checkpoint is being written
    checkpoints.finish()
    assert json.loads((tmp_path / "checkpoints/step-000002/checkpoint.json").read_text())["reward"] == 0.3
    save(checkpoints, 3, rewards={3: 0.8})
    assert names(tmp_path) == ["step-000002", "step-000003"]
    checkpoints.evaluated(1, 0.9)  # its checkpoint is removed
    checkpoints.evaluated(7, 0.9)  # it has no checkpoint
    assert checkpoints._evaluations == {}
    assert make().newest() == 3


def test_an_unfinished_checkpoint_is_removed_and_the_previous_one_used(make: Make, tmp_path: Path) -> None:
    save(make(), 10, 20)
    unfinished = tmp_path / "checkpoints" / "step-000030.partial"
    (tmp_path / "checkpoints" / "step-000020").rename(unfinished)  # killed just before the checkpoint was complete
    with structlog.testing.capture_logs() as logs:
        again = make()
        assert again.newest() == 10
    assert [(entry["event"], entry["path"]) for entry in logs] == [
        ("an unfinished checkpoint is removed", str(unfinished))
    ]
    assert names(tmp_path) == ["step-000010"]
    save(again, 20)
    assert names(tmp_path) == ["step-000010", "step-000020"]
    (tmp_path / "checkpoints" / "step-000020" / "checkpoint.json").unlink()  # killed while it was removed
    assert make().newest() == 10 and names(tmp_path) == ["step-000010"]


def change(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[500] ^= 1
    path.write_bytes(data)


DAMAGES: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "bit": ("policy/rank-0.safetensors", change, ": has {'bytes': 1000, 'xxh3': "),
    "short": ("queue.msgpack", lambda path: path.write_bytes(b"que") and None, ": has {'bytes': 3, "),
    "missing": ("queue.msgpack", Path.unlink, ": [Errno 2] No such file"),
    "manifest": ("checkpoint.json", lambda path: path.write_text("{") and None, ": Expecting property name"),
    "keys": (
        "checkpoint.json",
        lambda path: path.write_text('{"x": 1}') and None,
        ": CheckpointManifest.__init__() got",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_skipped(damage: str, make: Make, tmp_path: Path) -> None:
    save(make(), 10, 20)
    name, spoil, reason = DAMAGES[damage]
    path = tmp_path / "checkpoints" / "step-000020"
    spoil(path / name)
    with structlog.testing.capture_logs() as logs:
        again = make()
        assert again.newest() == 10
    (entry,) = logs
    assert entry["event"] == "a damaged checkpoint is not used" and entry["log_level"] == "warning"
    assert entry["path"] == str(path) and entry["reason"].startswith(f"{path / name}{reason}")
    assert again.recent == [10]
    assert newest_checkpoint(tmp_path / "checkpoints") == tmp_path / "checkpoints" / "step-000010"
    save(again, 20)  # replaces it
    assert make().newest() == 20
    change(path / "policy/rank-0.safetensors")
    change(tmp_path / "checkpoints/step-000010/policy/rank-0.safetensors")
    assert make().newest() == 0 and newest_checkpoint(tmp_path / "checkpoints") is None


def test_missing_parts_are_named(make: Make, tmp_path: Path) -> None:
    checkpoints = make(("critic-0", "critic-1"))
    checkpoints.save(1, content(1), reward=None)
    with pytest.raises(PeerTimeoutError, match=r"partial lacks the parts of critic-0, critic-1 after 0.3 s"):
        checkpoints.finish()
    checkpoints.close()
    assert names(tmp_path) == []
    cancelled = threading.Event()
    cancelled.set()
    with pytest.raises(RunError, match="was abandoned: learner-1 have not written their parts"):
        await_parts(tmp_path, ["learner-1"], timeout_s=60, cancelled=cancelled)


def test_the_next_waits_for_the_one_before(make: Make, tmp_path: Path) -> None:
    checkpoints = make()
    go_on = threading.Event()

    def slow(path: Path) -> None:
        assert go_on.wait(20)
        path.write_bytes(b"slow")

    checkpoints.save(1, lambda folder: {"slow": slow}, reward=None)
    assert checkpoints.failure() is None and checkpoints.recent == []
    threading.Timer(0.2, go_on.set).start()
    save(checkpoints, 2)
    assert names(tmp_path) == ["step-000001", "step-000002"]
