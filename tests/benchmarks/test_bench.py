"""The frame of the bench, with synthetic rows. These tests measure no speed."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from benchmarks.__main__ import ROWS, load
from benchmarks.frame import (
    ROOT,
    ROUND,
    SEED,
    CannotRun,
    Limit,
    Origin,
    Result,
    Round,
    Row,
    follow,
    one_thread,
    output_of,
    run_command,
)
from benchmarks.results import Results, markdown, origin_here, print_moves, print_table

ORIGIN = Origin("abc1234", "2026-01-31", {"cores": 2})
ROW = Row("one", "another", {"ratio": Limit(0.9), "cost": Limit(1.3, at_most=True)}, measure=lambda _: iter([]))


def results(*rounds: Round, reason: str = "", quick: bool = False, origin: Origin = ORIGIN) -> Results:
    return Results(quick, {"row": Result("row", list(rounds), reason, origin)})


def row_of(**limits: Limit) -> Row:
    return Row("one", "another", limits, measure=lambda _: iter([]))


def shown(now: Results, before: Results | None = None, row: Row = ROW) -> tuple[str, int]:
    console = Console(width=200, file=io.StringIO())
    print_table(now, {"row": row}, console)
    worse = 0 if before is None else print_moves(now, before, {"row": row}, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue(), worse


def test_every_row_says_what_it_must_reach() -> None:
    for name in ROWS:
        row = load(name)
        assert row.what
        assert row.against
        assert row.limits


def test_rounds_are_reported_as_they_are_measured_and_other_output_is_the_cause() -> None:
    code = f"print('noise'); print('{ROUND}' + '{{\"ratio\": 0.5}}'); print('cannot: no server'); raise SystemExit(1)"
    rounds: list[Round] = []
    reason = follow([sys.executable, "-c", code], timeout_s=30, on_round=rounds.append)
    assert rounds == [{"ratio": 0.5}]
    assert reason == "noise\ncannot: no server"
    assert follow([sys.executable, "-c", "pass"], timeout_s=30, on_round=rounds.append) == ""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_bench_that_is_ended_leaves_no_process(number: signal.Signals) -> None:
    bench = subprocess.Popen(
        [sys.executable, "-m", "asyncrl.cli", "bench", "queue_cost"], cwd=ROOT, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        deadline_s = time.monotonic() + 60
        while len(started := psutil.Process(bench.pid).children(recursive=True)) < 2:
            assert time.monotonic() < deadline_s, "the row starts no process"
            time.sleep(0.05)
        bench.send_signal(number)
        bench.wait(30)
        assert psutil.wait_procs(started, timeout=30)[1] == []
    finally:
        bench.kill()


def test_a_row_that_hangs_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys, time; from pathlib import Path\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"Path({str(tmp_path / 'pid')!r}).write_text(str(child.pid)); time.sleep(600)"
    )
    started_s = time.monotonic()
    assert follow([sys.executable, "-c", code], timeout_s=3, on_round=lambda _: None) == "not done after 3 s"
    assert time.monotonic() - started_s < 60
    state = Path(f"/proc/{(tmp_path / 'pid').read_text()}/stat")
    assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"


def test_a_process_that_fails_says_why_it_cannot_run() -> None:
    assert output_of("counting", [sys.executable, "-c", "print(1)"], environment=one_thread(), timeout_s=30) == "1\n"
    with pytest.raises(CannotRun, match=r"counting failed: no more numbers"):
        command = [sys.executable, "-c", "raise SystemExit('no more numbers')"]
        output_of("counting", command, environment=one_thread(), timeout_s=30)


def test_table_says_which_limits_are_reached() -> None:
    text, _ = shown(
        results({"ratio": 0.95, "cost": 2.0, "groups/s": 1234.5}, {"ratio": 0.85, "cost": 1.0}, {"ratio": 0.99})
    )
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if "│" in line]
    assert lines == [
        ["row", "ratio", "0.95", "0.85", "0.99", "0.9 to 0.97", ">= 0.9", "reached"],
        ["", "cost", "1.5", "1", "2", "1.25 to 1.75", "<= 1.3", "short"],
        ["", "groups/s", "1,234", "1,234", "1,234", "", "", ""],
    ]
    assert "cannot run" in shown(results(reason="no server"))[0]


@pytest.mark.parametrize(
    ("now", "says", "worse"),
    [
        ({"ratio": 0.93, "cost": 1.0}, "no figure is worse", 0),
        ({"ratio": 0.5, "cost": 1.0}, "row, ratio: was 0.95, is 0.5", 1),
        ({"ratio": 0.95, "cost": 3.0}, "row, cost: was 1, is 3", 1),
        ({"ratio": 2.0, "cost": 1.0}, "row, ratio: was 0.95, is 2", 0),
        ({"ratio": 0.95}, "row, cost: was 1, now it cannot be measured", 1),
    ],
)
def test_comparison_names_what_moved(now: Round, says: str, worse: int) -> None:
    text, found = shown(results(now), results({"ratio": 0.95, "cost": 1.0}))
    assert says in text
    assert found == worse


def test_a_quick_bench_may_leave_figures_out() -> None:
    text, worse = shown(results({"ratio": 0.95}, quick=True), results({"ratio": 0.95, "cost": 1.0}))
    assert worse == 0
    assert "left out" in text and "cannot run" not in text
    assert shown(results(reason="broken", quick=True), results({"ratio": 0.95}))[1] == 1


def test_results_come_back_from_their_file(tmp_path: Path) -> None:
    path = tmp_path / "new" / "results.json"
    found = results({"ratio": 0.95})
    found.write(path)
    assert Results.read(path) == found
    assert json.loads(path.read_text())["rows"][0]["medians"] == {"ratio": 0.95}
    path.write_text("{}")
    with pytest.raises(SystemExit, match="holds no results of a bench"):
        Results.read(path)


def test_rows_that_are_not_measured_again_stay_in_the_file_with_their_origin(tmp_path: Path) -> None:
    before, now = results({"ratio": 0.95}), Results(False, {"other": Result("other")})
    now.keep(before, tmp_path)
    assert now.rows.keys() == {"other", "row"}
    assert now.rows["row"].origin == ORIGIN
    with pytest.raises(SystemExit, match="holds results of the other form"):
        now.keep(Results(True), tmp_path)


def test_a_ratio_to_a_bound_that_is_exceeded_is_not_reached() -> None:
    assert Limit(0.9, bound=True).is_valid(1.05) and not Limit(0.9, bound=True).is_valid(1.06)
    assert Limit(0.9).is_valid(3.0)
    text, _ = shown(results({"ratio": 1.3}), row=row_of(ratio=Limit(0.9, bound=True)))
    assert "bound not valid" in text and "reached" not in text


def test_one_round_above_what_can_be_is_not_valid() -> None:
    row = row_of(ratio=Limit(0.9, never_above=1.03))
    found = results({"ratio": 0.95}, {"ratio": 0.95}, {"ratio": 1.04})
    assert "ratio: 1.04 in a round is above 1.03" in found.rows["row"].exceeded(row.limits)
    assert "bound not valid" in shown(found, row=row)[0]
    assert "reached" in shown(results({"ratio": 1.03}, {"ratio": 0.95}), row=row)[0]


def test_a_row_with_a_round_above_what_can_be_fails() -> None:
    def command(value: float) -> list[str]:
        return [sys.executable, "-c", f"print({ROUND + json.dumps({'ratio': value})!r})"]

    row = row_of(ratio=Limit(0.9, never_above=1.03))
    assert run_command(command(1.0), Result("row"), row, timeout_s=30).reason == ""
    failed = run_command(command(1.1), Result("row"), row, timeout_s=30)
    assert failed.rounds == [{"ratio": 1.1}]
    assert "its bound is not valid" in failed.reason


def test_a_figure_that_needs_more_cores_says_so_and_is_not_worse() -> None:
    row = row_of(ratio=Limit(0.9), wide=Limit(0.9, cores=3))
    many = results({"ratio": 0.95, "wide": 0.95}, origin=Origin("def5678", "2026-02-01", {"cores": 4}))
    text, worse = shown(results({"ratio": 0.95}), many, row=row)
    assert "cannot run: needs 3 cores" in text
    assert worse == 0


def test_spread_of_rounds_is_robust_and_seeds_are_no_figures() -> None:
    rounds = [{"ratio": value, SEED: float(seed)} for seed, value in enumerate((1.0, 1.1, 1.2, 1.3, 9.0))]
    result = Result("row", rounds)
    assert result.figures == ["ratio"]
    assert result.spread("ratio") == (1.0, 9.0)
    assert result.quartiles("ratio") == pytest.approx((1.1, 1.3))
    assert Result("row", rounds[:1]).quartiles("ratio") == (1.0, 1.0)
    assert result.as_dict()["rounds"][4][SEED] == 4.0


def test_overrides_are_kept_with_the_row(tmp_path: Path) -> None:
    found = Results(False, {"row": Result("row", [{"ratio": 1.0}], overrides=["replay.zero_variance=drop"])})
    found.write(tmp_path / "results.json")
    assert Results.read(tmp_path / "results.json") == found


def test_packages_beside_the_environment_stay_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/extra")
    assert one_thread()["PYTHONPATH"] == f"{ROOT}:/extra"


def test_a_comparison_names_both_commits_and_another_machine() -> None:
    other = Origin("def5678", "2026-02-01", {"cores": 64})
    text, _ = shown(results({"ratio": 0.9}, origin=other), results({"ratio": 0.9}))
    assert "row: commit abc1234 (2026-01-31) against def5678 (2026-02-01); before on another machine" in text


def test_origin_of_a_measurement_is_this_checkout() -> None:
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    origin = origin_here()
    assert head.startswith(origin.commit.removesuffix("-dirty"))
    assert origin.machine["cores"] >= 1


def test_table_of_the_documentation_is_that_of_the_results() -> None:
    """`python -m benchmarks --markdown benchmarks/results/cpu-2-cores.json` prints the table."""
    file = Results.read(ROOT / "benchmarks/results/cpu-2-cores.json")
    table = "\n".join(markdown(file, {name: load(name) for name in ROWS}))
    assert table in (ROOT / "docs/performance.md").read_text()


def test_command_refuses_an_unknown_row() -> None:
    command = [sys.executable, "-m", "asyncrl.cli", "bench", "speed"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "no row is called speed; the rows are" in done.stderr
