"""Generator and learner on one GPU in turn: memory that each of them frees, and a complete run."""

from __future__ import annotations

import gc
import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from generator_model import reference_logprobs, run_all, save_tiny_model, small_config, weights_of
from receive import digest_of
from transformers import Qwen2Config, Qwen2ForCausalLM
from weight_parts import manifest_of, weights
from worlds import VOCABULARY, make_config, make_trainer, train_steps

from asyncrl.colocate import HostMemory
from asyncrl.generator.engine import ENGINES, make_engine
from asyncrl.launch.machine import find_port, visible_gpus
from asyncrl.learner.distributed import Ranks
from asyncrl.learner.model.saving import collect_state
from asyncrl.weights.sender import WeightSender
from tests.helpers.demo import make_demo
from tests.helpers.runs import Launched, check_ledger, start_launch

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

STEPS = 40
TOLERANCE = 0.01
ROUNDS = 20
"""Turns over which no memory may be lost."""


def skip_without(engine: str) -> None:
    if engine == "vllm" and importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")


def used_bytes() -> int:
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free


@pytest.mark.parametrize("name", ENGINES)
def test_a_sleeping_engine_frees_its_memory_and_loses_no_token(
    name: str, gpu: torch.device, tmp_path: Path, figure: Callable[[str, float], None]
) -> None:
    skip_without(name)
    save_tiny_model(tmp_path)
    policy = Qwen2ForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval().requires_grad_(False)
    cache_bytes = 2 << 30
    options = {"launch.colocate": "force", "generator.kv_cache_bytes": cache_bytes, "generator.engine": name}
    if name == "transformers":  # its cache is no larger than all sequences can fill
        options |= {"generator.group_size": 128, "generator.max_running_groups": 128}
    before = used_bytes()
    engine = make_engine(small_config(str(tmp_path), **options), seed=1)
    assert used_bytes() - before > 0.9 * cache_bytes
    try:
        engine.swap(0, weights_of(policy))
        prompts = {str(index): [3 + index, 9, 4, 17] for index in range(8)}
        for key, prompt in prompts.items():
            engine.add(key, prompt)
        done = {one.key: one for _ in range(4) for one in engine.step()}
        asleep: list[int] = []
        for version in range(1, ROUNDS + 1):
            awake = used_bytes()
            engine.sleep(2)
            asleep.append(used_bytes())
            assert awake - asleep[-1] > 0.9 * cache_bytes
            engine.wake("weights")
            engine.swap(version, weights_of(policy))
            engine.wake("cache")
        figure(f"colocated, {name}: GiB freed by sleep", (awake - asleep[-1]) / (1 << 30))
        assert asleep[-1] - asleep[1] < 64 << 20, "memory is lost in each turn"
        done |= run_all(engine)
        for key, one in done.items():
            expected = reference_logprobs(policy, prompts[key], one.tokens, 1.0)
            assert float(np.abs(one.logprobs - expected).max()) < TOLERANCE
        assert done.keys() == prompts.keys()
        assert {version for one in done.values() for version in one.versions.tolist()} == {0, ROUNDS}
    finally:
        engine.close()


@pytest.fixture(scope="module")
def larger_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose states are large next to the workspaces of CUDA's libraries."""
    folder = tmp_path_factory.mktemp("larger")
    sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 1024, "intermediate_size": 4096}
    sizes |= {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 8}
    Qwen2ForCausalLM(Qwen2Config(**sizes)).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_the_states_of_a_learner_leave_the_card(stage: int, one_rank: Ranks, larger_model: Path) -> None:
    sections = {"learner": {"zero_stage": stage}, "model": {"dtype": "bfloat16"}, "steps": 4}
    gc.collect()
    others = torch.cuda.memory_allocated()
    trainer = make_trainer(make_config(larger_model, **sections), one_rank)
    memory = HostMemory(one_rank.device)
    for step in (1, 2, 3):
        train_steps(trainer, (step,))
        expected = {name: tensor.cpu() for name, tensor in collect_state(trainer.policy).items()}
        before = torch.cuda.memory_allocated() - others
        assert memory.offload(trainer.tensors()) > 0.9 * before
        assert torch.cuda.memory_allocated() - others < 0.1 * before
        assert torch.cuda.memory_reserved() - others < 0.2 * before, "the memory is kept for this process"
        memory.reload()
        found = collect_state(trainer.policy)
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(found[name].cpu(), tensor), f"{name} is not as it was"


