"""Two ranks that share their sequences train as one rank does."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from sequence_ranks import PAIRS, RUNS, train
from transformers import LlamaConfig, LlamaForCausalLM
from worlds import make_config, make_groups, make_model, pack_groups, spawn

from asyncrl.learner.distributed import Ranks
from asyncrl.learner.model.attention import SequenceParallel
from tests.helpers.selection import selected_names, slow_except

QUICK = ("zero3", "critic", "masks")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models with 4 heads and 2 or 1 key-value heads, and one with 3 heads."""
    folder = tmp_path_factory.mktemp("models")
    make_model(folder / "even")
    for name, heads, key_heads in (("one-key-head", 4, 1), ("odd", 3, 3)):
        sizes: dict[str, Any] = {"vocab_size": 48, "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 1}
        torch.manual_seed(0)
        config = LlamaConfig(**sizes, num_attention_heads=heads, num_key_value_heads=key_heads)
        LlamaForCausalLM(config).save_pretrained(folder / name)
    return folder


def run(models: Path, out: Path, port: int, ranks: int, names: set[str]) -> Path:
    spawn("sequence_ranks.py", models, out, port, ranks=ranks, timeout_s=220, names=names)
    return out


@pytest.fixture(scope="module")
def two(
    models: Path,
    tmp_path_factory: pytest.TempPathFactory,
    free_port: Callable[[], int],
    request: pytest.FixtureRequest,
) -> Path:
    return run(models, tmp_path_factory.mktemp("two"), free_port(), 2, selected_names(request, "two"))


@pytest.fixture(scope="module")
def four(models: Path, tmp_path_factory: pytest.TempPathFactory, free_port: Callable[[], int]) -> Path:
    (models / "four").touch()
    try:
        return run(models, tmp_path_factory.mktemp("four"), free_port(), 4, set(PAIRS))
    finally:
        (models / "four").unlink()


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", slow_except(QUICK, RUNS))
def test_two_ranks_that_share_sequences_are_one_rank(name: str, two: Path, models: Path, one_rank: Ranks) -> None:
    compare(name, two, 2, models, one_rank)


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", PAIRS)
def test_two_pairs_of_ranks_are_one_rank(name: str, four: Path, models: Path, one_rank: Ranks) -> None:
    compare(name, four, 4, models, one_rank)


def compare(name: str, folder: Path, count: int, models: Path, one_rank: Ranks) -> None:
    weights, scalars = train(name, models, one_rank)
    found = [load_file(folder / f"{name}-{rank}.safetensors") for rank in range(count)]
    metrics = [json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in range(count)]
    assert found[0].keys() == weights.keys() and all(one == metrics[0] for one in metrics)
    bfloat16 = name == "bfloat16"
    for key, weight in weights.items():
        assert all(torch.equal(found[0][key], other[key]) for other in found)
        # Adam's first steps are nearly lr * sign(gradient), also of gradients that are rounding errors.
        near = (found[0][key] - weight).abs() < (5e-3 if bfloat16 else 1e-5)
        assert near.double().mean() > 0.99, key
    assert metrics[0].keys() == scalars.keys()
    for metric, value in scalars.items():
        tolerance = 0.05 if bfloat16 else 1e-4
        assert metrics[0][metric] == pytest.approx(value, rel=tolerance, abs=tolerance / 100), metric


def test_rows_are_odd_and_share_prompts(models: Path) -> None:
    """Else the test above would prove less."""
    layouts = [
        micro.layout
        for step in (1, 2, 3)
        for micro in pack_groups(make_config(models / "even"), make_groups(2, seed=step)).micro_batches
    ]
    counts = [len(layout.computed) for layout in layouts]
    assert {count % 2 for count in counts} == {0, 1}
    shared = [len(layout.twins) > len(layout.computed) for layout in layouts]
    assert any(shared)


def test_heads_that_cannot_be_divided_are_refused(two: Path) -> None:
    for rank in range(2):
        text = json.loads((two / f"odd-{rank}.json").read_text())
        assert text.startswith("learner.sequence_parallel = 2: model.path = ")
        assert "has 3 attention heads and 3 key-value heads; it must divide the former" in text


@pytest.mark.parametrize("count", [1, 2, 7, 8, 9])
def test_parts_have_each_token_once(count: int) -> None:
    tokens, places = torch.arange(count) + 100, torch.arange(count)
    found: list[int] = []
    for rank in range(4):
        ranks = SequenceParallel(rank, 4, None)  # pyright: ignore[reportArgumentType]
        part = ranks.part(tokens)
        assert len(part) == -(-count // 4)
        own, rows = ranks.own(places, count)
        assert torch.equal(part[rows], tokens[own])
        found += own.tolist()
    assert sorted(found) == list(range(count))
