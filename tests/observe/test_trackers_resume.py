"""Trackers of a restarted run continue where the previous start ended."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from asyncrl.observe import trackers as trackers_module
from asyncrl.observe.trackers import make_trackers
from tests.helpers.replay import small_config


def rows(run_dir: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_steps_are_logged_once_and_a_torn_line_is_cut(tmp_path: Path) -> None:
    config = small_config(observe__trackers=["tensorboard"])
    trackers = make_trackers(config, tmp_path)
    for step in (1, 2, 3):
        trackers.log(step, {"reward/mean": float(step)})
    trackers.close()
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-5])
    again = make_trackers(config, tmp_path)
    assert [row["step"] for row in rows(tmp_path)] == [1, 2]
    for step in (2, 3, 4):
        again.log(step, {"reward/mean": 10.0 * step})
    again.close()
    assert [(row["step"], row["reward/mean"]) for row in rows(tmp_path)] == [(1, 1), (2, 2), (3, 30), (4, 40)]
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    assert [(event.step, event.value) for event in board.Scalars("reward/mean")] == [(1, 1), (2, 2), (3, 30), (4, 40)]


def test_a_learner_that_was_replaced_while_it_stood_still_adds_no_row(tmp_path: Path) -> None:
    config = small_config()
    silent = make_trackers(config, tmp_path)
    for step in (1, 2, 3):
        silent.log(step, {"reward/mean": 0.5})
    trackers = make_trackers(config, tmp_path)
    for step in (4, 5):
        trackers.log(step, {"reward/mean": 0.75})
    silent.log(4, {"reward/mean": 0.25})
    trackers.log(6, {"reward/mean": 0.75})
    silent.close()
    trackers.close()
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3, 4, 5, 6]
    assert not list(tmp_path.glob(".*"))


def test_no_row_is_added_by_a_replaced_learner_after_the_last_row_was_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent, read = make_trackers(small_config(), tmp_path), trackers_module._logged
    silent.log(1, {"reward/mean": 0.5})

    def logged(path: Path) -> tuple[int, set[float], int]:
        last = read(path)
        silent.log(2, {"reward/mean": 0.5})
        return last

    monkeypatch.setattr(trackers_module, "_logged", logged)
    trackers = make_trackers(small_config(), tmp_path)
    trackers.log(2, {"reward/mean": 0.75})
    silent.close()
    trackers.close()
    assert [(row["step"], row["reward/mean"]) for row in rows(tmp_path)] == [(1, 0.5), (2, 0.75)]


def test_an_evaluation_after_the_last_step_is_logged_once(tmp_path: Path) -> None:
    config = small_config()
    trackers = make_trackers(config, tmp_path)
    trackers.log(1, {"eval/version": 0.0})
    trackers.log(2, {"reward/mean": 0.5})
    trackers.log_evaluation(2, {"eval/version": 1.0})
    trackers.close()
    again = make_trackers(config, tmp_path)
    for version in (1.0, 2.0):
        again.log_evaluation(2, {"eval/version": version})
    again.close()
    assert [row.get("eval/version") for row in rows(tmp_path)] == [0.0, None, 1.0, 2.0]


def test_wandb_goes_on_with_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Offline, unless WANDB_MODE is set."""
    monkeypatch.delenv("WANDB_MODE", raising=False)
    for name in ("exit", "excepthook"):  # wandb replaces them, for all tests after this one
        monkeypatch.setattr(sys, name, getattr(sys, name))
    config = small_config(observe__trackers=["wandb"])
    for step in (1, 2):
        trackers = make_trackers(config, tmp_path)
        trackers.log(step, {"reward/mean": 0.5})
        trackers.close()
    run_id = (tmp_path / "wandb_id").read_text()
    folders = list((tmp_path / "wandb").glob("offline-run-*"))
    assert len(folders) == 2 and all(f"-{run_id}" in folder.name for folder in folders)


def test_an_evaluation_that_was_logged_comes_with_no_step_after_it(tmp_path: Path) -> None:
    config = small_config()
    trackers = make_trackers(config, tmp_path)
    trackers.log(1, {"reward/mean": 0.5})
    trackers.log_evaluation(1, {"eval/version": 1.0, "eval/reward": 0.25})
    trackers.close()
    again = make_trackers(config, tmp_path)
    again.log(2, {"reward/mean": 0.75, "eval/version": 1.0, "eval/reward": 0.25})
    again.close()
    assert rows(tmp_path)[2] == {"step": 2, "reward/mean": 0.75}
