"""The ceiling for weights, and seeds of engines."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from asyncrl.errors import ConfigError
from asyncrl.generator.start import engine_seed, max_weight_bytes


def test_the_ceiling_is_above_float32_whatever_the_precision_on_disk(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1000, 300, dtype=torch.bfloat16)}, tmp_path / "model-1.safetensors")
    save_file({"b": torch.zeros(7), "c": torch.zeros(())}, tmp_path / "model-2.safetensors", metadata={"format": "pt"})
    assert max_weight_bytes(str(tmp_path)) == int(300_008 * 4 * 1.25) + (1 << 20)


@pytest.mark.parametrize(
    "content", [b"", b"\x08", (1 << 60).to_bytes(8, "little"), b"\x02" + bytes(7) + b"{]", b"\x02" + bytes(7) + b"[]"]
)
def test_a_file_that_is_not_whole_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match=r"model.safetensors: not a whole safetensors file .* download the model"):
        max_weight_bytes(str(tmp_path))


def test_a_folder_without_weights_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no weights in .*safetensors"):
        max_weight_bytes(str(tmp_path))


def test_no_engine_draws_what_another_drew() -> None:
    seeds = {engine_seed(seed, index, start) for seed in range(3) for index in range(4) for start in range(5)}
    assert len(seeds) == 60
