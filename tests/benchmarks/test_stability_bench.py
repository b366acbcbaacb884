"""The benchmark of stability: its cells, its tables."""

from __future__ import annotations

from benchmarks.stability import (
    AS_SHIPPED,
    CANDIDATES,
    ON_POLICY,
    Result,
    cells,
    presets,
    table,
    table_of_presets,
)


def result(
    candidate: str, staleness: int, seed: int = 0, *, end: float = 0.6, best: float = 0.6, task: str = "demo"
) -> Result:
    return Result(task, candidate, staleness, seed, end, best, area=end / 2, divergence=0.0123, ess=0.5, seconds=1.0)


def test_staleness_0_is_trained_once_for_each_number_of_updates() -> None:
    found = list(cells(["demo"], list(CANDIDATES), [0, 2], 2))
    assert {cell.candidate for cell in found if cell.staleness == 0} == set(ON_POLICY.values())
    assert {cell.candidate for cell in found if cell.staleness == 2} == set(CANDIDATES)
    assert [cell.seed for cell in found] == sorted(cell.seed for cell in found), "a seed is complete before the next"


def test_presets_are_trained_at_their_own_limits() -> None:
    found = {cell.task: cell.staleness for cell in presets(1)}
    assert (found["demo"], found["guess"], found["grpo"]) == (2, 2, 4)


def test_tables_name_the_runs_that_collapsed() -> None:
    results = [
        result("decoupled_ppo", 0), result("decoupled_ppo", 2, end=0.1), result("ppo_clip", 2, end=0.5),
        result("ppo_clip", 2, 1, end=0.7, best=0.7), result(AS_SHIPPED, 4, task="grpo"),
    ]  # fmt: skip
    assert list(table(results, task="demo")) == [
        "| demo | staleness 0 | staleness 2 |",
        "|---|---|---|",
        "| decoupled_ppo | 0.60 (1.00), 0.012, 0.50 | 0.10 (0.17), 0.012, 0.50, **1 of 1** |",
        "| ppo_clip |  | 0.60 (0.83), 0.012, 0.50 |",
    ]
    assert list(table_of_presets(results))[1:] == ["| `grpo` | 4 | 0.60, 0.012, 0.50 |"]
