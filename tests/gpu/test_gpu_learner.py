"""The learner on a GPU against the same on the CPU, and its memory against the launcher's arithmetic."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

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
        states = hidden.to(device).requires_grad_()
        layer = torch.nn.Linear(64, 5000, bias=False, device=device)
        layer.load_state_dict(output.state_dict())
        logprobs, entropies = LogprobHead(layer, 0.7)(states, targets.to(device))
        logprobs.square().sum().backward()
        assert states.grad is not None and layer.weight.grad is not None
        results.append([tensor.detach().cpu() for tensor in (logprobs, entropies, states.grad, layer.weight.grad)])
    for there, here in zip(*reversed(results), strict=True):
        torch.testing.assert_close(there, here, rtol=1e-3, atol=1e-3)


MEASURE = """
import sys, json, torch
sys.path[:0] = [{learner!r}, {gpu!r}]
from test_learner_memory import groups_of
from worlds import endpoints, make_config, make_trainer, pack_groups
from asyncrl.learner.distributed import connected
from asyncrl.config import Config
config = Config.model_validate_json({config!r})
with connected(endpoints({port}), 0, 1, start_timeout_s=60, timeout_s=60) as ranks:
    trainer = make_trainer(config, ranks)
    for step in (1, 2):
        trainer.train(pack_groups(config, groups_of([250] * 32)), step=step)
    print(json.dumps(torch.cuda.max_memory_allocated()))
"""


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_memory_is_what_the_arithmetic_says(dtype: str, checkpointing: bool, tmp_path: Path) -> None:
    from test_learner_memory import SIZES
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = SIZES | {
        "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8, "num_attention_heads": 16,
        "num_key_value_heads": 4, "vocab_size": 32000,
    }  # fmt: skip
    LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(tmp_path)
    learner = {"tokens_per_microbatch": 8192, "gradient_checkpointing": checkpointing, "zero_stage": 2}
    config = make_config(
        tmp_path,
        model={"dtype": dtype},
        learner=learner,
        generator={"max_new_tokens": 250},
        replay={"groups_per_step": 32},
    )
    shape, port = Shape.read(str(tmp_path)), find_port()
    assert shape is not None
    parts = learner_parts(config, shape, reference=None, critic=None, packs=False)
    estimate = sum(parts.values()) - PROCESS_BYTES
    folders = {"learner": str(Path(__file__).parents[1] / "learner"), "gpu": str(Path(__file__).parent)}
    code = MEASURE.format(**folders, config=config.model_dump_json(), port=port)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    measured = int(done.stdout.strip().splitlines()[-1])
    terms = ", ".join(f"{name} {num_bytes >> 20}" for name, num_bytes in parts.items() if num_bytes >> 20)
    print(
        f"{dtype}, checkpointing {checkpointing}: measured {measured >> 20} MiB, arithmetic {estimate >> 20} MiB, "
        f"{estimate / measured - 1:+.1%} ({terms})"
    )
    assert 0.5 * estimate < measured < 1.05 * estimate, parts
