"""Logs, trackers, live view, verdict and report."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from asyncrl.observe.live import LiveView
from asyncrl.observe.logs import last_error
from asyncrl.observe.report import read_metrics, write_report
from asyncrl.observe.trackers import make_trackers
from asyncrl.observe.verdict import bottleneck
from tests.helpers.replay import small_config

STATUS = {
    "step": 3, "reward": 0.5, "staleness_mean": 1.5, "staleness_max": 2, "tokens_per_s": 1234.0,
    "generator_idle": 0.1, "learner_idle": 0.02, "leased": 4, "finished": 5, "trained": 6,
    "refunded": {"no_signal": 7}, "metrics": {"learner/entropy": 0.7, "learner/grad_norm": 0.3},
    "generators": {"0": {"version": 2, "leased": 4, "tokens": 99, "idle": 0.1}},
    "eval": {"prompts_done": 0, "last": None, "running": []},
}  # fmt: skip


def test_logs_are_json_with_role_level_time_and_traceback(tmp_path: Path) -> None:
    code = (
        "import sys, logging, structlog; from pathlib import Path; from asyncrl.observe.logs import configure_logs\n"
        "configure_logs(Path(sys.argv[1]), 'learner-0', 'info'); log = structlog.get_logger()\n"
        "log.debug('hidden'); log.info('weights sent', version=3)\n"
        "logging.getLogger('other').warning('from a %s', 'library')\n"
        "try: 1 / 0\n"
        "except ZeroDivisionError as error: log.error('failed', error=str(error), exc_info=True)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=60)
    path = tmp_path / "logs" / "learner-0.jsonl"
    events = [json.loads(line) for line in path.read_text().splitlines()]
    assert [event["event"] for event in events] == ["weights sent", "from a library", "failed"]
    assert (events[0]["version"], events[0]["role"], events[0]["level"]) == (3, "learner-0", "info")
    assert "ZeroDivisionError" in events[2]["exception"]
    assert all("timestamp" in event for event in events)
    assert last_error(path) == "division by zero"
    assert last_error(tmp_path / "missing.jsonl") == ""


def test_trackers_write_every_step(tmp_path: Path) -> None:
    trackers = make_trackers(small_config(observe__trackers=["tensorboard"]), tmp_path)
    for step in (1, 2):
        trackers.log(step, {"reward/mean": step / 2})
    trackers.close()
    assert read_metrics(tmp_path / "metrics.jsonl") == [
        {"step": 1, "reward/mean": 0.5}, {"step": 2, "reward/mean": 1.0},
    ]  # fmt: skip
    assert list((tmp_path / "tensorboard").glob("events*"))


def test_wandb_runs_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_MODE", raising=False)
    trackers = make_trackers(small_config(observe__trackers=["wandb"]), tmp_path)
    trackers.log(1, {"reward/mean": 0.5})
    trackers.close()
    assert list((tmp_path / "wandb").glob("offline-run-*"))


def test_plain_view_prints_lines() -> None:
    out = io.StringIO()
    view = LiveView(Console(file=out, width=200), run="r", steps=3, max_staleness=4)
    with view:
        view.update(STATUS)
    assert out.getvalue() == (
        "step 3/3  reward 0.500  staleness 1.50 (max 2 of 4)  1,234 tok/s  idle: generators 10%, learners 2%\n"
    )


def test_plain_view_tells_the_last_evaluation_and_the_one_under_way() -> None:
    out = io.StringIO()
    evaluation = {
        "prompts_done": 12,
        "last": {"version": 2, "reward": 0.25},
        "running": [{"version": 4, "done": 3, "prompts": 9}],
    }
    with LiveView(Console(file=out, width=200), run="r", steps=3, max_staleness=4) as view:
        view.update(STATUS | {"eval": evaluation})
    assert out.getvalue().endswith("learners 2%  eval 0.250 (version 2), version 4: 3 of 9 prompts\n")


def test_terminal_view_shows_both_sides() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=120)
    view = LiveView(console, run="r", steps=3, max_staleness=4)
    with view:
        view.phase("starting")
        view.update(STATUS)
        view._live.refresh()  # type: ignore[union-attr]
    for part in ("3/3", "0.500", "1,234", "7 no_signal", "generator", "99"):
        assert part in out.getvalue()


@pytest.mark.parametrize(
    ("generator_idle", "learner_idle", "max_staleness", "start"),
    [
        (0.01, 0.4, 4, "generation-bound"),
        (0.4, 0.01, 4, "learner-bound"),
        (0.01, 0.02, 4, "balanced"),
        (0.4, 0.5, 0, "the sides take turns"),
        (0.2, 0.2, 2, "both sides wait"),
        (0.89, 0.12, 4, "learner-bound"),
        (0.15, 0.6, 4, "generation-bound"),
    ],
)
def test_verdict(generator_idle: float, learner_idle: float, max_staleness: int, start: str) -> None:
    text = bottleneck(generator_idle=generator_idle, learner_idle=learner_idle, max_staleness=max_staleness)
    assert text.startswith(start)
    assert f"{generator_idle:.0%}" in text


def test_report_draws_what_there_is_and_escapes_names(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.25}\n{"step": 2, "reward/mean": 0.75}\n{"st')
    summary = {"status": "failed", "error": "<script>", "bottleneck": "balanced", "staleness": {"histogram": [5, 7]}}
    page = write_report(tmp_path, summary).read_text()
    assert "&lt;script&gt;" in page
    assert "balanced" in page
    assert "0.25,0.75" in page.replace(" ", "")


def test_report_draws_evaluations_by_version(tmp_path: Path) -> None:
    results = [
        {"version": 0, "reward": 0.125, "pass@1": 0.0625, "pass@2": 0.09375, "sums/reward": 0.875},
        {"version": 7, "reward": 0.375, "pass@1": 0.3125, "pass@2": 0.34375, "sums/reward": 0.625},
    ]
    page = write_report(tmp_path, {"eval": results}).read_text().replace(" ", "")
    for line in ('"x":[0,7],"y":[0.125,0.375]', '"y":[0.0625,0.3125]', '"y":[0.09375,0.34375]', '"y":[0.875,0.625]'):
        assert line in page
    assert "Evaluation:" not in write_report(tmp_path, {}).read_text()
