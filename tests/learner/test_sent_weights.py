"""What several learner ranks send, or write to a store, is the model bit for bit in all ZeRO stages."""

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
from asyncrl.wire.messages import Announced
from benchmarks.families import save_family

FLOAT32 = [{"learner": {"zero_stage": stage}} for stage in range(4)]

LORA = [
    {"learner": {"zero_stage": stage, "lora": {"rank": 4}, "lr": 1e-2, "gradient_checkpointing": stage == 3}}
    for stage in (0, 2, 3)
]

BFLOAT16 = [{"learner": {"zero_stage": stage}, "model": {"dtype": "bfloat16"}} for stage in (1, 3)]

FILES = [section | {"weights": {"transport": "files"}} for section in (*FLOAT32, LORA[2], BFLOAT16[1])]

BUCKETS = [section | {"weights": {"staging": "buckets"}} for section in (FLOAT32[0], FLOAT32[3], *BFLOAT16)]


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("ranks", (1, 2, 3))
@pytest.mark.parametrize("family", ("qwen2", "mixtral"))
def test_the_slices_of_all_ranks_are_the_model(
    family: str, ranks: int, free_port: Callable[[], int], tmp_path: Path
) -> None:
    sections = [*FLOAT32, *LORA, *FILES, *BFLOAT16, *BUCKETS]
    (tmp_path / "cases.json").write_text(json.dumps({"ranks": ranks, "sections": sections}))
    model = save_family(family, tmp_path / "model")
    spawn("send_ranks.py", model, tmp_path, free_port(), ranks=ranks, timeout_s=220)
    compared = json.loads((tmp_path / "compared.json").read_text())
    assert len(compared) == len(sections) and min(compared) > 0
    assert compared[0] == 2 * compared[-1], "float32 has twice the bytes of bfloat16"


@pytest.mark.timeout(240)
def test_the_shares_of_two_ranks_are_the_model(
    tiny_model: Path, free_port: Callable[[], int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asyncrl.weights.version_store, "SUM_BYTES", 1024)  # as in run_two.py
    (tmp_path / "files").touch()
    spawn("run_two.py", tiny_model, tmp_path, free_port(), ranks=2, timeout_s=220)
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


def run(model: Path, out: Path, port: int) -> list[object]:
    spawn("experts_ranks.py", model, out, port, ranks=2, timeout_s=220)
    return [json.loads((out / f"found-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", ["qwen3_moe", pytest.param("mixtral", marks=pytest.mark.slow)])
def test_the_engine_has_the_learners_weights_after_each_step(
    name: str, free_port: Callable[[], int], tmp_path: Path
) -> None:
    first, second = run(save_family(name, tmp_path / "model"), tmp_path, free_port())
    assert first["compared"] == 9 and len(first["changed"]) == first["all"]  # type: ignore[index]
    assert first["changed"] == second["changed"]  # type: ignore[index]
