"""Mixture-of-experts models train with ZeRO stage 3 on two ranks, and the engine has their weights after each send."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from worlds import spawn

from benchmarks.families import save_family


def run(model: Path, out: Path, port: int) -> list[object]:
    codes = spawn("experts_ranks.py", model, out, port, ranks=2, timeout_s=220)
    assert codes == [0, 0], "".join((out / f"{rank}.log").read_text()[-2000:] for rank in range(2))
    return [json.loads((out / f"found-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", ["qwen3_moe", pytest.param("mixtral", marks=pytest.mark.slow)])
def test_the_engine_has_the_learners_weights_after_each_step(
    name: str, free_port: Callable[[], int], tmp_path: Path
) -> None:
    first, second = run(save_family(name, tmp_path / "model"), tmp_path, free_port())
    assert first["compared"] == 9 and len(first["changed"]) == first["all"]  # type: ignore[index]
    assert first["changed"] == second["changed"]  # type: ignore[index]


@pytest.mark.timeout(240)
def test_ranks_whose_tokens_visit_other_experts_do_not_wait_for_each_other(
    tiny_model: Path, free_port: Callable[[], int], tmp_path: Path
) -> None:
    (tmp_path / "apart").symlink_to(tiny_model)
    assert run(tmp_path / "apart", tmp_path, free_port()) == [3, 3]
