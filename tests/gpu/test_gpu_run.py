"""A complete run on GPUs: the demo, with all roles on one, and by NCCL where there are two."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from asyncrl.launch.machine import visible_gpus
from tests.helpers.demo import make_demo
from tests.helpers.runs import Launched, check_ledger, start_launch

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

STEPS = 60


@pytest.mark.parametrize("engine", ["transformers", "vllm"])
@pytest.mark.parametrize("count", [1, 2])
def test_the_demo_trains_on_gpus(count: int, engine: str, demo: Callable[..., Launched]) -> None:
    names = [gpu.name for gpu in visible_gpus()][:count]
    if len(names) < count:
        pytest.skip(f"needs {count} GPUs")
    run = demo(engine, names)
    summary = run.summary()
    assert summary["reward_last"] > summary["reward_first"]
    shares = {event["name"]: event["gpus"] for event in run.events("launcher") if event["event"] == "role started"}
    assert shares["learner-0"] == [names[0]] and shares["generator-0"] == [names[-1]]


@pytest.mark.parametrize("engine", ["transformers", "vllm"])
def test_adapters_are_trained_and_sent_alone(engine: str, demo: Callable[..., Launched]) -> None:
    # With such a rate, keys and values that are kept over a swap are too far from the learner's.
    settings = ("learner.lora.rank=8", "learner.lr=5e-3", "weights.kv_cache=recompute")
    demo(engine, [gpu.name for gpu in visible_gpus()][:1], *settings)


@pytest.fixture
def demo(
    gpu: torch.device,
    tmp_path: Path,
    started: list[Launched],
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    figure: Callable[[str, float], None],
) -> Callable[..., Launched]:
    """Runs the demo on these GPUs to its end. The engine's log-probs of fresh tokens equal the learner's."""

    def run(engine: str, names: list[str], *settings: str) -> Launched:
        if engine == "vllm" and importlib.util.find_spec("vllm") is None:
            pytest.skip("vLLM is not installed")
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(names))
        assert request.config.cache is not None
        folder = make_demo(tmp_path, request.config.cache)
        overrides = ["--steps", str(STEPS), "launch.start_timeout_s=400", f"generator.engine={engine}", *settings]
        run = start_launch(folder, "gpu", *overrides, preloaded=None)
        started.append(run)
        code, output = run.end(timeout_s=550)
        assert code == 0, output
        summary = run.summary()
        assert summary["policy_version"] == STEPS
        check_ledger(summary)
        assert summary["weight_sync"]["count"] >= STEPS - 1
        kl = max(abs(row["staleness/0/kl"]) for row in run.rows() if "staleness/0/kl" in row)
        what = ", ".join(["demo", engine, f"{len(names)} GPUs", *settings])
        figure(f"{what}: reward of the last steps", summary["reward_last"])
        figure(f"{what}: largest KL of fresh tokens", kl)
        assert kl < 0.01
        return run

    return run
