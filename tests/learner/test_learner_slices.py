"""The slices that several learner ranks send are the model, bit for bit, in all ZeRO stages."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from worlds import spawn

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
    codes = spawn("send_ranks.py", model, tmp_path, free_port(), ranks=ranks, timeout_s=220)
    assert codes == [0] * ranks, "".join((tmp_path / f"{rank}.log").read_text()[-2000:] for rank in range(ranks))
    compared = json.loads((tmp_path / "compared.json").read_text())
    assert len(compared) == len(sections) and min(compared) > 0
    assert compared[0] == 2 * compared[-1], "float32 has twice the bytes of bfloat16"
