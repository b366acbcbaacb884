"""Reading a run's folder as a workload, and errors for incomplete or damaged folders and traces."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from asyncrl.config.load import load_config
from asyncrl.errors import DataError
from asyncrl.observe.trace import SCHEMA, TraceWriter, read_trace
from asyncrl.plan.measured import RecentRun, read_run
from asyncrl.plan.workload import slowdown
from tests.plan.made_runs import ENGINE, GROUP_SIZE, LEARNER, REWARD_S, SYNC, make_run


def test_costs_are_found_again(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "r"))
    assert run.workload.engine == ENGINE
    for name in ("base_s", "token_s", "take_s"):
        assert getattr(run.workload.learner, name) == pytest.approx(getattr(LEARNER, name), rel=1e-6), name
    for name in ("broadcast_s", "hold_s", "swap_s"):
        assert getattr(run.workload.sync, name) == pytest.approx(getattr(SYNC, name)), name
    assert run.workload.reward_s == REWARD_S
    lengths = run.workload.lengths
    assert lengths.completions.shape == (60, GROUP_SIZE)
    assert (~lengths.signal).mean() == pytest.approx(0.2) and not lengths.failed.any()
    assert set(lengths.prompts.tolist()) == {3}
    assert (run.setup.generators, run.setup.steps, run.setup.generators_per_device) == (1, 12, 1)
    assert (run.tokens_per_s, run.generator_idle, run.staleness) == (100.0, 0.25, [5, 5])


def test_an_evaluation_after_the_last_step_hides_nothing(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "r")
    last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])["step"]
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": last, "eval/version": last, "eval/reward": 0.5}) + "\n")
    assert read_run(folder).workload.engine == ENGINE


def test_generators_that_take_turns_are_faster_alone(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "r", generators_per_device=2)
    run = read_run(folder)
    assert run.setup.generators_per_device == 2
    assert run.workload.engine.base_s == ENGINE.base_s / slowdown(2)
    assert read_run(folder, generators_per_device=1).workload.engine == ENGINE


def test_a_live_run_is_read_from_its_log(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "r")
    table = pq.read_table(folder / "trace.parquet")
    (folder / "trace.parquet").unlink()
    (folder / "summary.json").unlink()
    with pa.OSFile(str(folder / "trace.arrow"), "wb") as file, pa.ipc.new_stream(file, SCHEMA) as stream:
        stream.write_table(table)
    with (folder / "trace.arrow").open("ab") as file:
        file.truncate(file.tell() - 8)
        file.write(b"\xff\xff\xff\xff\x10\x00\x00\x00half")
    assert read_run(folder).workload.engine == ENGINE


def test_the_last_row_of_a_ticket_counts(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "r")
    before = pq.read_table(folder / "trace.parquet")
    TraceWriter(folder / "trace.parquet")._append(
        before.slice(5, 1).to_batches()[0].set_column(5, "outcome", pa.array(["failed"])).serialize()
    )
    after = read_trace(folder)
    assert len(after) == len(before)
    assert sorted(after.column("ticket").to_pylist()) == before.column("ticket").to_pylist()
    (row,) = (row for row in after.to_pylist() if row["ticket"] == 5)
    assert row["outcome"] == "failed"


@pytest.mark.parametrize(
    ("columns", "names"),
    [
        ([one for one in SCHEMA if one.name != "rewards"], "rewards"),
        ([SCHEMA.field(0).with_type(pa.string()), *[*SCHEMA][1:], pa.field("more", pa.int32())], "more, ticket"),
        ([*SCHEMA][::-1], "the order"),
    ],
)
def test_a_trace_of_another_schema_is_refused(tmp_path: Path, columns: list[pa.Field], names: str) -> None:
    pq.write_table(pa.schema(columns).empty_table(), tmp_path / "trace.parquet")
    with pytest.raises(DataError, match=rf"not a trace of this version of asyncrl \({names} of its columns differs"):
        read_trace(tmp_path / "trace.parquet")


def test_a_half_written_file_is_refused(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "r")
    file = folder / "trace.parquet"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(DataError, match=r"trace\.parquet: not a complete trace, it may be half written or truncated"):
        read_run(folder)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file; use the trace of a run"):
        read_trace(tmp_path / "none.parquet")
    with pytest.raises(DataError, match=r"contains neither trace\.parquet nor trace\.arrow"):
        read_run(tmp_path)
    folder = make_run(tmp_path / "r", steps=2)
    with pytest.raises(DataError, match="has 2 steps, at least 3 are needed"):
        read_run(folder)
    (folder / "config.yaml").unlink()
    with pytest.raises(DataError, match=r"config\.yaml: no such file"):
        read_run(folder)


def test_a_run_without_the_costs_of_generation_is_refused(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "r")
    file = folder / "metrics.jsonl"
    file.write_text(file.read_text().replace("generator/request_s", "generator/other_s"))
    with pytest.raises(DataError, match="has no generator/request_s: the generators had not measured it yet; let"):
        read_run(folder)


def test_turns_and_waits_are_those_of_the_trace(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "r")
    assert read_run(folder).workload.lengths.episodes is None
    config = folder / "config.yaml"
    config.write_text(config.read_text().replace("  max_episodes: null", "  max_episodes: 6").replace(
        "environment:\n  name: null", "environment:\n  name: guess"))  # fmt: skip
    table = pq.read_table(folder / "trace.parquet")
    rows = table.to_pylist()
    for number, row in enumerate(rows):
        row |= {"turns": [3, 0], "wait_s": [0.5 * number, 0.0], "slow_turns": [min(number, 2), 0]}
        row["outcome"] = "timeout" if number % 10 == 4 else row["outcome"]
    pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), folder / "trace.parquet")
    run = read_run(folder)
    episodes = run.workload.lengths.episodes
    assert episodes is not None and run.setup.max_episodes == 6
    assert episodes.turns[:2].tolist() == [[3, 1], [3, 1]], "a failed episode of no turns has had its prompt"
    assert episodes.wait_s[:3].tolist() == [[0.0, 0.0], [0.5, 0.0], [1.0, 0.0]]
    assert episodes.slow_turns[:3, 0].tolist() == [0, 1, 2]
    assert run.workload.lengths.failed.sum() == sum(row["outcome"] == "timeout" for row in rows)
    assert run.environments == 0.0, "not in the metrics of this run"
    lengths = run.workload.lengths.completions
    rows[0] |= {"members": [0, 0, 1], "turns": [2, 1, 3], "wait_s": [1.5, 0.0, 0.5], "slow_turns": [1, 0, 0]}
    rows[0] |= {"completion_tokens": [5, 6, 7], "prompt_tokens": [3, 9, 3], "rewards": [1.0, 1.0, 0.0]}
    pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), folder / "trace.parquet")
    branched = read_run(folder).workload.lengths
    assert branched.episodes is not None
    assert branched.completions[0].tolist() == [11, 7] and branched.prompts[0] == 3
    assert branched.episodes.turns[0].tolist() == [3, 3] and branched.episodes.wait_s[0].tolist() == [1.5, 0.5]
    assert branched.completions[1:].tolist() == lengths[1:].tolist(), "the rows of a member count as one"
    recent = RecentRun(load_config(config).model_copy(update={"runs_dir": str(tmp_path)}), generators_per_device=1)
    assert recent.timed_out_fraction() == pytest.approx(0.1)


def test_a_step_that_drops_groups_costs_what_is_computed_of_it(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "r")
    config = folder / "config.yaml"
    config.write_text(config.read_text().replace("zero_variance: auto", "zero_variance: drop"))
    dropped = read_run(folder)
    assert dropped.setup.zero_variance == "drop"
    table = pq.read_table(folder / "trace.parquet")
    some = pa.array([signal and ticket % 5 != 1 for ticket, signal in enumerate(table.column("signal").to_pylist())])
    pq.write_table(table.set_column(16, SCHEMA.field("signal"), some), folder / "trace.parquet")
    fewer = read_run(folder)
    assert fewer.workload.lengths.signal.mean() == pytest.approx(0.6)
    cost, before = fewer.workload.learner, dropped.workload.learner
    assert cost.base_s + 100 * cost.token_s > before.base_s + 100 * before.token_s, "the same time for fewer tokens"
