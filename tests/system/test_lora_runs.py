"""Complete runs that train adapters."""

from __future__ import annotations

import json
from collections.abc import Callable
from statistics import fmean

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from asyncrl.config.config import Config
from asyncrl.config.load import load_config
from asyncrl.config.training import Lora
from asyncrl.generator.transformers_backend.engine import TransformersEngine
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
    assert said["mean_difference_nats"] < 1e-4, "the engine has the adapter"
    check_ledger(run.summary())
    assert run.left_over() == []
    model = load_file(run.run_dir / "model" / "model.safetensors")
    base = load_file(run.folder / "demo" / "model" / "model.safetensors")
    assert model.keys() == base.keys()
    changed = {name for name in base if not torch.equal(base[name], model[name])}
    adapters = load_file(run.run_dir / "adapter" / "adapter_model.safetensors")
    modules = {name.removeprefix("base_model.model.").partition(".lora_")[0] for name in adapters}
    assert changed == {f"{module}.weight" for module in modules} and len(adapters) == 2 * len(modules)
    last_row = rows[-1]
    version_bytes = last_row["weights/bytes"] / last_row["weights/broadcasts"]
    assert version_bytes < 0.1 * sum(weight.nbytes for weight in base.values()), "adapters alone are sent"
    config = load_config(run.run_dir / "config.yaml")
    tensors = [(name.removeprefix("base_model.model."), matrix) for name, matrix in adapters.items()]
    demo, exported = str(run.folder / "demo" / "model"), str(run.run_dir / "model")
    assert greedy(config, demo, tensors) == greedy(config, exported) != greedy(config, demo)


def greedy(config: Config, model: str, adapter: list[tuple[str, Tensor]] | None = None) -> list[list[int]]:
    """The greedy tokens of an engine with the model's own weights, or with the adapter."""
    learner = config.learner if adapter else config.learner.model_copy(update={"lora": Lora()})
    of_model = config.model.model_copy(update={"path": model})
    engine = TransformersEngine(config.model_copy(update={"model": of_model, "learner": learner}), seed=0)
    if adapter:
        engine.swap(0, adapter)
    else:
        engine.use_own_weights(0)
    for first in range(5, 25):
        engine.add(str(first), [first, 7, 3, 12, 9], kind="greedy")
    done = dict[str, list[int]]()
    while engine.num_running:
        done |= {one.key: one.tokens for one in engine.step()}
    return [done[key] for key in sorted(done)]


MERGED_THROUGH_FILES = (
    "generator.engine=transformers",
    "learner.lora.load=merged",
    "weights.transport=files",
    "data.eval=demo/arithmetic.parquet",
    "eval.every_steps=5",
    "eval.samples=1",
    "eval.sampling={temperature: 0}",
)


@pytest.mark.parametrize(("stage", "more"), [(2, ()), (3, MERGED_THROUGH_FILES)])
def test_two_learners_train_adapters_and_resume(
    launch: Callable[..., Launched], asyncrl: Callable[..., str], stage: int, more: tuple[str, ...]
) -> None:
    settings = (*SMALL, *LORA, "--learners", "2", f"learner.zero_stage={stage}", "checkpoint.every_steps=3", *more)
    name = f"lora-zero{stage}"
    code, output = launch("--steps", "6", *settings, run=name).end(timeout_s=150)
    assert code == 0, output
    again = launch("--steps", "9", *settings, "--resume", run=name)
    code, output = again.end(timeout_s=150)
    assert code == 0, output
    assert [int(row["step"]) for row in again.rows() if "reward/mean" in row] == list(range(1, 10))
    check_ledger(again.summary())
    if stage == 3:
        checkpoint, results = again.run_dir / "checkpoints" / "step-000009", again.folder / "lora-eval.json"
        asyncrl("eval", "--model", str(checkpoint), "--config", "demo", *LORA[:1], *MERGED_THROUGH_FILES,
                "--out", str(results))  # fmt: skip
        during = again.summary()["eval"][-1]
        after = json.loads(results.read_text())["metrics"]
        assert (during["version"], during["reward"]) == (9, after["reward"]), "the engine had the checkpoint's weights"
