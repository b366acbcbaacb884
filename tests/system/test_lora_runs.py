"""Complete runs that train adapters."""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers.runs import SMALL, Launched, check_ledger

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(300)]

LORA = ("learner.lora.rank=8", "learner.lr=5e-3", "learner.warmup_steps=5")


def test_the_demo_learns_with_adapters(launch: Callable[..., Launched]) -> None:
    run = launch("--steps", "60", *LORA, "checkpoint.every_steps=30")
    code, output = run.end(timeout_s=280)
    assert code == 0, output
    rows = run.rows()
    assert len(rows) == 60
    first, last = (fmean(row["reward/mean"] for row in part) for part in (rows[:6], rows[-6:]))
    assert last > first + 0.2, (first, last)
    (said,) = [event for event in run.events("learner-0") if event["event"] == "engine and learner agree"]
    assert said["mean_difference_nats"] < 1e-4, "the engine has the merged weights"
    check_ledger(run.summary())
    assert run.left_over() == []
    model = load_file(run.run_dir / "model" / "model.safetensors")
    base = load_file(run.folder / "demo" / "model" / "model.safetensors")
    assert model.keys() == base.keys()
    changed = {name for name in base if not torch.equal(base[name], model[name])}
    adapters = load_file(run.run_dir / "adapter" / "adapter_model.safetensors")
    modules = {name.removeprefix("base_model.model.").partition(".lora_")[0] for name in adapters}
    assert changed == {f"{module}.weight" for module in modules} and len(adapters) == 2 * len(modules)


@pytest.mark.parametrize("stage", [2, 3])
def test_two_learners_train_adapters_and_resume(launch: Callable[..., Launched], stage: int) -> None:
    settings = (*SMALL, *LORA, "--learners", "2", f"learner.zero_stage={stage}", "checkpoint.every_steps=3")
    name = f"lora-zero{stage}"
    code, output = launch("--steps", "6", *settings, run=name).end(timeout_s=150)
    assert code == 0, output
    again = launch("--steps", "9", *settings, "--resume", run=name)
    code, output = again.end(timeout_s=150)
    assert code == 0, output
    assert [int(row["step"]) for row in again.rows()] == list(range(1, 10))
    check_ledger(again.summary())
