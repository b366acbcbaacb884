"""Curves that are read from a growing file: in pieces as in one, with a bounded number of points."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from asyncrl.observe.curves import MAX_POINTS, RATE_POINTS, Curves

Rows = list[dict[str, float]]


def append(file: Path, rows: Rows, end: str = "") -> None:
    with file.open("a") as lines:
        lines.write("".join(json.dumps(row) + "\n" for row in rows) + end)


def make_rows(steps: int, first: int = 1) -> Rows:
    return [
        {"step": step, "reward/mean": float(step), "learner/tokens": 10.0, "time/elapsed_s": 0.5 * step}
        | ({"rare": step / 2} if step % 7 == 0 else {})
        for step in range(first, first + steps)
    ]


def curves_of(file: Path) -> Curves:
    return Curves(file, wanted=lambda name: name in ("reward/mean", "learner/tokens", "rare"))


@pytest.mark.parametrize("pieces", [[3001], [1, 999, 1, 2000], [700] * 4 + [201]])
def test_curves_read_in_pieces_are_means_of_equal_numbers_of_steps(tmp_path: Path, pieces: list[int]) -> None:
    file, first = tmp_path / "metrics.jsonl", 1
    curves = curves_of(file)
    assert not curves.read() and curves.line("reward/mean") == ([], [])
    for piece in pieces:
        append(file, make_rows(piece, first))
        first += piece
        assert curves.read()
    assert not curves.read(), "nothing has come"
    steps, rewards = curves.line("reward/mean")
    assert len(steps) <= MAX_POINTS and curves.bucket_steps == 4 and curves.num_steps == 3001
    assert (steps[:2], steps[-2:], rewards[:2], rewards[-1]) == ([4, 8], [3000, 3001], [2.5, 6.5], 3001.0)
    rare_steps, rare = curves.line("rare")
    assert (rare_steps[0], rare[0]) == (8, 3.5) and len(rare) == 3001 // 7
    rate_steps, rates = curves.line("tokens_per_s")
    assert set(rates) == {20.0} and rate_steps[-1] == 3001 and RATE_POINTS / 2 <= len(rates) < RATE_POINTS
    assert [row["step"] for row in curves.latest] == list(range(2982, 3002))
    first_tenth, last_tenth = curves.ends("reward/mean") or (0, 0)
    assert first_tenth == pytest.approx(np.arange(1, 301).mean()) and last_tenth == pytest.approx(2851, abs=4)


def test_a_file_that_was_replaced_or_cut_is_read_from_its_start(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    append(file, make_rows(5))
    curves = curves_of(file)
    curves.read()
    file.write_text("")
    append(file, make_rows(2))
    assert curves.read() and curves.line("reward/mean")[0] == [1, 2]
    append(tmp_path / "new", make_rows(9))
    (tmp_path / "new").rename(file)
    assert curves.read() and curves.num_steps == 9
    file.rename(tmp_path / "aside")
    assert curves.read() and not curves.read() and (curves.last_step, curves.line("reward/mean")) == (0, ([], []))
    append(file, make_rows(3))
    assert curves.read() and curves.num_steps == 3
    (tmp_path / "new").touch()
    (tmp_path / "new").rename(file)
    assert curves.read() and not curves.read() and curves.num_steps == 0
    append(file, make_rows(4))
    assert curves.read() and curves.num_steps == 4


def test_an_incomplete_line_waits_and_a_damaged_one_is_told(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    append(file, make_rows(2), '{"step": 3, "rew')
    curves = curves_of(file)
    curves.read()
    assert curves.num_steps == 2 and not curves.fault
    append(file, [], 'ard/mean": 1.0}\n[1]\n{"step": 5, "reward/mean": 1.0}\n')
    curves.read()
    assert curves.num_steps == 3 and "the line after 3 rows is not JSON" in curves.fault
    assert not curves.read()


def test_values_that_are_not_finite_and_rows_of_evaluations_are_no_points(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    append(file, [*make_rows(1), {"step": 2, "reward/mean": float("nan")}, {"step": 2, "eval/reward": 1.0}])
    curves = curves_of(file)
    curves.read()
    assert curves.line("reward/mean") == ([1], [1.0]) and curves.num_steps == 2
