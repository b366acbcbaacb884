"""The learner on a GPU against the same on the CPU, and its memory against the launcher's arithmetic."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from train_steps import CASES
from worlds import make_config, make_model

from asyncrl.launch.resources.memory import PROCESS_BYTES, Shape, learner_parts
from asyncrl.launch.resources.network import find_port
from asyncrl.learner.model.logprob_head import LogprobHead

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

CPU = {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


def train(model: Path, out: Path, case: str, environment: dict[str, str]) -> tuple[dict[str, torch.Tensor], dict]:
    script, port = Path(__file__).with_name("train_steps.py"), find_port()
    command = [sys.executable, str(script), str(port), str(model), str(out), case]
    done = subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return load_file(out.with_suffix(".safetensors")), json.loads(out.with_suffix(".json").read_text())


@pytest.mark.parametrize("case", CASES)
def test_a_step_is_that_of_the_cpu(case: str, tiny_model: Path, tmp_path: Path) -> None:
    there, scalars = train(tiny_model, tmp_path / "gpu", case, {})
    here, expected = train(tiny_model, tmp_path / "cpu", case, CPU)
    assert scalars.pop("device").startswith("cuda") and expected.pop("device") == "cpu"
    tolerance = 0.05 if case.startswith(("bfloat16", "checkpointing")) else 1e-3
    for name in ("1/learner/loss", "1/learner/grad_norm"):
        assert scalars[name] == pytest.approx(expected[name], rel=tolerance, abs=tolerance / 10), name
    for name in (name for name in here if name.startswith("gradient/1/")):
        scale = float(here[name].abs().max())
        assert float((there[name] - here[name]).abs().max()) <= tolerance * scale + 1e-6, name


def test_logprobs_of_the_head_are_those_of_the_cpu(gpu: torch.device) -> None:
    torch.manual_seed(0)
    output = torch.nn.Linear(64, 5000, bias=False)
    hidden, targets = torch.randn(700, 64), torch.randint(5000, (700,))
    results: list[list[torch.Tensor]] = []
    for device in (torch.device("cpu"), gpu):
        states = hidden.detach().to(device).requires_grad_()
        layer = torch.nn.Linear(64, 5000, bias=False, device=device)
        layer.load_state_dict(output.state_dict())
        logprobs, entropies = LogprobHead(layer, 0.7)(states, targets.to(device))
        logprobs.square().sum().backward()
        assert states.grad is not None and layer.weight.grad is not None
        results.append([tensor.detach().cpu() for tensor in (logprobs, entropies, states.grad, layer.weight.grad)])
    for there, here in zip(*reversed(results), strict=True):
        torch.testing.assert_close(there, here, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_memory_is_what_the_arithmetic_says(
    dtype: str, checkpointing: bool, tmp_path: Path, figure: Callable[[str, float], None]
) -> None:
    from test_learner_memory import SIZES
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = SIZES | {
        "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8, "num_attention_heads": 16,
        "num_key_value_heads": 4, "vocab_size": 32000,
    }  # fmt: skip
    LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(tmp_path)
    learner = {"tokens_per_microbatch": 8192, "gradient_checkpointing": checkpointing, "zero_stage": 2}
    config = make_config(tmp_path, model={"dtype": dtype}, learner=learner, replay={"groups_per_step": 32})
    shape, port = Shape.read(str(tmp_path)), find_port()
    assert shape is not None
    parts = learner_parts(config, shape, reference=None, critic=None, packs=False)
    estimate = sum(parts.values()) - PROCESS_BYTES
    script = Path(__file__).with_name("peak_memory.py")
    command = [sys.executable, str(script), str(port), config.model_dump_json()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    measured = int(done.stdout.strip().splitlines()[-1])
    figure(f"learner, {dtype}, checkpointing {checkpointing}: memory by arithmetic / measured", estimate / measured)
    assert 0.5 * estimate < measured < 1.05 * estimate, parts
