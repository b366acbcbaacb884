"""Figures of a GPU: what a step costs, how fast weights are packed, what the shapes of a step cost in attention."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from generator_model import run_all, small_config, weights_of
from large_steps import CASES, HALF_B
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from transformers import Qwen2Config, Qwen2ForCausalLM

from asyncrl.generator.engine import ENGINES, make_engine
from asyncrl.launch.machine import find_port
from asyncrl.learner.model.logprob_head import LogprobHead
from asyncrl.weights.buffers import WeightBuffer
from asyncrl.weights.layout import WeightManifest

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(200)]

Record = Callable[[str, float], None]


def ms_of(work: Callable[[], object], rounds: int = 5) -> float:
    """The median time of `work` on the GPU in milliseconds, after one that is not counted."""
    work()
    times = list[float]()
    for _ in range(rounds):
        started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        started.record()
        work()
        ended.record()
        torch.cuda.synchronize()
        times.append(started.elapsed_time(ended))
    return float(np.median(times))


@pytest.mark.parametrize("case", CASES)
def test_a_step_of_a_model_of_usual_size(case: str, tmp_path: Path, figure: Record) -> None:
    script = Path(__file__).with_name("large_steps.py")
    command = [sys.executable, str(script), str(find_port()), str(tmp_path), case]
    done = subprocess.run(command, env=os.environ, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.strip().splitlines()[-1])
    figure(f"learner {case}: trained tokens/s", found["tokens_per_s"])
    figure(f"learner {case}: first step, s", found["first_step_s"])
    figure(f"learner {case}: memory, GiB", found["peak_bytes"] / 2**30)
    figure(f"learner {case}: memory by arithmetic / measured", found["arithmetic_bytes"] / found["peak_bytes"])
    if found["mfu"] is not None:
        figure(f"learner {case}: of the card's peak FLOP/s", found["mfu"])
    assert np.isfinite(found["loss"])
    assert 0.9 < found["arithmetic_bytes"] / found["peak_bytes"] < 1.1


def test_the_head_reads_large_chunks_faster(gpu: torch.device, figure: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, hidden, vocabulary = 8192, 1536, 151936
    layer = torch.nn.Linear(hidden, vocabulary, bias=False, device=gpu, dtype=torch.bfloat16)
    states = torch.randn(tokens, hidden, device=gpu, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(vocabulary, (tokens,), device=gpu)

    def work() -> None:
        logprobs, _ = LogprobHead(layer, 1.0)(states, targets)
        logprobs.sum().backward()

    found = dict[int, float]()
    for chunk_bytes in (128 << 20, 1 << 30):
        monkeypatch.setattr("asyncrl.learner.model.logprob_head.CUDA_CHUNK_BYTES", chunk_bytes)
        found[chunk_bytes] = ms_of(work)
        figure(f"head, 8,192 tokens, chunks of {chunk_bytes >> 20} MiB: ms", found[chunk_bytes])
    assert found[1 << 30] < 1.1 * found[128 << 20]


def test_weights_are_packed_at_the_speed_of_copies(gpu: torch.device, figure: Record) -> None:
    weights = [
        (f"layer{n}", torch.randn(2048, size, device=gpu, dtype=torch.bfloat16))
        for n, size in enumerate([2048, 256, 8192] * 20)
    ]
    num_bytes = sum(tensor.nbytes for _, tensor in weights)
    manifest = WeightManifest.of((name, tensor.dtype, tuple(tensor.shape)) for name, tensor in weights)
    for name, device in (("on the card", gpu), ("to host memory", torch.device("cpu"))):
        buffer = WeightBuffer(manifest, device, pinned=True, bucket_bytes=64 << 20)

        def fill(buffer: WeightBuffer = buffer) -> None:
            buffer.clear()
            buffer.fill(iter(weights))

        ms = ms_of(fill)
        figure(f"weights packed {name}: GB/s", num_bytes / ms / 1e6)
        target = torch.empty(num_bytes, dtype=torch.uint8, device=device, pin_memory=device.type == "cpu")
        source = torch.empty(num_bytes, dtype=torch.uint8, device=gpu)
        copy_ms = ms_of(lambda target=target, source=source: target.copy_(source, non_blocking=True))
        figure(f"weights packed {name}: of one copy's speed", copy_ms / ms)


def fresh_shapes() -> Iterator[list[torch.Tensor]]:
    """Queries, keys and values of a size that was not there before, as every micro-batch has."""
    for number in range(6):
        length = 1000 + 37 * number
        yield [
            torch.randn(4, 16, length, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
        ]


def test_attention_of_fresh_shapes_by_backend(figure: Record) -> None:
    """cuDNN makes a plan for each shape; the learner must not use it."""
    chosen: dict[str, AbstractContextManager[Any]] = {
        "cuDNN": sdpa_kernel(SDPBackend.CUDNN_ATTENTION),
        "flash": sdpa_kernel(SDPBackend.FLASH_ATTENTION),
        "torch's own choice": nullcontext(),
    }
    found = dict[str, float]()
    for name, context in chosen.items():
        times = list[float]()
        with context:
            for query, key, value in fresh_shapes():
                torch.cuda.synchronize()
                started = time.perf_counter()
                scaled_dot_product_attention(query, key, value, is_causal=True).sum().backward()
                torch.cuda.synchronize()
                times.append((time.perf_counter() - started) * 1e3)
        found[name] = float(np.median(times[1:]))
        figure(f"attention, forward and backward of a fresh shape, {name}: ms", found[name])
    assert found["flash"] < found["cuDNN"]


@pytest.mark.parametrize("name", ENGINES)
def test_tokens_per_second_of_a_model_of_usual_size(
    tmp_path: Path, gpu: torch.device, name: str, figure: Record
) -> None:
    """256 completions of 256 tokens of a random model of 0.5B, and a swap of its weights."""
    if name == "vllm" and importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    with gpu:
        model = Qwen2ForCausalLM(Qwen2Config(**HALF_B, dtype=torch.bfloat16))
    model.save_pretrained(tmp_path)
    weights = weights_of(model)
    overrides = {"generator__group_size": 8, "generator__max_running_groups": 32, "generator__max_new_tokens": 256}
    options = {"max_model_len": 1024}
    config = small_config(
        str(tmp_path),
        **overrides,
        model__dtype="bfloat16",
        generator__engine=name,
        generator__engine_options=options,
        generator__kv_cache_bytes=4 << 30,
    )
    engine = make_engine(config, seed=1)
    try:
        swap_ms = [engine.swap(version, weights) for version in range(3)][-1]
        torch.cuda.synchronize()
        seconds: list[float] = []
        for _ in range(2):
            for index in range(256):
                engine.add(str(index), [3 + (7 * index + 5 * place) % 1000 for place in range(64)])
            started = time.perf_counter()
            done = run_all(engine)
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - started)
    finally:
        engine.close()
    tokens = sum(len(completion.tokens) for completion in done.values())
    figure(f"{name} 0.5B, 256 sequences: sampled tokens/s", tokens / seconds[-1])
    figure(f"{name} 0.5B: swap, ms", swap_ms)
    assert all(np.all(completion.versions == 2) for completion in done.values())
