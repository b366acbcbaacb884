"""The search over splits of devices, and the commands that show its results."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from asyncrl.errors import ConfigError
from asyncrl.plan.show import show_plan, show_simulation
from asyncrl.plan.verdict import limits, search
from asyncrl.plan.workload import EngineCost, LearnerCost, Lengths, Setup, Workload
from tests.plan.made_runs import make_run

LENGTHS = Lengths.log_normal(mean_tokens=64, sigma=0.8, max_tokens=256, group_size=4)
SETUP = Setup(
    generators=1, learners=1, max_staleness=1, groups_per_step=12, group_size=4, max_running_groups=2, steps=20
)


def job(generating_s: float, training_s: float) -> Workload:
    """Returns a workload whose step takes `generating_s` on one generator and `training_s` on one learner."""
    tokens = float(LENGTHS.completions.mean()) * 4 * 12
    return Workload(LENGTHS, EngineCost(0.0, generating_s / tokens), LearnerCost(0.0, training_s / tokens))


@pytest.mark.parametrize(("generating_s", "training_s", "generators"), [(3.0, 1.0, 6), (1.0, 3.0, 2), (1.0, 1.0, 4)])
def test_devices_are_split_by_the_work(generating_s: float, training_s: float, generators: int) -> None:
    found = search(job(generating_s, training_s), SETUP, devices=8, max_staleness=4)
    best = found[0]
    assert abs(best.setup.generators - generators) <= 1
    assert best.setup.learners == 8 - best.setup.generators
    assert best.setup.max_staleness >= 1
    assert {c.setup.learners for c in found} == {1, 2, 3, 4, 6}, "the divisors of 12 groups"
    assert all(c.setup.max_staleness <= 4 for c in found)
    ideal = min(best.setup.generators / generating_s, best.setup.learners / training_s)
    assert 0.85 * ideal < best.tokens_per_s / (float(LENGTHS.completions.mean()) * 48) < 1.1 * ideal


def test_limits_to_try() -> None:
    assert limits(0) == [0]
    assert limits(3) == [0, 1, 2, 3]
    assert limits(16) == [0, 1, 2, 3, 4, 6, 9, 13, 16]


def test_impossible_plans_are_refused() -> None:
    with pytest.raises(ConfigError, match="devices = 1: a generator and a learner need one device each"):
        search(job(1, 1), SETUP, devices=1, max_staleness=1)
    with pytest.raises(ConfigError, match="max_staleness = -1: must not be negative"):
        search(job(1, 1), SETUP, devices=4, max_staleness=-1)


def printed() -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, width=200), out


def test_plan_prints_a_table_and_the_command(tmp_path: Path) -> None:
    console, out = printed()
    run = make_run(tmp_path / "r")
    found = show_plan(console, run, devices=4, max_staleness=2)
    best = found[0].setup
    assert f"4 devices, predicted from {run}; 6 setups tried" in out.getvalue()
    command = (
        f"asyncrl launch --config {run / 'config.yaml'} --generators {best.generators} --learners {best.learners} "
        f"--max-staleness {best.max_staleness}"
    )
    assert out.getvalue().rstrip().endswith(command)


def test_simulation_of_a_run_next_to_its_measurements(tmp_path: Path) -> None:
    console, out = printed()
    run = make_run(tmp_path / "r")
    show_simulation(console, run, [], {})
    lines = {line.split()[0]: line.split()[1:] for line in out.getvalue().splitlines() if line}
    assert "measured" in out.getvalue()
    assert lines["goodput"][1] == "0.380" and lines["signal"][1] == "0.400" and 0 < float(lines["signal"][0]) < 1
    console, out = printed()
    found = show_simulation(console, run, [], {"generators": 3, "max_new_tokens": 10})
    assert found.setup.generators == 3
    assert "measured" not in out.getvalue()
    assert "tokens by staleness" in out.getvalue()


def collapsed_run(folder: Path, limit: int, min_staleness: int = 0) -> Path:
    """Returns a run that ended with an alarm at this limit."""
    run = make_run(folder, collapse={"sentence": "collapsed at step 12: so. Lower it", "active": True})
    config = run / "config.yaml"
    text = config.read_text().replace("max_staleness: 1", f"max_staleness: {limit}")
    config.write_text(text.replace("min_staleness: 0", f"min_staleness: {min_staleness}"))
    rows = [json.loads(line) | {"collapse/alarms": 1.0} for line in (run / "metrics.jsonl").read_text().splitlines()]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run


def test_a_plan_from_a_run_that_collapsed_has_lower_limits_only(tmp_path: Path) -> None:
    console, out = printed()
    run = collapsed_run(tmp_path / "r", 2)
    found = show_plan(console, run, devices=4, max_staleness=4)
    assert {prediction.setup.max_staleness for prediction in found} == {0, 1}
    assert f"{run} collapsed at step 12: so. Lower it\nonly limits up to 1 are tried\n" in out.getvalue()
    (run / "summary.json").unlink()
    console, out = printed()
    assert len(show_plan(console, run, devices=4, max_staleness=0)) == len(found) // 2
    assert f"{run} collapses\nonly limits up to 1" in out.getvalue(), "a run in progress"
    console, out = printed()
    assert show_plan(console, collapsed_run(tmp_path / "zero", 0), devices=4, max_staleness=4) == []
    assert "collapsed at step 12: so. Lower it\nno limit is below 0: change that first\n" in out.getvalue()
    assert "asyncrl launch" not in out.getvalue()


def test_a_plan_from_a_run_that_was_rolled_back_has_no_higher_limit(tmp_path: Path) -> None:
    run = make_run(tmp_path / "r")
    record = {"stopped_at_step": 9, "to_step": 5, "sentence": "collapsed at step 7: so"}
    (run / "rollbacks.json").write_text(json.dumps([record]))
    console, out = printed()
    found = show_plan(console, run, devices=4, max_staleness=8)
    assert {prediction.setup.max_staleness for prediction in found} == {0, 1}
    assert (
        f"{run} was rolled back (steps 9 -> 5), the last time since it collapsed at step 7: so\nonly limits up to 1"
        in out.getvalue()
    )


def test_the_command_of_a_plan_lowers_min_staleness(tmp_path: Path) -> None:
    console, out = printed()
    show_plan(console, collapsed_run(tmp_path / "r", 2, min_staleness=2), devices=2, max_staleness=4)
    assert re.search(r"--max-staleness ([01]) replay\.min_staleness=\1\n", out.getvalue()), out.getvalue()


def test_the_simulation_of_a_run_that_collapsed_warns(tmp_path: Path) -> None:
    console, out = printed()
    run = collapsed_run(tmp_path / "r", 2)
    show_simulation(console, run, [], {"max_staleness": 3})
    assert (
        out.getvalue().startswith(f"{run} collapsed at step 12: so. Lower it\n")
        and "trained tokens/s" in out.getvalue()
    )


def test_simulation_of_numbers() -> None:
    console, out = printed()
    numbers = ["mean_tokens=50", "engine_base_ms=10", "learner_token_us=100"]
    found = show_simulation(console, None, numbers, {"generators": 2, "steps": 20})
    assert found.setup.steps == 20
    assert found.tokens_per_s > 0
    assert "generators 2, learners 1" in out.getvalue()


def test_numbers_that_are_missing_or_too_many_are_named(tmp_path: Path) -> None:
    console, _ = printed()
    with pytest.raises(ConfigError, match="missing required field `engine_base_ms`; use --from"):
        show_simulation(console, None, ["mean_tokens=50"], {})
    with pytest.raises(ConfigError, match="unknown field `mean`"):
        show_simulation(console, None, ["mean=50"], {})
    with pytest.raises(ConfigError, match="mean_tokens=50: is read from the run of --from"):
        show_simulation(console, make_run(tmp_path / "r"), ["mean_tokens=50"], {})
