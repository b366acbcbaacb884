"""The slices that several learner ranks send are the model bit for bit in all ZeRO stages."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from worlds import spawn

from benchmarks.families import save_family

SECTIONS = [
    *({"learner": {"zero_stage": stage}} for stage in range(4)),
    *(
        {"learner": {"zero_stage": stage, "lora": {"rank": 4}, "lr": 1e-2, "gradient_checkpointing": stage == 3}}
        for stage in (0, 2, 3)
    ),
    *({"learner": {"zero_stage": stage}, "model": {"dtype": "bfloat16"}} for stage in (1, 3)),
]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("ranks", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", ["qwen2", pytest.param("mixtral", marks=pytest.mark.slow)])
def test_the_slices_of_all_ranks_are_the_model(
    family: str, ranks: int, free_port: Callable[[], int], tmp_path: Path
) -> None:
    (tmp_path / "cases.json").write_text(json.dumps({"ranks": ranks, "sections": SECTIONS}))
    model = save_family(family, tmp_path / "model")
    spawn("send_ranks.py", model, tmp_path, free_port(), ranks=ranks, timeout_s=220)
    compared = json.loads((tmp_path / "compared.json").read_text())
    assert len(compared) == len(SECTIONS) and min(compared) > 0
