"""Two learner ranks with ZeRO stage 3 each write their slices of the weights to a store."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from worlds import spawn

import asyncrl.weights.version_store
from asyncrl.weights.layout import WeightManifest
from asyncrl.weights.version_store import Folder, Reader, manifest_key
from asyncrl.wire.version_messages import Announced


@pytest.mark.timeout(240)
def test_the_shares_of_two_ranks_are_the_model(
    tiny_model: Path, free_port: Callable[[], int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asyncrl.weights.version_store, "SUM_BYTES", 1024)  # as in run_two.py
    (tmp_path / "files").touch()
    codes = spawn("run_two.py", tiny_model, tmp_path, free_port(), ranks=2, timeout_s=220)
    assert codes == [0, 0], (tmp_path / "0.log").read_text()[-2000:] + (tmp_path / "1.log").read_text()[-2000:]
    announced = msgspec.json.decode((tmp_path / "announced").read_bytes(), type=Announced)
    assert announced.version == 3
    (version,) = (tmp_path / "weights").glob("v000002-*")
    assert len(list(version.glob("full-*.safetensors"))) == 2
    manifest = (version / "manifest.json").read_bytes()
    layout = WeightManifest.from_json(json.loads(manifest)["manifest"]["layout"])
    reader = Reader(Folder(str(version.parent)), layout, np.empty(layout.num_bytes, np.uint8), key=manifest_key("test"))
    reader.fetch(Announced(2, version.name, hashlib.sha256(manifest).hexdigest()), lambda: None)
    stored = dict(layout.views(torch.from_numpy(reader._weights)))
    saved = load_file(tmp_path / "checkpoints" / "step-000002" / "model" / "model.safetensors")
    assert stored.keys() == saved.keys()
    assert all(torch.equal(weight, saved[name]) for name, weight in stored.items())
