"""Logs, trackers, live view and report."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

from rich.console import Console

from asyncrl.observe.live import LiveView
from asyncrl.observe.logs import last_error

STATUS = {
    "step": 3, "reward": 0.5, "staleness_mean": 1.5, "staleness_max": 2, "tokens_per_s": 1234.0,
    "generator_idle": 0.1, "generator_environments": 0.0, "learner_idle": 0.02,
    "leased": 4, "finished": 5, "trained": 6,
    "refunded": {"zero_variance": 7}, "metrics": {"learner/entropy": 0.7, "learner/grad_norm": 0.3},
    "generators": {
        "0": {"version": 2, "leased": 4, "tokens": 99, "idle": 0.1, "environments": 0.0, "live_episodes": 0,
              "waiting_episodes": 0},
    },
    "eval": {"prompts_done": 0, "last": None, "running": []},
    "generators_wanted": 1, "catching_up": None, "collapse": {},
}  # fmt: skip


def test_logs_are_json_with_role_level_time_and_traceback(tmp_path: Path) -> None:
    code = (
        "import sys, logging, structlog; from pathlib import Path; from asyncrl.observe.logs import configure_logs\n"
        "configure_logs(Path(sys.argv[1]), 'learner-0'); log = structlog.get_logger()\n"
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


def test_views_tell_of_missing_generators_restarts_and_a_catch_up() -> None:
    disturbed = STATUS | {"generators_wanted": 3, "catching_up": {"step": 2, "of": 3}}
    told = "1 of 3 generators, restarts 4, training step 2 of 3 again"
    out = io.StringIO()
    with LiveView(Console(file=out, width=200), run="r", steps=3, max_staleness=4) as view:
        view.update(disturbed, restarts=4)
    assert out.getvalue().endswith(f"learners 2%  {told}\n")
    console = Console(file=io.StringIO(), force_terminal=True, width=160, height=50)
    with LiveView(console, run="r", steps=3, max_staleness=4) as view:
        view.update(disturbed, restarts=4)
        view._live.refresh()  # type: ignore[union-attr]
    assert told in console.file.getvalue()  # type: ignore[attr-defined]


LAGS = {
    "staleness/0/tokens_fraction": 0.75, "staleness/0/ratio_mean": 1.0,
    "staleness/0/ratio_max": 1.0, "staleness/0/kl": 0.0, "staleness/0/ess": 1.0,
    "staleness/0/clip_positive": 0.0, "staleness/0/mask_positive": 0.0,
    "staleness/3-4/tokens_fraction": 0.25, "staleness/3-4/ratio_mean": 1.25,
    "staleness/3-4/ratio_max": 3.5, "staleness/3-4/kl": 0.125,
    "staleness/3-4/ess": 0.625, "staleness/3-4/clip_positive": 0.5,
    "staleness/3-4/clip_negative": 0.25, "staleness/3-4/mask_positive": 0.125,
    "staleness/3-4/mask_negative": 0.0,
}  # fmt: skip


def test_plain_view_tells_a_verdict_once() -> None:
    out = io.StringIO()
    with LiveView(Console(file=out, width=200), run="r", steps=3, max_staleness=4) as view:
        for sentence in ("balanced", "balanced", "learner-bound"):
            view.judge(sentence)
    assert out.getvalue() == "balanced\nlearner-bound\n"


COLLAPSE = {
    "active": True, "sentence": "collapsed at step 12: the policy [x] was far. The updates are too large: lower it",
    "alarms": [{"raised_step": 14}],
}  # fmt: skip


def test_plain_view_tells_of_a_collapse_at_once_and_once_for_each_alarm() -> None:
    out = io.StringIO()
    again = COLLAPSE | {"sentence": "with another one", "alarms": [{"raised_step": 14}, {"raised_step": 20}]}
    with LiveView(Console(file=out, width=200), run="r", steps=300, max_staleness=4) as view:
        view.update(STATUS | {"step": 12})
        view.judge("generator-bound")
        for step, collapse in ((14, COLLAPSE), (15, COLLAPSE | {"sentence": "worse"}), (20, again), (21, again)):
            view.update(STATUS | {"step": step, "collapse": collapse})
            view.judge(collapse["sentence"])
        view.update(STATUS | {"step": 40, "collapse": again | {"active": False}})
        view.judge("learner-bound")
    assert [line for line in out.getvalue().splitlines() if not line.startswith("step")] == [
        "generator-bound", COLLAPSE["sentence"], "with another one", "learner-bound",
    ]  # fmt: skip


def test_no_file_of_a_run_has_a_secret(tmp_path: Path) -> None:
    code = (
        "import sys, logging, os, structlog; from pathlib import Path\n"
        "from asyncrl.observe.logs import configure_logs; from asyncrl.observe.trackers import make_trackers\n"
        "from asyncrl.util.text import keep_secret; from tests.helpers.replay import small_config\n"
        "run = Path(sys.argv[1]); configure_logs(run, 'learner-0'); log = structlog.get_logger()\n"
        "key, password = os.environ['WANDB_API_KEY'], os.environ['DB_PASSWORD']\n"
        "keep_secret('curve-secret')\n"
        "log.info('env', environment=dict(os.environ), pair=(1, key), nested=[{'a': f'x{password}x'}],\n"
        "         path=Path(key))\n"
        "logging.getLogger('other').warning('with %s', key)\n"
        "log.info('keys', text='it is curve-secret', number=12345678, none=None)\n"
        "try: raise ValueError(f'login with {key} failed')\n"
        "except ValueError as error: log.error('failed', error=str(error), exc_info=True)\n"
        "config = small_config(observe__trackers=['tensorboard', 'wandb'])\n"
        "(run / 'config.yaml').write_text(config.to_yaml())\n"
        "trackers = make_trackers(config, run); trackers.log(1, {'reward/mean': 0.5}); trackers.close()\n"
    )
    secrets = {"WANDB_API_KEY": "0123456789" * 4, "DB_PASSWORD": 'quoted"and\\back'}
    environment = os.environ | secrets | {"PYTHONPATH": str(Path(__file__).parents[2]), "SHORT_TOKEN": "1234567"}
    environment.pop("WANDB_MODE", None)
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=100, env=environment)
    events = [json.loads(line) for line in (tmp_path / "logs" / "learner-0.jsonl").read_text().splitlines()][:4]
    assert (events[0]["pair"], events[0]["nested"], events[0]["path"]) == ([1, "***"], [{"a": "x***x"}], "***")
    assert events[0]["environment"]["SHORT_TOKEN"] == "***", "its name says that it is one"
    assert (events[1]["event"], events[2]["text"], events[2]["number"]) == ("with ***", "it is ***", 12345678)
    assert "login with *** failed" in events[3]["exception"]
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert {file.name for file in files} >= {"learner-0.jsonl", "config.yaml", "metrics.jsonl"}
    for file in files:
        for secret in (*secrets.values(), json.dumps(secrets["DB_PASSWORD"])[1:-1], "curve-secret"):
            assert secret.encode() not in file.read_bytes(), file
