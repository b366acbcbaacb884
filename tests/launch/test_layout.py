"""`asyncrl plan --model PATH --gpus 8xH100-80`: what it finds fits by the launcher's arithmetic, what it writes can
be launched, and what it refuses has a reason. Nothing is measured on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_memory import LLAMA_8B, QWEN2_15B, fitted, shape_of

from asyncrl.config.load import load_config
from asyncrl.launch import machine as gpus
from asyncrl.launch.gpu_layout import (
    CARDS,
    LEAST_SEQUENCES,
    LOWERED_BY,
    GpuModel,
    decode_s,
    parse_cards,
    search,
)
from asyncrl.launch.memory import GIB, Models, needs_of_gpus
from tests.helpers.cli import asyncrl

LLAMA_70B = LLAMA_8B | {
    "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
}  # fmt: skip
EXPERTS_30B = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "moe_intermediate_size": 768, "num_hidden_layers": 48,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
    "vocab_size": 151936, "max_position_embeddings": 40960, "intermediate_size": 6144,
}  # fmt: skip


@pytest.fixture(autouse=True)
def torch_for_gpus_without_nvidia_smi(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "torch_is_cpu_build", lambda: False)


def plan(*arguments: str) -> tuple[int, str]:
    """Returns exit code and output."""
    return asyncrl("plan", *arguments)


@pytest.mark.parametrize(
    ("settings", "cards", "offload", "parallel"),
    [
        (QWEN2_15B, "2xRTX4090-24", "optimizer", 1),
        pytest.param(EXPERTS_30B, "8xH200-141", "none", 2, marks=pytest.mark.slow),
        pytest.param(LLAMA_70B, "8xH100-80", "optimizer", 4, marks=pytest.mark.slow),
    ],
)
def test_what_it_writes_fits_by_the_launchers_arithmetic(
    settings: dict[str, object],
    cards: str,
    offload: str,
    parallel: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shape = shape_of(settings)
    out = tmp_path / "plan.yaml"
    code, output = plan("--model", shape.folder, "--gpus", cards, "--out", str(out))
    print(output)
    assert code == 0, output
    assert f"asyncrl launch --config {out} data.train=FILE" in output
    config = load_config(out, ["data.train=train.parquet"])
    assert config.model.path == shape.folder
    assert (config.learner.offload, config.generator.tensor_parallel) == (offload, parallel)
    count, _, card = parse_cards(cards)
    assert config.launch.learners + parallel * config.launch.generators <= count
    assert config.launch.start_timeout_s >= 1200, "engines on GPUs compile for minutes"
    models = Models(shape)
    placement = fitted(monkeypatch, config, count, round(card.memory_bytes) >> 20, models)
    for used in needs_of_gpus(config, placement, models):
        assert not used.missing_bytes, str(used)
    sums = [sum(need.num_bytes for need in used.needs) / GIB for used in needs_of_gpus(config, placement, models)]
    assert f"{sums[0]:.1f} of" in output, "the output has the sum of learner rank 0"


@pytest.mark.slow
def test_it_prefers_speed_among_what_needs_no_offload() -> None:
    models = Models(shape_of(QWEN2_15B))
    base = load_config(None, {"model.path": "m", "data.train": "d", "model.dtype": "bfloat16",
                              "generator.max_new_tokens": 4096})  # fmt: skip
    eight, _ = search(base, models, 8, CARDS["H100-80"])
    assert eight is not None
    launch, learner = eight.config.launch, eight.config.learner
    assert learner.offload == "none" and eight.config.generator.tensor_parallel == 1
    assert launch.learners + launch.generators == 8 and min(launch.learners, launch.generators) >= 2
    assert eight.generator.sequences >= LEAST_SEQUENCES
    assert eight.config.replay.groups_per_step % launch.learners == 0
    slow, _ = search(base, models, 8, GpuModel(memory_bytes=CARDS["H100-80"].memory_bytes, flops=1e14))
    assert slow is not None and slow.config.launch.learners > launch.learners, "cards that compute slowly need learners"
    assert slow.tokens_per_s < eight.tokens_per_s


def test_without_a_layout_it_names_the_nearest_and_what_lowers_it() -> None:
    code, output = plan("--model", shape_of(LLAMA_8B).folder, "--gpus", "2xRTX4090-24")
    assert code == 2
    assert "--gpus 2xRTX4090-24: no layout is estimated to fit. The nearest:" in output
    assert (
        "a generator on 1 card: 51.8 of" in output
        and "; lower: a smaller generator.engine_options.max_model_len" in output
    )
    assert "1 learner rank, ZeRO 2, checkpointed, offload optimizer" in output and "GiB, of which" in output


def test_a_base_config_keeps_its_other_keys_and_passes_preflight(
    demo_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rich.console import Console

    from asyncrl.launch.checks import check_inputs

    monkeypatch.chdir(demo_folder)
    out = tmp_path / "plan.yaml"
    code, output = plan("--model", "demo/model", "--gpus", "2xMINE:8G", "--config", "demo", "--out", str(out))
    assert code == 0, output
    config, base = load_config(out), load_config("demo")
    assert output.strip().endswith(f"asyncrl launch --config {out}")
    assert config.learner.lr == base.learner.lr and config.steps == base.steps
    assert config.generator.max_new_tokens == base.generator.max_new_tokens
    assert check_inputs(config, Console(quiet=True)).rows
    _, longer = plan("--model", "demo/model", "--gpus", "2xMINE:8G", "--config", "demo", "--tokens", "64")
    assert "max_model_len: 64" in longer and "lr: 0.0002" in longer


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--gpus", "8xH100-81"], "no card H100-81; did you mean H100-80?"),
        (["--gpus", "H100-80"], "--gpus H100-80: expected 8xH100-80"),
        (["--gpus", "1xH100-80"], "must be from 2 to"),
        (["--gpus", "2xMINE:12"], "at least 1G"),
        ([], "--gpus: is missing"),
    ],
)
def test_wrong_cards_are_refused(arguments: list[str], told: str) -> None:
    code, output = plan("--model", shape_of(QWEN2_15B).folder, *arguments)
    assert code == 2 and told in output


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    code, output = plan("--model", str(tmp_path), "--gpus", "8xH100-80")
    assert code == 2 and "is no folder with a config.json" in output
    (tmp_path / "config.json").write_text('{"model_type": "unheard-of", "hidden_size": 8}')
    code, output = plan("--model", str(tmp_path), "--gpus", "8xH100-80")
    assert code == 2 and "config.json cannot be read" in output


def test_cards_have_the_memory_that_is_given() -> None:
    assert parse_cards("4xMINE:48G")[2].memory_bytes == 48 << 30
    assert parse_cards("4xH200-141:100G")[2].memory_bytes_per_s == CARDS["H200-141"].memory_bytes_per_s
    assert all(abs(card.memory_bytes / 2**30 - int(name.split("-")[1])) < 10 for name, card in CARDS.items())


def test_every_key_that_is_advised_exists() -> None:
    from asyncrl.config.load import config_keys as keys

    known = set(keys())
    for ways in LOWERED_BY.values():
        named = {word.split("=")[0].rstrip(",") for word in ways.split() if "." in word}
        assert named and all(any(name == key or name.startswith(f"{key}.") for key in known) for name in named), ways


def test_steps_of_many_sequences_of_a_small_model_take_the_time_of_the_engines_thread() -> None:
    gpu, small = GpuModel(), shape_of(QWEN2_15B)
    few, many = (decode_s(small, gpu, tp=1, sequences=sequences, context_tokens=10) for sequences in (64, 2048))
    assert few > 64 * gpu.host_sequence_s and many == 2048 * gpu.host_sequence_s
