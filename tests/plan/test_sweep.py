"""The cells of a sweep, which run once, their results with confidence, and the report."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from rich.console import Console

from asyncrl.errors import ConfigError, DataError
from asyncrl.plan.sweep import (
    Cell,
    Sweep,
    parse_limits,
    read_results,
    recommend,
    run_cells,
    status_of,
)
from tests.helpers.replay import small_config
from tests.plan.made_runs import make_run


class MadeRuns:
    """A fake of `asyncrl launch` that writes the folder of a run, or fails on request."""

    def __init__(self, codes: Sequence[int] = ()) -> None:
        self.codes = list(codes)
        self.names: list[str] = []

    def __call__(self, arguments: Sequence[str], log: Path) -> int:
        log.write_text("said")
        name, limit = arguments[arguments.index("--run") + 1], int(arguments[arguments.index("--max-staleness") + 1])
        self.names.append(name)
        code = self.codes.pop(0) if self.codes else 0
        if not code:
            seed = int(name.rpartition("seed")[2])
            folder = make_run(Path("runs") / name, rewards=0.5 + 0.1 * limit + 0.01 * seed, tokens_per_s=100.0 + limit,
                              goodput={"total": 0.25 + 0.1 * limit + 0.02 * seed})  # fmt: skip
            values = small_config(
                run=name, seed=seed, replay__max_staleness=limit, steps=5, resume="auto", rewards="exact"
            )
            (folder / "config.yaml").write_text(values.to_yaml())
        return code


@pytest.fixture
def sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sweep:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.yaml").write_text(small_config(steps=5).to_yaml())
    return Sweep("try", "my.yaml", {}, (), (0, 2), 2)


def quiet() -> Console:
    return Console(file=io.StringIO(), width=200)


def test_cells_run_seed_by_seed_and_only_once(sweep: Sweep) -> None:
    first = MadeRuns()
    assert run_cells(sweep, quiet(), first) == ([], False)
    assert first.names == ["try-s0-seed0", "try-s2-seed0", "try-s0-seed1", "try-s2-seed1"]
    again = MadeRuns()
    assert run_cells(sweep, quiet(), again) == ([], False)
    assert again.names == []


def test_only_the_owner_can_enter_the_folder_of_a_sweep(sweep: Sweep) -> None:
    before = os.umask(0)
    try:
        run_cells(sweep, quiet(), MadeRuns())
    finally:
        os.umask(before)
    assert stat.S_IMODE(sweep.folder.stat().st_mode) == 0o700


def test_an_interrupted_sweep_resumes(sweep: Sweep) -> None:
    first = MadeRuns([0, 130])
    assert run_cells(sweep, quiet(), first) == ([], True)
    second = MadeRuns()
    assert run_cells(sweep, quiet(), second) == ([], False)
    assert second.names == ["try-s2-seed0", "try-s0-seed1", "try-s2-seed1"]


def test_what_a_cell_chose_for_auto_and_epochs_is_no_other_setting(sweep: Sweep) -> None:
    run_cells(sweep, quiet(), MadeRuns())
    values = yaml.safe_load(Path("my.yaml").read_text())
    del values["steps"], values["rewards"]
    Path("my.yaml").write_text(yaml.safe_dump(values | {"epochs": 2.0}))
    again = MadeRuns()
    assert run_cells(sweep, quiet(), again) == ([], False) and again.names == []


def test_a_failed_cell_is_reported_and_the_others_run(sweep: Sweep) -> None:
    out = io.StringIO()
    failed, interrupted = run_cells(sweep, Console(file=out, width=200), MadeRuns([0, 1]))
    assert ([cell.name for cell in failed], interrupted) == (["try-s2-seed0"], False)
    assert "failed with exit code 1, see sweeps/try/try-s2-seed0.log" in out.getvalue()
    assert [status_of(cell) for cell in sweep.cells] == ["finished", "missing", "finished", "finished"]


def test_cells_of_other_settings_are_refused(sweep: Sweep) -> None:
    run_cells(sweep, quiet(), MadeRuns())
    other = Sweep("try", "my.yaml", {"learner.lr": 0.5}, ("learner.lr=0.5",), (0, 2), 2)
    with pytest.raises(ConfigError, match=r"runs/try-s0-seed0: belongs to a sweep with other settings \(learner\)"):
        run_cells(other, quiet(), MadeRuns())


def test_bad_limits_and_seeds_are_refused() -> None:
    with pytest.raises(ConfigError, match="--max-staleness 0,x: use numbers separated by commas"):
        parse_limits("0,x")
    with pytest.raises(ConfigError, match="--max-staleness 1,1: use limits of at least 0, each once"):
        Sweep("try", "demo", {}, (), parse_limits("1,1"), 1)
    with pytest.raises(ConfigError, match="--seeds 0: at least 1"):
        Sweep("try", "demo", {}, (), (0,), 0)


def test_results_of_all_cells(sweep: Sweep, tmp_path: Path) -> None:
    run_cells(sweep, quiet(), MadeRuns())
    results = read_results(sweep.cells)
    low, high = results.limits
    assert (low.max_staleness, high.max_staleness, low.seeds) == (0, 2, 2)
    assert low.reward_in_time == pytest.approx(0.505)
    assert high.reward_in_time == pytest.approx(0.705)
    assert low.reward_in_time_error == pytest.approx(0.005)
    assert (low.tokens_per_s, high.tokens_per_s) == (100.0, 102.0)
    assert (low.goodput, high.goodput) == (pytest.approx(0.26), pytest.approx(0.46))
    assert results.recommendation.max_staleness == 2
    assert results.recommendation.best_fraction == {0: 0.0, 2: 1.0}
    out = io.StringIO()
    results.show(Console(file=out, width=200))
    assert "use max_staleness 2: reward 0.705" in out.getvalue()
    assert "goodput" in out.getvalue() and " 46% " in out.getvalue()
    results.write(tmp_path, name="<try>")
    assert json.loads((tmp_path / "sweep.json").read_text())["recommendation"]["max_staleness"] == 2
    page = (tmp_path / "sweep.html").read_text()
    assert "<title>asyncrl sweep &lt;try&gt;</title>" in page


def test_a_partial_sweep_has_results_and_an_empty_one_none(sweep: Sweep) -> None:
    with pytest.raises(DataError, match="no cell of the sweep has finished"):
        read_results(sweep.cells)
    run_cells(sweep, quiet(), MadeRuns())
    shutil.rmtree("runs/try-s2-seed1")
    assert [limit.seeds for limit in read_results(sweep.cells).limits] == [2, 1]


def test_a_lower_limit_indistinguishable_from_the_best_is_recommended() -> None:
    rewards = {0: np.array([0.2, 0.25, 0.22]), 1: np.array([0.7, 0.8, 0.6]), 4: np.array([0.75, 0.7, 0.71])}
    found = recommend(rewards, 60.0)
    assert found.max_staleness == 1
    assert "not distinguishable from it: 4" in found.sentence
    assert sum(found.best_fraction.values()) == pytest.approx(1.0)
    clear = recommend({0: np.array([0.2, 0.25, 0.22]), 1: np.array([0.7, 0.72, 0.71])}, 60.0)
    assert clear.max_staleness == 1
    assert "the best of all in 100% of the bootstrap samples" in clear.sentence


def test_one_seed_says_that_it_is_unsure() -> None:
    found = recommend({0: np.array([0.2]), 2: np.array([0.3])}, 60.0)
    assert found.max_staleness == 2
    assert "one seed only" in found.sentence


def collapse(cell: Cell, **changes: Any) -> None:
    """Makes a finished cell one that collapsed."""
    file = cell.run_dir / "summary.json"
    told = {"collapsed": True, "active": True, "stopped": False, "sentence": f"{cell.name} collapsed. Lower it"}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"collapse": told | changes}))


def test_a_limit_at_which_a_run_collapsed_is_not_recommended(sweep: Sweep, tmp_path: Path) -> None:
    run_cells(sweep, quiet(), MadeRuns())
    collapse(sweep.cells[1])
    results = read_results(sweep.cells)
    assert (results.recommendation.max_staleness, results.recommendation.best_fraction) == (0, {0: 1.0})
    assert [(limit.collapsed, limit.seeds) for limit in results.limits] == [(0, 2), (1, 2)]
    out = io.StringIO()
    results.show(Console(file=out, width=200))
    assert "collapsed" in out.getvalue() and "1 of 2" in out.getvalue() and "use max_staleness 0: " in out.getvalue()
    results.write(tmp_path, name="try")
    assert "max_staleness 2, 1 of 2 collapsed" in (tmp_path / "sweep.html").read_text()
    for cell in sweep.cells[:3]:
        collapse(cell)
    lost = read_results(sweep.cells)
    assert lost.recommendation.max_staleness is None
    out = io.StringIO()
    lost.show(Console(file=out, width=200))
    assert "use none of these limits: with each a run collapsed" in out.getvalue()
    assert "with max_staleness 0 so: try-s0-seed0 collapsed. Lower it" in out.getvalue()


def test_a_cell_that_was_rolled_back_collapsed_at_its_limit(sweep: Sweep) -> None:
    run_cells(sweep, quiet(), MadeRuns())
    file = sweep.cells[1].run_dir / "summary.json"
    summary = json.loads(file.read_text())
    recovered = {"collapsed": False, "active": False, "sentence": "diverged and recovered"}
    file.write_text(json.dumps(summary | {"collapse": recovered}))
    assert [limit.collapsed for limit in read_results(sweep.cells).limits] == [0, 0], "an alarm that has ended"
    file.write_text(json.dumps(summary | {"rollbacks": [{"sentence": "diverges since step 3"}]}))
    results = read_results(sweep.cells)
    assert [limit.collapsed for limit in results.limits] == [0, 1] and results.recommendation.max_staleness == 0


def test_a_cell_that_its_collapse_ended_has_results_and_is_not_trained_again(sweep: Sweep) -> None:
    class Collapses(MadeRuns):
        def __call__(self, arguments: Sequence[str], log: Path) -> int:
            super().__call__(arguments, log)
            cell = next(cell for cell in sweep.cells if cell.name == self.names[-1])
            if cell.max_staleness:
                file = cell.run_dir / "metrics.jsonl"
                file.write_text("".join(file.read_text().splitlines(keepends=True)[:6]))
                collapse(cell, collapsed=False, stopped=True)
                return 1
            return 0

    out = io.StringIO()
    assert run_cells(sweep, Console(file=out, width=200), Collapses()) == ([], False)
    assert re.search(r"2 of 4  max_staleness 2, seed 0: collapsed after \d+ s", out.getvalue())
    again = MadeRuns()
    assert run_cells(sweep, quiet(), again) == ([], False) and again.names == []
    results = read_results(sweep.cells)
    assert [limit.collapsed for limit in results.limits] == [0, 2] and results.recommendation.max_staleness == 0
    assert results.seconds == min(cell.seconds[-1] for cell in results.cells if len(cell.steps) == 12)
