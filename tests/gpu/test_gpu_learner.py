"""The learner on a GPU against the same on the CPU, and its memory against the launcher's arithmetic."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from routing_parts import FAMILIES, config_of, errors_of, groups_of, live, move_routers
from safetensors.torch import load_file
from train_steps import CASES
from worlds import make_config, make_model, pack_groups

from asyncrl.generator.transformers_backend.engine import TransformersEngine
from asyncrl.launch.machine import find_port
from asyncrl.launch.memory import PROCESS_BYTES, Shape, learner_parts
from asyncrl.learner.batch import moved_to
from asyncrl.learner.distributed import Ranks
from asyncrl.learner.model import attention, logprob_head
from asyncrl.learner.model.attention import PackedLayout, attend_in_buckets, find_firsts, make_layout
from asyncrl.learner.model.logprob_head import LogprobHead
from asyncrl.learner.model.policy import Policy
from benchmarks.families import save_family

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

CPU = {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}


@pytest.fixture(scope="session")
def tiny_model(gpu: torch.device, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def pool(gpu: torch.device) -> Iterator[ThreadPoolExecutor]:
    """Runs processes: most of their time they start, so that many run together."""
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 2)) as pool:
        yield pool


def run(script: str, *arguments: object, **environment: str) -> str:
    """Returns the last line that a script of this folder prints."""
    command = [sys.executable, str(Path(__file__).with_name(script)), str(find_port()), *map(str, arguments)]
    done = subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return (done.stdout.strip().splitlines() or [""])[-1]


@pytest.fixture(scope="session")
def trained(pool: ThreadPoolExecutor, tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Future]:
    """The folders to which all cases are trained, on the GPU and on the CPU."""
    model = make_model(tmp_path_factory.mktemp("model"))
    there, here = (tmp_path_factory.mktemp(device) for device in ("gpu", "cpu"))
    started = {there: pool.submit(run, "train_steps.py", model, there)}
    return started | {here: pool.submit(run, "train_steps.py", model, here, **CPU)}


def result(folder: Path, case: str) -> tuple[dict[str, torch.Tensor], dict]:
    error = folder / f"{case}.error"
    assert not error.exists(), error.read_text()
    return load_file(folder / f"{case}.safetensors"), json.loads((folder / f"{case}.json").read_text())


@pytest.mark.parametrize("case", CASES)
def test_a_step_is_that_of_the_cpu(case: str, trained: dict[Path, Future]) -> None:
    for future in trained.values():
        future.result(timeout=250)
    (there, scalars), (here, expected) = (result(folder, case) for folder in trained)
    assert scalars.pop("device").startswith("cuda") and expected.pop("device") == "cpu"
    tolerance = 0.05 if case.startswith(("bfloat16", "checkpointing")) else 1e-3
    for name in ("1/learner/loss", "1/learner/grad_norm"):
        assert scalars[name] == pytest.approx(expected[name], rel=tolerance, abs=tolerance / 10), name
    for name in (name for name in here if name.startswith("gradient/1/")):
        scale = float(here[name].abs().max())
        assert float((there[name] - here[name]).abs().max()) <= tolerance * scale + 1e-6, name


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_are_replayed(family: str, one_rank: Ranks, tmp_path: Path) -> None:
    config = config_of(save_family(family, tmp_path))
    engine = TransformersEngine(config, seed=1)
    engine.use_own_weights(0)
    groups = groups_of(config, engine)
    engine.close()
    micros = [micro.to(one_rank.device) for micro in pack_groups(config, groups).micro_batches]
    replaying, routing = Policy(config, one_rank), Policy(live(config), one_rank)
    assert errors_of(replaying, micros).max() < 1e-3
    move_routers(replaying)
    move_routers(routing)
    assert errors_of(replaying, micros).mean() < 0.7 * errors_of(routing, micros).mean()


@pytest.mark.parametrize("window", [None, 2, 100])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(("heads", "key_heads", "size"), [(14, 2, 64), (4, 4, 128), (4, 1, 256)])
@pytest.mark.parametrize("backend", ["varlen-bfloat16", "varlen-float16", "buckets-bfloat16", "buckets-float32"])
def test_attention_is_that_of_float64(
    backend: str, heads: int, key_heads: int, size: int, shared: bool, window: int | None, gpu: torch.device
) -> None:
    """Outputs and gradients of packed rows, against padded buckets in float64 on the CPU from the same inputs."""
    kind, _, dtype = backend.partition("-")
    layout, inputs = attention_case(heads, key_heads, size, shared, getattr(torch, dtype))
    results: list[list[torch.Tensor]] = []
    for device, precise in ((torch.device("cpu"), True), (gpu, False)):
        leaves = [(t.double() if precise else t).to(device).requires_grad_() for t in inputs[:3]]
        moved, (query, key, value) = moved_to(layout, device), leaves
        if precise or kind == "buckets":
            output = attend_in_buckets(query, key, value, moved, scaling=None, window=window)
        elif attention.has_varlen_kernel(query):
            output = attention.attend_varlen(query, key, value, moved.segments, scaling=None, window=window)
        else:
            pytest.skip(f"torch {torch.__version__} has no varlen_attn with windows for this GPU")
        output.backward(inputs[3].to(output))
        results.append([output.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)])
    tolerance = 1e-5 if dtype == "float32" else 1e-2
    for name, here, there in zip(("output", "query", "key", "value"), *results, strict=True):
        error = (there.double().cpu() - here).norm() / here.norm()
        assert error <= tolerance, f"{name}: {error:.2g}"


def attention_case(
    heads: int, key_heads: int, size: int, shared: bool, dtype: torch.dtype
) -> tuple[PackedLayout, list[torch.Tensor]]:
    """A row of 2 groups with prompts of 100 tokens in common, one sequence with common tokens only, and single
    tokens; query, key, value and the gradient of the output."""
    torch.manual_seed(0)
    sizes = np.array([300, 101, 511, 100, 1, 128, 640, 2])
    tokens, groups = np.arange(sizes.sum()), np.array([0, 0, 0, 0, 1, 2, 2, 3])
    for start in (np.cumsum(sizes) - sizes)[[0, 1, 2, 3, 5, 6]]:
        tokens[start : start + 100] = np.arange(100)
    layout = make_layout(sizes, find_firsts(tokens, sizes, groups) if shared else None)
    count = len(layout.computed)
    return layout, [torch.randn(count, n, size).to(dtype) for n in (heads, key_heads, key_heads, heads)]


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


@pytest.mark.parametrize("chunk_bytes", [1 << 20, 1 << 30])
def test_logprobs_and_gradients_of_bfloat16_states_are_those_of_float64(
    chunk_bytes: int, gpu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logprob_head, "CUDA_CHUNK_BYTES", chunk_bytes)
    torch.manual_seed(0)
    layer = torch.nn.Linear(512, 5000, bias=False, dtype=torch.bfloat16, device=gpu)
    hidden, targets = (10 * torch.randn(700, 512)).bfloat16(), torch.randint(5000, (700,))
    states = hidden.to(gpu).requires_grad_()
    logprobs, _ = LogprobHead(layer, 0.7)(states, targets.to(gpu))
    logprobs.square().sum().backward()
    exact_states, exact_weight = (t.detach().double().cpu().requires_grad_() for t in (hidden, layer.weight))
    exact = torch.log_softmax(exact_states @ exact_weight.t() / 0.7, dim=-1).gather(-1, targets.unsqueeze(-1))
    exact.square().sum().backward()
    torch.testing.assert_close(logprobs.double().cpu(), exact.squeeze(-1).detach(), atol=1e-5, rtol=1e-6)
    for there, here in ((states.grad, exact_states.grad), (layer.weight.grad, exact_weight.grad)):
        assert there is not None and here is not None
        assert (there.double().cpu() - here).norm() <= 5e-3 * here.norm()


MEMORY = [(dtype, checkpointing) for dtype in ("float32", "bfloat16") for checkpointing in (False, True)]


@pytest.fixture(scope="session")
def measured(pool: ThreadPoolExecutor, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, bool], Any]:
    """The peak of the memory of two steps by dtype and checkpointing, to come, and the configs."""
    from test_learner_memory import SIZES
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = SIZES | {
        "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8, "num_attention_heads": 16,
        "num_key_value_heads": 4, "vocab_size": 32000,
    }  # fmt: skip
    folder = tmp_path_factory.mktemp("larger")
    LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(folder)
    started: dict[tuple[str, bool], Any] = {}
    for dtype, checkpointing in MEMORY:
        # Two micro-batches: while the second one is computed, the gradients of the first are in memory.
        learner = {"tokens_per_microbatch": 4096, "gradient_checkpointing": checkpointing, "zero_stage": 2}
        sections = {"learner": learner, "generator": {"max_new_tokens": 250}, "replay": {"groups_per_step": 32}}
        config = make_config(folder, model={"dtype": dtype}, **sections)
        started[dtype, checkpointing] = config, pool.submit(run, "peak_memory.py", config.model_dump_json())
    return started


@pytest.mark.parametrize(("dtype", "checkpointing"), MEMORY)
def test_memory_is_what_the_arithmetic_says(
    dtype: str, checkpointing: bool, measured: dict[tuple[str, bool], Any], figure: Callable[[str, float], None]
) -> None:
    config, future = measured[dtype, checkpointing]
    shape = Shape.read(config.model.path)
    assert shape is not None
    parts = learner_parts(config, shape, reference=None, critic=None, sends=False)
    estimate = sum(parts.values()) - PROCESS_BYTES
    peak = int(future.result(timeout=250))
    terms = ", ".join(f"{name} {num_bytes >> 20}" for name, num_bytes in parts.items() if num_bytes >> 20)
    print(
        f"{dtype}, checkpointing {checkpointing}: measured {peak >> 20} MiB, predicted {estimate >> 20} MiB ({terms})"
    )
    figure(f"learner, {dtype}, checkpointing {checkpointing}: memory by arithmetic / measured", estimate / peak)
    assert 0.9 < estimate / peak < 1.1, parts