def test_versions_go_from_one_process_to_another_on_the_card(
    gpu: torch.device, monkeypatch: pytest.MonkeyPatch, cleanup: list, figure: Callable[[str, float], None]
) -> None:
    names = [one.name for one in visible_gpus()]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", names[0])  # as the launcher names it to both
    port = find_port()
    sender = WeightSender(
        f"tcp://127.0.0.1:{port}", manifest_of(weights(0)), expected_generators=1, transport="ipc",
        bucket_bytes=1 << 20, timeout_s=60.0, device=str(gpu), copies=False,
    )  # fmt: skip
    cleanup.append(sender.close)
    used: list[int] = []

    def has_joined(former: set[bytes]) -> bool:
        return any(peer.up and peer.id not in former for peer in members.present())

    members = sender._membership
    for start in range(2):  # the second receiver follows one that was killed
        former = {peer.id for peer in members.present()}
        command = [sys.executable, str(Path(__file__).with_name("receive.py")), str(port), "ipc", str(ROUNDS + 1)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        cleanup += [process.wait, process.kill]
        assert members._await(partial(has_joined, former), 60.0)
        for version in range(start * ROUNDS, (start + 1) * ROUNDS):
            tensors = [(name, tensor.to(gpu)) for name, tensor in weights(version)]
            began_s = time.monotonic()
            sender.send(version, tensors)
            sender.copied()
            figure("ipc, 4 MB: ms a round", 1e3 * (time.monotonic() - began_s))
            assert process.stdout is not None
            told = json.loads(process.stdout.readline())
            assert (told["version"], told["devices"]) == (version, ["cuda"])
            assert told["digest"] == digest_of(tensors), "not bit for bit"
            used.append(used_bytes())
        assert used[-1] - used[start * ROUNDS + 1] < 16 << 20, "memory is lost in each round"
        process.kill()
        process.wait()
    assert used[-1] - used[ROUNDS - 1] < 16 << 20, "memory of the killed receiver is lost"


@pytest.mark.parametrize("transport", ["auto", "ipc"])
@pytest.mark.parametrize("engine", ["transformers", "vllm"])
def test_the_demo_trains_on_one_gpu_in_turn(
    engine: str,
    transport: str,
    tmp_path: Path,
    started: list[Launched],
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    figure: Callable[[str, float], None],
) -> None:
    skip_without(engine)
    names = [gpu.name for gpu in visible_gpus()][:1]
    if not names:
        pytest.skip("needs a GPU")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", names[0])
    assert request.config.cache is not None
    folder = make_demo(tmp_path, request.config.cache)
    overrides = ["--steps", str(STEPS), "launch.start_timeout_s=400", f"generator.engine={engine}"]
    overrides += [f"weights.transport={transport}"]
    overrides += ["launch.colocate=on" if engine == "transformers" else "launch.colocate=force"]
    run = start_launch(folder, "turns", *overrides, preloaded=None)
    started.append(run)
    code, output = run.end(timeout_s=550)
    assert code == 0, output
    summary = json.loads((run.run_dir / "summary.json").read_text())
    assert summary["policy_version"] == STEPS and summary["reward_last"] > summary["reward_first"]
    check_ledger(summary)
    rows = run.rows()
    for phase in ("wait", "reload", "offload", "hand_over"):
        mean_s = float(np.mean([row[f"card/{phase}_s"] for row in rows]))
        figure(f"colocated demo, {engine}, {transport}: card/{phase}_s, mean", mean_s)
