"""The document of a run: curves, rates, tiles, tables, samples and the timeline."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from asyncrl.data.tiny_model import make_tokenizer
from asyncrl.observe.curves import RATE_POINTS
from asyncrl.observe.document import MAX_CHARACTERS, MAX_SAMPLES, group_times, run_document, timeline
from asyncrl.observe.sample_search import page_samples
from asyncrl.observe.samples import append_rows, choose, evaluated_file
from asyncrl.observe.trace import SCHEMA
from asyncrl.types import Lease, Prompt
from tests.helpers.replay import make_group, small_config
from tests.observe.test_observe import LAGS

Document = dict[str, Any]


def write_rows(folder: Path, rows: list[dict[str, float]]) -> None:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def line(document: Document, name: str) -> tuple[list[float], list[float]]:
    (found,) = (
        (xs, ys)
        for section in document["charts"]
        for chart in section["charts"]
        for own, xs, ys in chart["lines"]
        if own == name
    )
    return found


def test_a_rate_is_tokens_by_the_seconds_between_steps_and_no_mean_since_the_start(tmp_path: Path) -> None:
    write_rows(
        tmp_path,
        [{"step": s, "learner/tokens": 100.0, "time/elapsed_s": 1.0 * s if s < 4 else 3 + 2.0 * (s - 3)}
         for s in range(1, 6)],
    )  # fmt: skip
    assert line(run_document(tmp_path, {}), "tokens_per_s") == ([2, 3, 4, 5], [100, 100, 50, 50])
    long = [{"step": s, "learner/tokens": 10.0, "time/elapsed_s": 0.5 * s} for s in range(1, 1001)]
    write_rows(tmp_path, long)
    steps, rates = line(run_document(tmp_path, {}), "tokens_per_s")
    assert len(steps) == RATE_POINTS - 1 and set(rates) == {20.0}


def test_times_leave_out_the_first_step(tmp_path: Path) -> None:
    write_rows(tmp_path, [{"step": step, "reward/mean": 0.5, "learner/step_s": 9.0 / step} for step in (1, 2, 3)])
    assert line(run_document(tmp_path, {}), "learner/step_s") == ([2, 3], [4.5, 3.0])


def test_evaluations_are_by_version_and_sources_are_drawn_where_there_are_several(tmp_path: Path) -> None:
    results = [
        {"version": 0, "reward": 0.125, "pass@1": 0.0625, "sums/reward": 0.875},
        {"version": 7, "reward": 0.375, "pass@1": 0.3125, "sums/reward": 0.625},
    ]
    document = run_document(tmp_path, {"eval": results})
    assert line(document, "reward") == ([0, 7], [0.125, 0.375])
    assert line(document, "pass@1") == ([0, 7], [0.0625, 0.3125])
    assert "sums/reward" not in json.dumps(document["charts"])
    more = [row | {"words/reward": 0.5} for row in results]
    assert line(run_document(tmp_path, {"eval": more}), "sums/reward") == ([0, 7], [0.875, 0.625])


def test_the_tiles_answer_learning_speed_bottleneck_and_staleness(tmp_path: Path) -> None:
    write_rows(tmp_path, [{"step": step, "reward/mean": step / 2 - 0.25} for step in (1, 2)])
    summary = {
        "tokens_per_s": 1234.4, "wall_s": 3725.0, "steps": 2,
        "idle": {"generator": 0.02, "environments": 0.0, "learner": 0.61},
        "staleness": {"mean": 1.07, "max": 3, "limit": 4, "histogram": [1]},
        "eval": [{"version": 0, "reward": 0.1}, {"version": 2, "reward": 0.9}],
    }  # fmt: skip
    tiles = {tile["title"]: (tile["value"], tile["note"]) for tile in run_document(tmp_path, summary)["tiles"]}
    assert tiles["Is it learning?"] == (
        "0.250 → 0.750", "mean reward, first and last steps; evaluation 0.100 to 0.900",
    )  # fmt: skip
    assert tiles["How fast?"] == ("1,234", "trained tokens per second; 2 steps in 1 h 2 min")
    what, note = tiles["What holds it back?"]
    assert what == "learner waits 61%" and note.startswith("of its time; generator 2%; below")
    slow = run_document(tmp_path, summary | {"idle": {"generator": 0.02, "environments": 0.7, "learner": 0.61}})
    assert "environments 70%" in [tile["value"] for tile in slow["tiles"]]
    assert tiles["How off-policy?"][0] == "1.07"
    assert "How much counts?" not in tiles, "unknown and not 0"
    alive = run_document(tmp_path, {"status": "running"})
    assert [tile["value"] for tile in alive["tiles"]] == ["0.250 → 0.750"], "a run in progress has what is known"


def test_the_goodput_is_shown_with_what_each_factor_leaves(tmp_path: Path) -> None:
    goodput = {"total": 0.36, "engine": 0.9, "admitted": 1.0, "signal": 0.5, "trained": 0.8, "bare_tokens_per_s": 12e3}
    (tile,) = run_document(tmp_path, {"goodput": goodput})["tiles"]
    assert (tile["title"], tile["value"], tile["metric"]) == ("How much counts?", "36%", "goodput/total")
    assert [part[:3] for part in tile["parts"]] == [
        ["engine", 0.9, 0.9], ["admitted", 1.0, 0.9], ["signal", 0.5, 0.45], ["trained", 0.8, 0.36],
    ]  # fmt: skip
    rows = [{"step": step, "reward/mean": 0.5} | {f"goodput/{name}": value for name, value in goodput.items()}
            for step in (1, 2)]  # fmt: skip
    write_rows(tmp_path, rows)
    document = run_document(tmp_path, {"status": "running"})
    assert document["tiles"][1] == tile, "a run in progress has that of its last step"
    assert line(document, "goodput/signal") == ([1, 2], [0.5, 0.5])
    assert ["goodput.bare_tokens_per_s", 12e3] in run_document(tmp_path, {"goodput": goodput})["summary"]


def test_the_tiles_of_an_environment_tell_turns_waits_and_ends(tmp_path: Path) -> None:
    names = {
        "turns": 2.5, "observation_tokens": 7.0, "wait_s/p50": 0.125, "wait_s/p95": 1.5, "reset_s": 0.1,
        "ended_done": 0.75, "ended_max_turns": 0.25, "ended_window": 0.0, "failed/timeout": 0.125, "failed/host": 0.0,
        "live_episodes": 9.0, "waiting_episodes": 4.0,
    }  # fmt: skip
    rows = [
        {"step": step, "reward/mean": 0.5} | {f"environment/{name}": value for name, value in names.items()}
        for step in (1, 2)
    ]
    write_rows(tmp_path, rows)
    document = run_document(tmp_path, {})
    tiles = {tile["title"]: (tile["value"], tile["note"]) for tile in document["tiles"]}
    del tiles["Is it learning?"]
    assert tiles == {
        "How long are episodes?": ("2.50", "turns of an episode, mean of the last step; 7.0 tokens observed"),
        "How slow is the environment?": (
            "0.12 s", "wait of an episode for its environment, median; 95 % wait at most 1.5 s",
        ),
        "How do episodes end?": ("done 75%", "done 75%, max_turns 25%, window 0%; 12% of all failed"),
    }  # fmt: skip
    assert line(document, "environment/waiting_episodes") == ([1, 2], [4.0, 4.0])
    write_rows(tmp_path, [{"step": 1, "reward/mean": 0.5}])
    assert not any("pisode" in tile["title"] for tile in run_document(tmp_path, {})["tiles"])


def test_the_time_of_a_group_is_divided_among_its_states(tmp_path: Path) -> None:
    """The last two of 40 trained groups take 10 s longer in the queue."""
    trained = [
        {"train_version": 0, "started_s": 1.0, "finished_s": 5.0, "taken_s": 6.0 + late, "trained_s": 8.0 + late,
         "reward_s": 0.5, "members": [0, 0, 1], "reset_s": [0.25, 0.0, 0.75], "wait_s": [0.0, 0.0, 2.0]}
        for late in [0.0] * 38 + [10.0] * 2
    ]  # fmt: skip
    refunded = trained[0] | {"train_version": -1, "trained_s": float("nan")}
    table = pa.Table.from_pylist([*trained, refunded], schema=SCHEMA)
    all_of_them, slowest = group_times(table)
    assert (all_of_them["role"], all_of_them["seconds"]) == ("40 groups", 7.5)
    parts = {name: round(7.5 * fraction, 6) for name, fraction in all_of_them["activities"]}
    assert parts == {"engine": 2.0, "environment": 1.5, "reward": 0.5, "queue": 1.5, "learner": 2.0}
    assert (slowest["role"], slowest["seconds"]) == ("slowest 5 %", 17.0)
    single = [row | {"reset_s": [], "wait_s": []} for row in trained]
    (only,) = group_times(pa.Table.from_pylist(single[:2], schema=SCHEMA))
    assert [name for name, _ in only["activities"]] == ["engine", "reward", "queue", "learner"]
    assert group_times(table.slice(40)) == [], "no group was trained"
    unknown = table.set_column(SCHEMA.get_field_index("reward_s"), SCHEMA.field("reward_s"), pa.nulls(41, pa.float64()))
    assert group_times(unknown) == []
    assert [row["seconds"] for row in run_document(tmp_path, {}, table)["group_times"]] == [7.5, 17.0]


def test_tables_of_staleness_ledger_gains_and_configuration(tmp_path: Path) -> None:
    write_rows(tmp_path, [{"step": step, "reward/mean": 0.5, **LAGS} for step in (1, 2, 3)])
    (tmp_path / "config.yaml").write_text("replay: {max_staleness: 4}\n")
    counts = {"generated": 9, "trained": 6, "refunded": {"zero_variance": 2}, "returned": 0, "in_flight": 1}
    sources = {"sums": {"solved": 3, "learning": 2, "never_solved": 0}}
    ledger = {"leased": 5, "trained": 3, "refunded": {"zero_variance": 1}, "in_flight": 1, "trajectories": counts}
    summary = {
        "bottleneck": "learner-bound", "simulated_gains": {"another generator": 0.0, "another learner": 0.41},
        "ledger": ledger | {"tokens": {**counts, "generated": 12345}}, "bias": ["too <short>"],
        "prompts": {"solved": 3, "learning": 2, "never_solved": 0, "unseen": 5, "skipped": 7, "by_source": sources},
        "restarts": {"learner": 1}, "broken": float("nan"), "eval_dropped": [3],
    }  # fmt: skip
    document = run_document(tmp_path, summary)
    assert [row[0] for row in document["staleness"]["lines"]] == ["0", "3-4"]
    assert document["staleness"]["lines"][1][1:6] == [0.25, 1.25, 3.5, 0.125, 0.625]
    assert document["ledger"][0] == ["generated", 5, 9, 12345]
    assert document["ledger"][2] == ["refunded (zero_variance)", 1, 2, 2]
    assert document["gains"][0] == ["another learner", 0.41]
    assert document["summary"] == [["restarts.learner", 1], ["broken", None], ["eval_dropped", "[3]"]]
    assert document["rows"] == [["all", 3, 2, 0, 5], ["sums", 3, 2, 0, None]]
    assert (document["verdict"], document["bias"]) == ("learner-bound", ["too <short>"])
    assert document["config"] == "replay:\n  max_staleness: 4\n"


def test_a_collapse_is_told_with_its_curves(tmp_path: Path) -> None:
    names = ("correction/behavior_kl", "correction/ess", "collapse/alarms")
    write_rows(tmp_path, [{"step": step, "learner/tokens": 9.0} | dict.fromkeys(names, step / 4) for step in (1, 2)])
    collapse = {"sentence": "collapsed at step 12", "active": True, "alarms": [{"signal": "reward"}]}
    document = run_document(tmp_path, {"collapse": collapse, "bottleneck": "collapsed at step 12"})
    assert document["collapse"] == document["verdict"] == "collapsed at step 12"
    assert document["summary"] == [], "it has its own place"
    assert {name: line(document, name)[1] for name in names} == {name: [0.25, 0.5] for name in names}
    assert run_document(tmp_path, {})["collapse"] == ""


def test_a_damaged_line_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.25}\nnonsense\n')
    (warning,) = run_document(tmp_path, {})["warnings"]
    assert "metrics.jsonl: the line after 1 rows is not JSON" in warning


def test_samples_have_texts_and_those_of_evaluations_are_whole_prompts(tmp_path: Path) -> None:
    make_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "config.yaml").write_text(small_config(model__path=str(tmp_path / "model")).to_yaml())
    assert page_samples(tmp_path) is None, "nothing is recorded"
    groups = [
        make_group(Lease(row, 0, Prompt(row, np.arange(3, dtype=np.int32), "1", "test")), 0) for row in range(150)
    ]
    for step in range(1, 150):
        append_rows(tmp_path / "samples" / "trained.jsonl", choose(groups[step : step + 1], step=step))
    for version in (0, 5):
        for group in groups:
            append_rows(evaluated_file(tmp_path, version), choose([group], step=version).select([0]))
    document = run_document(tmp_path, {}, samples=page_samples(tmp_path))
    trained, evaluated = document["samples"]["trained"], document["samples"]["evaluated"]
    assert len(trained) == MAX_SAMPLES and trained[0]["step"] == 1 and trained[-1]["step"] == 149
    assert {"prompt", "completion", "raw", "reward", "chosen", "staleness"} <= trained[0].keys()
    assert len(evaluated) == MAX_SAMPLES
    assert {row["row"] for row in evaluated if row["step"] == 0} == {
        row["row"] for row in evaluated if row["step"] == 5
    }
    text = "x" * (MAX_CHARACTERS + 5)
    long = page_samples(tmp_path)
    assert long is not None
    long.trained.table = long.trained.with_column("prompt", pa.array([text] * len(long.trained))).table
    cut = run_document(tmp_path, {}, samples=long)["samples"]["trained"][0]["prompt"]
    assert "[... 5 characters ...]" in cut and len(cut) < len(text) + 30


def make_trace(groups: int = 12) -> pa.Table:
    """Two generators that overlap, two groups a step."""
    steps = [number // 2 for number in range(groups)]
    return pa.table({
        "ticket": list(range(groups)), "generator": [number % 2 for number in range(groups)],
        "outcome": ["trained"] * (groups - 2) + ["zero_variance", "in_flight"],
        "start_version": [max(step - 1, 0) for step in steps], "train_version": [*steps[:-2], -1, -1],
        "started_s": [float(step) for step in steps], "finished_s": [step + 1.5 for step in steps],
        "taken_s": [step + 1.75 for step in steps], "trained_s": [step + 2.5 for step in steps],
    })  # fmt: skip


def test_timeline_shows_steps_of_the_middle_and_groups_side_by_side() -> None:
    shown = timeline(make_trace())
    assert shown is not None
    steps = [bar for bar in shown["bars"] if bar[3] == "step"]
    groups = [bar for bar in shown["bars"] if bar[3] != "step"]
    assert [bar[4] for bar in steps] == ["step 1", "step 2", "step 3", "step 4"]
    assert {bar[3] for bar in groups} <= {"staleness 0", "staleness 1", "zero variance", "in flight"}
    assert [role[0] for role in shown["roles"]] == ["learner", "generator 0", "generator 1"]
    for index, (begin_s, end_s, lane, *_) in enumerate(groups):
        for other_begin_s, other_end_s, other, *_ in groups[index + 1 :]:
            assert lane != other or begin_s >= other_end_s or other_begin_s >= end_s, "bars of a lane overlap"
        (owner,) = [name for name, first, count in shown["roles"] if first <= lane < first + count]
        assert owner.startswith("generator")
    assert timeline(make_trace().slice(0, 0)) is None
    latest = timeline(make_trace(), latest=True)
    assert latest is not None
    assert [bar[4] for bar in latest["bars"] if bar[3] == "step"] == ["step 2", "step 3", "step 4", "step 5"]
