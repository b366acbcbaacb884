"""Complete runs of the demo at small scale: real vLLM, DeepSpeed, ZeroMQ, Parquet and gloo in separate processes."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM, AutoTokenizer

from asyncrl.config.load import load_config
from asyncrl.launch.fork_server import ForkServer
from asyncrl.types import STALENESS_BUCKETS
from asyncrl.util.processes import ACTIVITIES
from tests.helpers.metric_names import undocumented
from tests.helpers.preloaded import Command
from tests.helpers.runs import SMALL, Launched, check_ledger

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

Start = Callable[..., Launched]
Asyncrl = Callable[..., str]

EVALUATION = ["data.eval=demo/arithmetic.parquet", "eval.samples=4", "eval.max_prompts=100"]
TRL_REWARD = '''
def accuracy_reward(completions, solution, **kwargs):
    """As in TRL's documentation: conversational completions and a column of the dataset."""
    contents = [completion[0]["content"] for completion in completions]
    assert kwargs["prompts"][0][-1]["role"] == "user" and kwargs["ability"] == ["math"] * len(contents)
    return [1.0 if content == answer else 0.0 for content, answer in zip(contents, solution)]
'''
VERL_REWARD = """
import time
from pathlib import Path
hung = Path(__file__).with_name("hung")
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert data_source == "verl" and extra_info["index"] >= 0
    if ground_truth.endswith("3"):
        raise RuntimeError("no threes")
    if ground_truth == "17" and (not hung.exists() or hung.stat().st_size < 3):
        with hung.open("a") as file:
            file.write(".")
        time.sleep(60)
    return {"score": float(solution_str.strip() == ground_truth), "length": len(solution_str)}
"""
"""A reward function that hangs three times: for several groups, for one group, and for one of its completions."""


@pytest.fixture(scope="module")
def chat_model(demo_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's model with a chat template that consists of the last message."""
    folder = tmp_path_factory.mktemp("chat") / "model"
    shutil.copytree(demo_folder / "demo" / "model", folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = "{{ messages[-1]['content'] }}"
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def users_files(tmp_path: Path) -> list[str]:
    """Settings for chats in verl's schema from two sources, one with a reward in verl's form and one in TRL's form."""
    rows: list[dict[str, Any]] = [
        {
            "data_source": "verl" if (a + b) % 2 else "trl",
            "prompt": [{"role": "user", "content": f"{a:02d}+{b:02d}="}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": f"{a + b:02d}"},
            "extra_info": {"split": "train", "index": 20 * a + b, "answer": None},
            "solution": f"{a + b:02d}",
        }
        for a in range(20)
        for b in range(20)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "verl.parquet")
    (tmp_path / "trl.py").write_text(TRL_REWARD)
    (tmp_path / "verl.py").write_text(VERL_REWARD)
    theirs = f"trl: {tmp_path}/trl.py:accuracy_reward, verl: {tmp_path}/verl.py:compute_score"
    return [
        f"data.train={tmp_path / 'verl.parquet'}",
        f"rewards={{{theirs}, default: exact}}",
        "generator.reward_timeout_s=1",
    ]


def test_one_run_has_everything(
    launch: Start, asyncrl: Asyncrl, chat_model: Path, users_files: list[str], demo_folder: Path
) -> None:
    """A run with data and rewards in the forms of other systems, some of which fail, with evaluation and trackers; then
    all commands that report on it."""
    steps = 20
    run = launch(
        "--max-staleness", "4", "--steps", str(steps), *SMALL, *EVALUATION, "eval.every_steps=8",
        f"model.path={chat_model}", *users_files, "observe.trackers=[tensorboard]",
    )  # fmt: skip
    run.wait_for_step(1)
    assert isinstance(run.process, Command)
    follower = Command(run.process.fork_server, run.folder, ["logs", run.run, "learner", "launcher", "-f"])
    watch(run)
    code, output = run.end(timeout_s=200)
    assert code == 0, output
    assert (follower.wait(20), follower.output().count("step done step=")) == (0, steps), follower.output()
    assert run.left_over() == []
    summary = check_folder(run, steps=steps, max_staleness=4)
    check_rewards(run, summary)
    check_evaluations(run, summary, output, versions=[0, 8, 16, 20])
    check_trackers(run)
    check_commands(run, asyncrl, summary["eval"][-1]["pass@1"])


def trained(run: Launched) -> list[dict[str, float]]:
    """Returns the metrics of steps, without rows of evaluations only."""
    return [row for row in run.rows() if "learner/loss" in row]


def check_folder(run: Launched, *, steps: int, max_staleness: int) -> dict[str, Any]:
    """Checks that the folder is complete and consistent. Returns the summary."""
    summary = run.summary()
    assert (summary["status"], summary["steps"], summary["policy_version"]) == ("finished", steps, steps)
    assert summary["staleness"]["limit"] == max_staleness
    assert summary["staleness"]["max"] <= max_staleness
    assert sum(summary["staleness"]["histogram"]) == summary["tokens_trained"]
    assert summary["weight_sync"]["count"] >= steps - 1
    assert summary["ledger"]["trained"] == steps * 8
    check_ledger(summary)
    for key in ("wall_s", "reward_first", "reward_last", "tokens_per_s", "idle", "bottleneck", "restarts"):
        assert key in summary
    for role in ("generator", "learner", "replay"):
        parts = summary["time"][role]
        assert sum(parts[activity] for activity in ACTIVITIES) == pytest.approx(1.0, abs=0.02)
    training_s = summary["tokens_trained"] / summary["tokens_per_s"]
    assert 0.98 * training_s <= summary["time"]["learner"]["seconds"] <= summary["wall_s"]
    rows = trained(run)
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    assert all(row["staleness/max"] <= max_staleness for row in rows)
    check_trace(run, summary)
    config = load_config(run.run_dir / "config.yaml")
    assert (config.steps, config.replay.max_staleness) == (steps, max_staleness)
    assert '"title":"Is it learning?"' in (run.run_dir / "report.html").read_text()
    for role in ("launcher", "replay", "generator-0", "learner-0"):
        assert run.events(role), f"no log of {role}"
    model = AutoModelForCausalLM.from_pretrained(run.run_dir / "model")
    tokenizer = AutoTokenizer.from_pretrained(run.run_dir / "model")
    assert model.config.vocab_size >= len(tokenizer)
    check_diagnostics(run, summary)
    return summary


def check_diagnostics(run: Launched, summary: dict[str, Any]) -> None:
    """Checks the run's reports of staleness and costs."""
    names = {name for row in run.rows() for name in row}
    assert undocumented(names, sources=["arithmetic", "trl", "verl"], parts=["length"]) == []
    for role, phase in (("generator", "engine"), ("learner", "forward")):
        parts = summary["time"][role]
        assert parts["phases"][phase] > 0.0 and sum(parts["phases"].values()) < 1.0
    assert summary["peak_memory_bytes"].keys() == {"generator", "learner", "replay"}
    assert all(peak > 10e6 for peak in summary["peak_memory_bytes"].values())
    last = trained(run)[-1]
    assert any(f"staleness/{bucket}/ess" in last for bucket in STALENESS_BUCKETS)
    for name in ("group/generate_s", "replay/staleness_limit", "generator/request_s"):
        assert name in last
    assert last["staleness/in_flight"] + last["staleness/in_queue"] == pytest.approx(last["staleness/mean"])
    split = summary["staleness"]
    assert split["in_flight"] + split["in_queue"] == pytest.approx(split["mean"])
    assert summary["generators_per_device"] == 1
    assert "another generator" in summary["simulated_gains"]
    _, _, rest = (run.run_dir / "report.html").read_text().partition('id="data">')
    (document,) = json.loads(rest.partition("</script>")[0])
    for part in ("timeline", "tiles", "charts", "histogram", "ledger", "gains", "config"):
        assert document[part], part
    assert document["staleness"]["lines"] and document["samples"]["trained"] and document["status"] == "finished"


def check_trace(run: Launched, summary: dict[str, Any]) -> None:
    trace = pq.read_table(run.run_dir / "trace.parquet").to_pylist()
    trained = [row for row in trace if row["outcome"] == "trained"]
    assert len(trained) == summary["ledger"]["trained"]
    assert len({(row["ticket"], row["attempt"]) for row in trace}) == len(trace)
    limit = summary["staleness"]["limit"]
    for row in trained:
        assert 0 <= row["train_version"] - row["start_version"] <= limit
        assert 0 <= row["started_s"] <= row["finished_s"] <= row["taken_s"] <= row["trained_s"]
        assert len(row["rewards"]) == len(row["prompt_tokens"]) == len(row["completion_tokens"])
    assert sum(sum(row["completion_tokens"]) for row in trained) == summary["tokens_trained"]


def check_rewards(run: Launched, summary: dict[str, Any]) -> None:
    """Checks that data and rewards of verl and TRL work unchanged, that a group fails if all of its rewards fail, and
    that a completion whose reward hangs is not trained."""
    assert summary["skipped_rows"] == 0
    assert 0.1 < summary["reward_first"] < 0.6
    assert summary["rewards_failed"] > 0
    events = run.events("replay")
    groups = [event["error"] for event in events if event["event"] == "group failed"]
    assert len(groups) == summary["ledger"]["refunded"]["failed"] > 0
    assert all("no threes" in error for error in groups), groups
    completions = [event["error"] for event in events if event["event"] == "rewards failed"]
    assert completions
    assert all("took longer than generator.reward_timeout_s = 1 s" in error for error in completions), completions
    rows = pq.read_table(run.run_dir / "trace.parquet").to_pylist()
    assert {row["data_source"] for row in rows if row["outcome"] == "trained"} == {"verl", "trl"}
    assert {row["data_source"] for row in rows if row["outcome"] == "failed"} == {"verl"}


def check_evaluations(run: Launched, summary: dict[str, Any], output: str, versions: list[int]) -> None:
    """Checks that every due version was evaluated while training continued."""
    results = summary["eval"]
    assert [result["version"] for result in results] == versions
    assert summary["eval_dropped"] == []
    for result in results:
        assert (result["prompts"], result["arithmetic/prompts"]) == (100, 100)
        assert 0 <= result["pass@1"] <= result["pass@2"] <= result["pass@4"] <= 1
        assert result["version"] <= result["at_step"] <= versions[-1]
    assert summary["eval_tokens"] == pytest.approx(400 * sum(result["completion_tokens"] for result in results))
    assert summary["tokens_generated"] == summary["ledger"]["tokens"]["generated"]
    rows = run.rows()
    assert sorted(row["eval/version"] for row in rows if "eval/version" in row) == versions
    first, last = results[0]["reward"], results[-1]["reward"]
    assert f"reward {first:.3f} -> {last:.3f} (version 0 -> {versions[-1]})" in output
    assert "Evaluation: pass@k" in (run.run_dir / "report.html").read_text()


def check_trackers(run: Launched) -> None:
    board = EventAccumulator(str(run.run_dir / "tensorboard"))
    board.Reload()
    logged = [(event.step, event.value) for event in board.Scalars("reward/mean")]
    assert logged == [(row["step"], pytest.approx(row["reward/mean"], rel=1e-5)) for row in trained(run)]


def check_commands(run: Launched, asyncrl: Asyncrl, last_pass: float) -> None:
    """Checks the commands on the run: simulate, plan, ledger, and an evaluation of the model with the result of the
    last version's evaluation."""
    folder = str(run.run_dir)
    assert "measured" in asyncrl("simulate", "--from", folder)
    assert "asyncrl launch --config" in asyncrl("plan", "--from", f"{folder}/trace.parquet", "--devices", "3")
    assert "trained" in asyncrl("ledger", folder)
    check_logs(run, asyncrl)
    told = asyncrl("eval", "--config", "demo", *EVALUATION, "--run", run.run, "--out", "results/eval.json")
    assert all(label in told for label in ("arithmetic", "all", "pass@4"))
    report = json.loads((run.folder / "results" / "eval.json").read_text())
    assert report["model"] == str(Path("runs") / run.run / "model")
    assert (report["settings"]["samples"], len(report["prompts"])) == (4, 100)
    assert report["metrics"]["pass@1"] == pytest.approx(last_pass, abs=0.1)
    rewards = [reward for prompt in report["prompts"] for reward in prompt["rewards"]]
    assert len(rewards) == 400
    assert report["metrics"]["reward"] == pytest.approx(sum(rewards) / 400)


def check_logs(run: Launched, asyncrl: Asyncrl) -> None:
    """Checks that `asyncrl logs` prints every event of the roles once, by time."""
    roles = sorted(path.stem for path in (run.run_dir / "logs").glob("*.jsonl"))
    printed = [line for line in asyncrl("logs", run.run).splitlines() if not line.startswith(" ")]
    assert Counter(line.split()[2] for line in printed) == {role: len(run.events(role)) for role in roles}
    assert [line[:23] for line in printed] == sorted(line[:23] for line in printed)
    assert sum("step done step=" in line for line in asyncrl("logs", str(run.run_dir), "learner").splitlines()) == 20


def watch(run: Launched) -> None:
    """Checks that `asyncrl top` shows a step of the run and ends on Ctrl-C."""
    assert isinstance(run.process, Command)
    view = Command(run.process.fork_server, run.folder, ["top", str(run.run_dir)])
    try:
        shows_step = re.compile(r"^step +\d+/", re.MULTILINE)
        run.wait_until(lambda: bool(shows_step.search(view.output())), what="a step in the view", timeout_s=20)
        view.send_signal(signal.SIGINT)
        assert view.wait(20) == 0
    finally:
        view.kill()


def test_a_folder_is_evaluated_without_a_config(demo_folder: Path, asyncrl: Asyncrl) -> None:
    data = ["data.eval=demo/arithmetic.parquet", "eval.max_prompts=20", "eval.samples=2", "generator.max_new_tokens=8"]
    told = asyncrl("eval", "--model", "demo/model", *data, "--out", "results/m.json", "--out", "results/m.parquet")
    assert "evaluating demo/model on 20 prompts" in told
    report = json.loads((demo_folder / "results" / "m.json").read_text())
    assert report["model"] == "demo/model" and report["settings"]["rewards"] == "exact"
    rows = pq.read_table(demo_folder / "results" / "m.parquet").to_pylist()
    assert len(rows) == 40 and all(row["prompt"] and row["completion"] for row in rows)
    rewards = [reward for prompt in report["prompts"] for reward in prompt["rewards"]]
    assert [row["reward"] for row in rows] == rewards
    assert rewards == [float(row["completion"].strip() == row["ground_truth"]) for row in rows]


@pytest.mark.slow
def test_interrupted_eval_ends_its_workers_and_writes_nothing(
    demo_folder: Path, preloaded: ForkServer, tmp_path: Path
) -> None:
    out = tmp_path / "eval.json"
    arguments = ["eval", "--config", "demo", *EVALUATION, "eval.max_prompts=5000", "eval.samples=64", "--out", str(out)]
    command = Command(preloaded, demo_folder, arguments)
    try:
        deadline_s = time.monotonic() + 60
        while "evaluating demo/model" not in command.output():
            assert command.poll() is None and time.monotonic() < deadline_s, command.output()
            time.sleep(0.02)
        children = psutil.Process(command.pid).children(recursive=True)
        os.killpg(command.pid, signal.SIGINT)  # like a terminal, also to the workers
        output, _ = command.communicate(timeout=60)
    finally:
        command.kill()
    assert command.returncode == 130, output
    assert "interrupted after" in output
    assert "Traceback" not in output
    assert not out.exists()
    psutil.wait_procs(children, timeout=5)
    assert [child for child in children if child.is_running()] == []


@pytest.mark.slow
def test_synchronous_run(launch: Start) -> None:
    run = launch("--max-staleness", "0", "--steps", "20", *SMALL)
    code, output = run.end(timeout_s=200)
    assert code == 0, output
    assert run.left_over() == []
    check_folder(run, steps=20, max_staleness=0)


@pytest.mark.slow
def test_two_generators_and_two_learners(launch: Start) -> None:
    run = launch("--generators", "2", "--learners", "2", "--steps", "4", *SMALL, "learner.zero_stage=2")
    code, output = run.end(timeout_s=250)
    assert code == 0, output
    check_ledger(run.summary())
    assert run.left_over() == []
    told = {role: [event["event"] for event in run.events(role)] for role in ("generator-0", "generator-1")}
    # A generator that was not up before the other had generated everything is stopped during its start.
    assert all(events[-1] == "ended" or "engine is up" not in events for events in told.values()), told
    assert any(events[-1] == "ended" for events in told.values()), told
    for role in ("learner-0", "learner-1"):
        assert run.events(role)[-1]["event"] == "ended", role


@pytest.mark.slow
@pytest.mark.parametrize("role", ["generator-0", "learner-0", "replay"])
def test_killed_role_ends_a_run_without_restarts_with_its_name(launch: Start, role: str) -> None:
    run = launch("--steps", "100000", *SMALL, "launch.max_restarts=0")
    run.wait_for_step(1)
    run.note_tree()
    os.kill(run.pid(role), signal.SIGKILL)
    killed_s = time.monotonic()
    code, output = run.end(timeout_s=30)
    assert time.monotonic() - killed_s < 10
    assert code == 1
    assert f"{role} was killed by signal SIGKILL" in output
    assert run.left_over() == []
    summary = run.summary()
    assert summary["status"] == "failed"
    assert summary["error"] == f"{role} was killed by signal SIGKILL"
    if role != "replay":
        check_ledger(summary)


@pytest.mark.slow
def test_a_run_under_nohup_survives_sighup_next_to_files_named_as_modules(demo_folder: Path, tmp_path: Path) -> None:
    """The name of the file is that of verl's reward for MATH; roles import the standard library's."""
    for name in ("code", "random", "statistics", "token", "types"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a file of the user')\n")
    reward = "def compute_score(solution_str, ground_truth):\n    return float(solution_str.strip() == ground_truth)\n"
    (tmp_path / "math.py").write_text(reward)
    (tmp_path / "demo").symlink_to(demo_folder / "demo")
    asyncrl = Path(sys.executable).with_name("asyncrl")
    command = ["nohup", str(asyncrl), "launch", "--config", "demo", "--run", "kept", "--steps", "8", *SMALL]
    process = subprocess.Popen(
        [*command, "rewards=math.py:compute_score"],
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        metrics = tmp_path / "runs/kept/metrics.jsonl"
        deadline_s = time.monotonic() + 100
        while not (metrics.is_file() and metrics.read_text()) and process.poll() is None:
            assert time.monotonic() < deadline_s, "no first step"
            time.sleep(0.1)
        process.send_signal(signal.SIGHUP)
        output, _ = process.communicate(timeout=100)
        assert process.returncode == 0, output
        assert json.loads((tmp_path / "runs/kept/summary.json").read_text())["status"] == "finished"
    finally:
        process.kill()
        process.wait()
