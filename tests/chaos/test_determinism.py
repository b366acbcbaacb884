"""Runs with identical results, and training from the journal."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from asyncrl.launch.fork_server import ForkServer
from asyncrl.observe.samples import Samples
from asyncrl.replay.history import JournalSamples
from tests.chaos.runs import Chaos, check_complete
from tests.helpers.preloaded import Command

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

Make = Callable[..., Chaos]
STEPS = 6
OWN_TIME = (
    "time/", "throughput/", "goodput/", "_s", "idle", "generator/", "replay/", "weights/", "journal/", "memory_bytes",
)  # fmt: skip
"""Metrics of time and of processes, which differ between runs."""


def comparable(row: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in row.items() if not any(k.startswith(own) or k.endswith(own) for own in OWN_TIME)}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.slow
def test_same_seed_same_run_and_resume_changes_nothing(chaos: Make, full: bool) -> None:
    settings = ["deterministic=true", "replay.max_staleness=0", f"steps={STEPS}", "checkpoint.every_steps=2"]
    runs = [chaos(*settings, name=f"deterministic-{name}") for name in ("first", "second", "resumed", "two")]
    first, second, resumed, two = runs
    first.start()
    check_complete(first, first.finish(timeout_s=200), STEPS)
    others = [resumed, two]
    if full:  # the other two runs cover this and more
        second.start()
        second.finish(timeout_s=200)
        others.append(second)
    resumed.start()
    assert resumed.wait_for_step(3)
    resumed.kill_all()
    resumed.start()
    check_complete(resumed, resumed.finish(timeout_s=200), STEPS)
    two.start("launch.generators=2")
    two.finish(timeout_s=200)
    rows = [comparable(row) for row in first.rows()]
    assert len(rows[0]) > 10
    for other in others:
        assert [comparable(row) for row in other.rows()] == rows, other.name
        assert same(weights(other.run_dir / "model"), weights(first.run_dir / "model")), other.name


def offline(preloaded: ForkServer, folder: Path, *arguments: str) -> str:
    """Runs `asyncrl retrain`, which must succeed, and returns its output."""
    command = Command(preloaded, folder, ["retrain", *arguments])
    output, _ = command.communicate(timeout=200)
    assert command.returncode == 0, output
    return output


@pytest.mark.slow
def test_a_deterministic_run_and_its_journal_alone_have_the_same_weights(
    chaos: Make, preloaded: ForkServer, demo_folder: Path
) -> None:
    settings = ["deterministic=true", "replay.max_staleness=0", "steps=4", "journal.retention=all"]
    run = chaos(*settings, name="deterministic")
    run.start()
    check_complete(run, run.finish(timeout_s=200), 4)
    output = offline(preloaded, demo_folder, str(run.run_dir), "--out", "same")
    assert "weights identical" in output and "yes" in output
    assert same(weights(demo_folder / "same" / "model"), weights(run.run_dir / "model"))


@pytest.mark.slow
def test_training_from_the_journal_alone_has_the_same_weights(
    chaos: Make, preloaded: ForkServer, demo_folder: Path
) -> None:
    run = chaos(f"steps={STEPS}", "launch.learners=2", "journal.retention=all", name="recorded")
    run.start()
    run.finish(timeout_s=200)
    output = offline(preloaded, demo_folder, str(run.run_dir), "--out", "again")
    assert "weights identical" in output and "yes" in output
    assert same(weights(demo_folder / "again" / "model"), weights(run.run_dir / "model"))
    output = offline(
        preloaded, demo_folder, str(run.run_dir), "algorithm.loss=cispo", "learner.lr=1e-4", "--out", "other"
    )
    assert not same(weights(demo_folder / "other" / "model"), weights(run.run_dir / "model"))
    assert "learner/loss" in output
    journal = JournalSamples(run.run_dir / "journal")
    steps = [journal.of_step(step) for step in range(1, STEPS + 1)]
    Samples.concat([step.select(step["index"] < 4) for step in steps]).save(demo_folder / "half.parquet")
    output = offline(preloaded, demo_folder, str(run.run_dir), "--samples", "half.parquet", "--out", "half")
    assert f"{STEPS} steps" in output
    assert not same(weights(demo_folder / "half" / "model"), weights(run.run_dir / "model"))
