"""The frame of the bench, with synthetic rows. These tests measure no speed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from benchmarks.__main__ import ROWS, load
from benchmarks.frame import (
    REPOSITORY,
    ROUND,
    SEED,
    CannotRun,
    Limit,
    Origin,
    Result,
    Round,
    Row,
    follow,
    moves,
    one_thread,
    origin_here,
    output_of,
    read_results,
    table,
    write_results,
)

ORIGIN = Origin("abc1234", "2026-01-31", {"cores": 2})
ROW = Row("one", "another", {"ratio": Limit(0.9), "cost": Limit(1.3, at_most=True)}, measure=lambda _: iter([]))


def result(*rounds: Round, reason: str = "", origin: Origin = ORIGIN) -> Result:
    return Result("row", list(rounds), reason, origin)


def cells(measured: Result, row: Row = ROW) -> list[list[str]]:
    lines = table({"row": measured}, {"row": row}, all_figures=True)
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:]]


def compared(now: Result, before: Result) -> tuple[str, int]:
    lines, num_worse = moves({"row": now}, {"row": before}, {"row": ROW})
    return "\n".join(lines), num_worse


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
        [sys.executable, "-m", "asyncrl.cli", "bench", "replay_queue"], cwd=REPOSITORY, stdout=subprocess.DEVNULL,
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
    measured = result({"ratio": 0.95, "cost": 2.0, "groups/s": 1234.5}, {"ratio": 0.85, "cost": 1.0}, {"ratio": 0.99})
    assert cells(measured) == [
        ["`row`", "ratio", "0.95", "0.85 to 0.99", "3", ">= 0.9", "reached", "abc1234"],
        ["`row`", "cost", "1.5", "1 to 2", "2", "<= 1.3", "short", "abc1234"],
        ["`row`", "groups/s", "1,234", "1,234 to 1,234", "1", "", "", "abc1234"],
    ]
    assert cells(result(reason="no server"))[0][1] == "no server"


@pytest.mark.parametrize(
    ("now", "expected", "num_worse"),
    [
        ({"ratio": 0.93, "cost": 1.0}, "", 0),
        ({"ratio": 0.5, "cost": 1.0}, "row, ratio: was 0.95, is 0.5 (worse)", 1),
        ({"ratio": 0.95, "cost": 3.0}, "row, cost: was 1, is 3 (worse)", 1),
        ({"ratio": 2.0, "cost": 1.0}, "row, ratio: was 0.95, is 2", 0),
        ({"ratio": 0.95}, "row, cost: was 1, now it cannot be measured", 1),
    ],
)
def test_comparison_names_what_moved(now: Round, expected: str, num_worse: int) -> None:
    text, worse = compared(result(now), result({"ratio": 0.95, "cost": 1.0}))
    assert text.splitlines()[1:] == ([expected] if expected else [])
    assert worse == num_worse


def test_results_come_back_from_their_file(tmp_path: Path) -> None:
    path = tmp_path / "new" / "results.json"
    measured = {"row": Result("row", [{"ratio": 0.95}], "", ORIGIN, ["replay.zero_variance=drop"])}
    write_results(path, measured, quick=False)
    assert read_results(path, quick=False) == measured
    assert json.loads(path.read_text())["rows"][0]["medians"] == {"ratio": 0.95}
    with pytest.raises(SystemExit, match="holds results of the other form"):
        read_results(path, quick=True)
    path.write_text("{}")
    with pytest.raises(SystemExit, match="holds no results of a bench"):
        read_results(path, quick=False)


def test_one_round_above_its_bound_is_not_valid() -> None:
    row = Row("one", "another", {"ratio": Limit(0.9, never_above=1.03)}, measure=lambda _: iter([]))
    measured = result({"ratio": 0.95}, {"ratio": 0.95}, {"ratio": 1.04})
    assert "ratio: 1.04 in a round is above 1.03" in measured.exceeded(row.limits)
    assert cells(measured, row)[0][-2] == "bound not valid"
    assert cells(result({"ratio": 1.03}, {"ratio": 0.95}), row)[0][-2] == "reached"


def test_seeds_are_no_figures() -> None:
    measured = result({"ratio": 1.0, SEED: 0.0}, {"ratio": 1.2, SEED: 1.0})
    assert measured.medians == {"ratio": 1.1}


def test_packages_beside_the_environment_stay_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/extra")
    assert one_thread()["PYTHONPATH"] == f"{REPOSITORY}:/extra"


def test_a_comparison_names_both_commits_and_another_machine() -> None:
    other = Origin("def5678", "2026-02-01", {"cores": 64})
    text, _ = compared(result({"ratio": 0.9}, origin=other), result({"ratio": 0.9}))
    assert "row: commit abc1234 (2026-01-31) against def5678 (2026-02-01); before on another machine" in text


def test_origin_of_a_measurement_is_this_checkout() -> None:
    head = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=REPOSITORY, capture_output=True, text=True, check=True
    ).stdout
    origin = origin_here()
    assert head.startswith(origin.commit.removesuffix("-dirty"))
    assert origin.machine["cores"] >= 1


def test_table_of_the_documentation_is_that_of_the_results() -> None:
    """`asyncrl bench --show benchmarks/results/cpu-2-cores.json` prints the table."""
    results = read_results(REPOSITORY / "benchmarks/results/cpu-2-cores.json", quick=False)
    lines = table(results, {name: load(name) for name in ROWS}, all_figures=False)
    assert "\n".join(lines) in (REPOSITORY / "docs/performance.md").read_text()


def test_command_refuses_an_unknown_row() -> None:
    command = [sys.executable, "-m", "asyncrl.cli", "bench", "speed"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "no row is called speed; the rows are" in done.stderr
