"""Two learner ranks with ZeRO stage 3 each write a share of the weights to a store."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from worlds import spawn

from asyncrl.wire.version_messages import Announced


@pytest.mark.timeout(240)
def test_the_shares_of_two_ranks_are_the_model(tiny_model: Path, free_port: Callable[[], int], tmp_path: Path) -> None:
    (tmp_path / "files").touch()
    codes = spawn("run_two.py", tiny_model, tmp_path, free_port(), ranks=2, timeout_s=220)
    assert codes == [0, 0], (tmp_path / "0.log").read_text()[-2000:] + (tmp_path / "1.log").read_text()[-2000:]
    announced = msgspec.json.decode((tmp_path / "announced").read_bytes(), type=Announced)
    assert announced.version == 3
    (version,) = (tmp_path / "weights").glob("v000002-*")
    files = sorted(version.glob("full-*.safetensors"))
    assert len(files) == 2
    stored = load_file(files[0]) | load_file(files[1])
    saved = load_file(tmp_path / "checkpoints" / "step-000002" / "model" / "model.safetensors")
    assert stored.keys() == saved.keys()
    assert all(torch.equal(weight, saved[name]) for name, weight in stored.items())
