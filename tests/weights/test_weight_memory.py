"""The memory that a transfer of weights takes in addition to the model, in every process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from memory_ranks import BUCKET_BYTES, STORED, VERSIONS
from transformers import AutoModelForCausalLM, Qwen2Config

from asyncrl.weights import deltas
from tests.helpers.sockets import socket_address

ROOT = Path(__file__).parents[2]
RANKS = 2
PYTHON_BYTES = {"whole": 4 << 20, "buckets": 2 << 20}
"""The memory of threads, sockets and the manifest."""
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
"""Without these, memory that was freed before hides what is taken."""


def save_model(folder: Path) -> str:
    """Writes a model of 100 million parameters in float32."""
    config = Qwen2Config(
        vocab_size=32_000, hidden_size=640, intermediate_size=2_560, num_hidden_layers=10, num_attention_heads=10,
        num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=False,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return str(folder)


def measure(way: str, tmp_path: Path, *, processes: int) -> list[dict[str, Any]]:
    """Returns what the learner ranks, and the generator if it is one of the processes, have measured."""
    model, address = save_model(tmp_path / "model"), socket_address("ranks")
    environment = os.environ | MALLOC | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    script = str(Path(__file__).with_name("memory_ranks.py"))
    running: list[subprocess.Popen[bytes]] = []
    for rank in range(processes):
        arguments = [sys.executable, script, *map(str, (rank, RANKS, address, model, tmp_path, way))]
        with open(tmp_path / f"{rank}.log", "w") as log:
            running.append(subprocess.Popen(arguments, env=environment, cwd=ROOT, stdout=log, stderr=log))
    try:
        for rank, process in enumerate(running):
            assert process.wait(280) == 0, (tmp_path / f"{rank}.log").read_text()[-2000:]
    finally:
        for process in running:
            process.kill()
    return [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(processes)]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("staging", ["whole", "buckets"])
def test_a_transfer_takes_a_copy_of_the_weights_or_two_buckets(
    staging: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = measure(staging, tmp_path, processes=RANKS + 1)
    weights_bytes = found[0]["weights_bytes"]
    share_bytes = weights_bytes // RANKS if staging == "whole" else 0
    rows = [(f"learner rank {rank}", found[rank]["extra_bytes"][0], share_bytes) for rank in range(RANKS)]
    names = ("generator", "its worker 0", "its worker 1")
    staged_bytes = weights_bytes if staging == "whole" else 0
    rows += [
        (name, num_bytes, staged_bytes) for name, num_bytes in zip(names, found[RANKS]["extra_bytes"], strict=False)
    ]
    assert len(rows) == RANKS + (1 if staging == "whole" else 3)
    with capsys.disabled():
        print(f"\n{staging}: {weights_bytes / 2**20:.1f} MiB, {VERSIONS} versions; MiB above what each had before:")
        for who, extra_bytes, limit_bytes in rows:
            print(f"{who:15} {extra_bytes / 2**20:7.1f}   of {limit_bytes / 2**20:7.1f} and two buckets, 16.0")
    assert found[0]["sent"] == VERSIONS
    for who, extra_bytes, limit_bytes in rows:
        assert extra_bytes <= limit_bytes + 2 * BUCKET_BYTES + PYTHON_BYTES[staging], who
        assert extra_bytes >= 0.9 * limit_bytes, f"{who}: nothing was measured"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_to_write_a_version_takes_a_ranks_slices_and_the_base_of_its_deltas(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = measure("files", tmp_path, processes=RANKS)
    for dtype, bases in (("float32", 0), ("bfloat16", 1)):
        weights_bytes = found[0][dtype]["weights_bytes"]
        limit_bytes = weights_bytes * (1 + bases) // RANKS
        most_bytes = [one[dtype]["extra_bytes"][0] for one in found]
        with capsys.disabled():
            print(f"\n{dtype}: {weights_bytes / 2**20:.1f} MiB, {STORED[dtype]} versions; MiB above before:")
            for rank, extra_bytes in enumerate(most_bytes):
                print(f"learner rank {rank}  {extra_bytes / 2**20:7.1f}   of {limit_bytes / 2**20:7.1f}")
        assert found[0][dtype]["sent"] == STORED[dtype]
        assert any((tmp_path / dtype).rglob("delta-*.bin")) == (bases > 0)
        compared_bytes = deltas.BLOCK_WORDS * 5 // 4 if bases else 0  # a mask of a block, and its changes
        assert max(most_bytes) <= limit_bytes + compared_bytes + PYTHON_BYTES["whole"]
        assert min(most_bytes) >= 0.9 * limit_bytes, "nothing was measured"
