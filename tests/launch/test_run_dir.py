"""The run folder: one live run per name, earlier runs are kept, and what may change when a run is resumed."""

from __future__ import annotations

import io
import json
import os
import shutil
import stat
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from asyncrl.config.config import Config
from asyncrl.config.load import load_config
from asyncrl.errors import ConfigError
from asyncrl.launch import run_dir as module
from asyncrl.launch.rollback import QUEUE_STATE, cut_rows, discard_journal
from asyncrl.launch.run import launch
from asyncrl.launch.run_dir import (
    ATTEMPTS,
    RunFolder,
    check_resume,
    fingerprint,
    fingerprints,
    is_running,
    read_endpoints,
    run_endpoints,
)
from asyncrl.learner.checkpoint import CheckpointManifest, sum_of, write_manifest
from asyncrl.observe.curves import read_metrics
from asyncrl.wire.endpoints import Endpoints
from asyncrl.wire.sockets import read_keys
from tests.helpers.cli import asyncrl
from tests.helpers.inputs import make_inputs
from tests.helpers.replay import loopback_endpoints, small_config

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(autouse=True)
def in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def attempt(config: Config, status: str = "", *, steps: int = 1, wall_s: float = 10.0) -> RunFolder:
    """Records a launch that ended with this status, or was killed if the status is empty."""
    with RunFolder(config) as folder:
        folder.begin(config, loopback_endpoints(1), [])
        (folder.path / "journal").mkdir(exist_ok=True)
        if status:
            folder.write_summary(folder.summary({"status": status, "steps": steps, "wall_s": wall_s}))
    return folder


def must(**settings: object) -> Config:
    return small_config(**{"run": "one", "resume": "must"} | settings)


def test_resumed_run_continues_in_its_folder_with_the_time_of_all_launches() -> None:
    attempt(small_config(run="one"), "stopped", wall_s=10.0)
    attempt(must(), "failed", wall_s=5.0)
    assert json.loads(Path("runs/one/summary.json").read_text())["wall_s"] == 15.0
    with RunFolder(must(launch__generators=3)) as folder:
        assert folder.moved_to is None
        assert (folder.path / "journal").is_dir()
        folder.begin(folder.config, loopback_endpoints(1), [])
        assert not (folder.path / "summary.json").exists()
        assert json.loads((folder.path / ATTEMPTS).read_text()) == [10.0, 5.0]
        assert load_config(folder.path / "config.yaml").launch.generators == 3
        summary = folder.summary({"wall_s": 1.0})
        assert (summary["wall_s"], summary["attempts"]) == (16.0, 3)


def test_time_of_a_killed_launch_ends_with_what_it_wrote_last() -> None:
    folder = attempt(small_config(run="one"))
    began_s = (folder.path / "config.yaml").stat().st_mtime
    log = folder.path / "logs" / "replay.jsonl"
    log.parent.mkdir()
    log.write_text("{}\n")
    os.utime(log, (began_s + 30, began_s + 30))
    with RunFolder(must()) as again:
        assert again.earlier_s == pytest.approx([30.0], abs=0.01)


@pytest.mark.parametrize(("status", "steps"), [("finished", 2), ("", 0)])
def test_auto_resumes_an_unfinished_run(status: str, steps: int) -> None:
    auto = small_config(run="one", resume="auto")
    assert not check_resume(auto), "no run exists yet"
    attempt(auto, status, steps=steps)
    assert check_resume(auto)
    with RunFolder(auto) as folder:
        assert folder.moved_to is None and (folder.path / "journal").is_dir()


def test_auto_leaves_a_finished_run_where_it_is() -> None:
    """A scheduler repeats the command; trained again, the model would be gone from its path."""
    auto = small_config(run="one", resume="auto")
    folder = attempt(auto, "finished", steps=3)
    output = io.StringIO()
    assert launch(auto, Console(file=output, width=1000)) == 0
    assert output.getvalue() == f"{folder.path} has finished its 3 steps; raise --steps to train on\n"
    assert (folder.path / "journal").is_dir() and not folder.path.with_name("one.1").exists()


def test_without_resume_an_unfinished_run_is_moved_aside() -> None:
    attempt(small_config(run="one"), "failed")
    with RunFolder(small_config(run="one")) as folder:
        assert folder.moved_to == Path("runs/one.1")


def test_must_needs_a_run_that_is_not_finished() -> None:
    attempt(small_config(run="other"), "failed")
    with pytest.raises(ConfigError, match=r"run = 'one': there is no such run to resume in runs/ \(of other\)"):
        check_resume(must())
    attempt(small_config(run="one"), "finished", steps=3)
    with pytest.raises(
        ConfigError, match=r"'one': it has finished its 3 steps, there is nothing to resume; raise --st"
    ):
        check_resume(must())
    assert check_resume(must(steps=4))


def test_live_run_is_not_resumed() -> None:
    with RunFolder(small_config(run="one")) as folder:
        folder.begin(folder.config, loopback_endpoints(1), [])
        with pytest.raises(ConfigError, match="run = 'one': a run of this name is running"):
            RunFolder(must()).__enter__()


def test_settings_of_algorithm_and_data_must_not_change() -> None:
    attempt(small_config(run="one"), "failed")
    with pytest.raises(ConfigError) as caught:
        check_resume(must(learner__optimizer_options={"weight_decay": 1.0}, seed=4, algorithm__loss="cispo"))
    text = str(caught.value)
    assert "learner.optimizer_options.weight_decay: it was 0.01, now 1.0" in text
    assert "seed: it was 0, now 4" in text
    assert "algorithm.loss: it was 'ppo_clip', now 'cispo'" in text
    assert "start another run with --run NAME" in text
    assert "resume: " not in text
    free = {"launch__generators": 5, "steps": 9, "learner__tokens_per_microbatch": 99, "checkpoint__every_steps": 7}
    assert check_resume(must(**free, generator__max_running_groups=3, observe__samples=1))
    way_out = {
        "learner__lr": 1e-7,
        "critic__lr": 1e-6,
        "learner__max_grad_norm": 0.1,
    }
    with pytest.raises(ConfigError, match=r"generator.engine_options.max_model_len: it was None, now 999"):
        check_resume(must(generator__engine_options={"max_model_len": 999, "block_size": 32}))
    assert check_resume(must(generator__engine_options={"enable_prefix_caching": True, "block_size": 32}))
    assert check_resume(must(**way_out)), "the advice in the error for non-finite updates"


def test_the_config_of_a_resumed_run_starts_a_new_one_elsewhere() -> None:
    attempt(small_config(run="one"), "failed")
    attempt(must(), "failed")
    assert load_config("runs/one/config.yaml").resume == "never"


def test_metrics_of_steps_that_are_lost_go_aside(tmp_path: Path) -> None:
    file, aside = tmp_path / "metrics.jsonl", tmp_path / "aside"
    aside.mkdir()
    file.write_text("".join(f'{{"step": {step}, "learner/loss": 0.5}}\n' for step in (1, 2, 3, 4)) + '{"step": 5, "le')
    cut_rows(file, 2, aside)
    assert [row["step"] for row in read_metrics(file)] == [1, 2]
    assert [row["step"] for row in read_metrics(aside / "metrics.jsonl")] == [3, 4]


def test_a_discarded_journal_keeps_the_state_to_resume_from(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    checkpoint = run_dir / "checkpoints" / "step-000002"
    checkpoint.mkdir(parents=True)
    (run_dir / "journal").mkdir()
    (run_dir / "trace.arrow").write_bytes(b"trace")
    (run_dir / "metrics.jsonl").write_text('{"step": 3}\n')
    (checkpoint / "queue.msgpack").write_bytes(b"queue")
    files = {"queue.msgpack": sum_of(checkpoint / "queue.msgpack")}
    write_manifest(checkpoint, CheckpointManifest(step=2, reward=None, files=files))
    discard_journal(run_dir)
    shutil.rmtree(checkpoint)  # a newer checkpoint replaced it before the replay queue died
    assert (run_dir / QUEUE_STATE).read_bytes() == b"queue"
    aside = run_dir / "journal.discarded-1"
    assert sorted(path.name for path in aside.iterdir()) == ["journal", "metrics.jsonl", "trace.arrow"]
    assert (run_dir / "trace.arrow").read_bytes() == b"trace"


def test_endpoints_are_accessible_to_their_owner_while_the_run_is_live() -> None:
    endpoints = loopback_endpoints(5)
    with pytest.raises(ConfigError, match="runs/one: there is no such run"):
        read_endpoints(Path("runs/one"))
    with RunFolder(small_config(run="one")) as folder:
        folder.begin(folder.config, endpoints, [])
        file = folder.path / "endpoints.json"
        assert file.stat().st_mode & 0o777 == 0o600
        assert read_endpoints(folder.path) == endpoints
        kept = file.read_text()
    assert not file.exists()
    file.write_text(kept)  # the state after the launcher was killed
    assert not is_running(folder.path)
    with pytest.raises(ConfigError, match="runs/one: this run is not running"):
        read_endpoints(folder.path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["launch", "--resume"], "run = 'run': there is no such run to resume in runs/ (of one)"),
        (["launch", "--resume", "--run", "onne"], "run = 'onne': there is no such run to resume in runs/ (of one)"),
        (["launch", "--resume", "--run", "one", "learner.epochs=2"], "learner.epochs: it was 1, now 2"),
        (["launch", "--resume", "--run", "one", "--config", "demo"], "replay.groups_per_step: it was 2, now 32"),
        (["launch", "--run", "one", "--discard-journal"], "--discard-journal: is for a run that goes on"),
        (["scale", "--run", "nowhere", "--generators", "2"], "runs/nowhere: there is no such run"),
        (["scale", "--run", "one", "--generators", "2"], "runs/one: this run is not running"),
        (["scale", "--run", "one", "--generators", "0"], "--generators 0: a run needs at least 1"),
        (["retrain", "runs/nowhere"], "runs/nowhere: not the folder of a run, config.yaml is missing"),
        (["retrain", "runs/one", "seed=3"], "seed: it was 0, now 3"),
        (["retrain", "runs/one", "learner.zero_stage=2"], "learner.zero_stage: it was 0, now 2"),
        (["retrain", "runs/one", "algorithm.loss=cispoo"], "model.path = 'model': no such folder"),
        (["retrain", "runs/one", "learner.lr=-1"], "learner.lr = -1: input should be greater than 0"),
    ],
)
def test_commands_refuse_impossible_values(arguments: list[str], message: str) -> None:
    attempt(small_config(run="one"), "stopped")
    before = sorted(Path("runs").rglob("*"))
    code, output = asyncrl(*arguments)
    assert code == 2, output
    assert message in output
    assert sorted(Path("runs").rglob("*")) == before


def test_earlier_runs_are_moved_aside_never_lost() -> None:
    config = small_config(run="again")
    for number in range(3):
        with RunFolder(config) as folder:
            folder.write_summary({"number": number})
    assert json.loads(Path("runs/again/summary.json").read_text()) == {"number": 2}
    assert json.loads(Path("runs/again.1/summary.json").read_text()) == {"number": 0}
    assert json.loads(Path("runs/again.2/summary.json").read_text()) == {"number": 1}


def test_a_folder_that_is_not_a_run_is_moved_aside_unchanged() -> None:
    theirs = Path("runs/again")
    theirs.mkdir(parents=True)
    (theirs / "thesis.txt").write_text("years of work")
    with RunFolder(small_config(run="again", resume="auto")) as folder:
        assert folder.moved_to == Path("runs/again.1")
    assert Path("runs/again.1/thesis.txt").read_text() == "years of work"


def test_a_new_run_is_its_owners_and_an_older_one_keeps_its_mode() -> None:
    before = os.umask(0)
    try:
        with RunFolder(small_config(run="mine")) as folder:
            assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
            folder.begin(folder.config, loopback_endpoints(1), [])
        folder.path.chmod(0o750)
        with RunFolder(small_config(run="mine", resume="must")) as folder:
            assert stat.S_IMODE(folder.path.stat().st_mode) == 0o750
    finally:
        os.umask(before)


def test_two_live_runs_of_one_name_are_refused() -> None:
    config = small_config(run="twice")
    with (
        RunFolder(config),
        pytest.raises(ConfigError, match=r"run = 'twice': a run of this name is running \(process"),
    ):
        RunFolder(config).__enter__()


def test_the_written_config_reproduces_the_run() -> None:
    config = small_config(run="same", seed=5)
    with RunFolder(config) as folder:
        folder.begin(config, loopback_endpoints(1), [])
        assert load_config(folder.path / "config.yaml") == config


def test_summary_has_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HUB_TOKEN", "hf_0123456789")
    with RunFolder(small_config(run="one")) as folder:
        told = {"error": "learner-0: hf_0123456789 is refused", "wall_s": 2.0, "eval": [{"reward": 0.5}], "x": None}
        summary = folder.summary(told)
    assert summary == told | {"error": "learner-0: *** is refused", "attempts": 1}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    _, rows = make_inputs(tmp_path)
    pq.write_table(pa.Table.from_pylist(rows), "held.parquet")
    Path("mine.py").write_text("def score(): return 1.0\n")
    Path("more.py").write_text("def bonus(): return 1.0\n")
    return tmp_path


def config(**settings: object) -> Config:
    return small_config(
        run="one", model__path="model", data__train="data.parquet", data__eval="held.parquet",
        rewards={"mine.py:score": 1.0, "exact": 0.5}, eval__rewards="more.py:bonus", **settings,
    )  # fmt: skip


def start() -> None:
    with RunFolder(config()) as run:
        run.begin(config(), loopback_endpoints(1), [])
        run.write_summary(run.summary({"status": "stopped", "steps": 1, "wall_s": 1.0}))


def other_rows(file: str) -> None:
    """As many rows, in a file of the same size and time."""
    before = os.stat(file)
    table = pq.read_table(file).to_pylist()
    pq.write_table(pa.Table.from_pylist([row | {"prompt": "2+1="} for row in table]), file)
    assert os.stat(file).st_size == before.st_size
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_as_many_other_rows_are_refused_unless_they_are_accepted(folder: Path) -> None:
    start()
    assert check_resume(config(resume="must"))
    other_rows("data.parquet")
    for resume in ("must", "auto"):
        with pytest.raises(ConfigError, match=r"^data\.train: data\.parquet has other content .* \(--accept-data\)"):
            check_resume(config(resume=resume))
    code, output = asyncrl("launch", "--accept-data", "--run", "one")
    assert code == 2 and "--accept-data: is for a run that goes on; give --resume too" in output
    code, output = asyncrl("launch", "--resume", "--accept-data", "--run", "one", "data.shuffle=false")
    assert code == 2 and "data.train" not in output and "data.shuffle: it was True" in output  # refused for that alone
    with RunFolder(config(resume="must")) as run:
        run.begin(run.config, loopback_endpoints(1), [])
    assert check_resume(config(resume="must"))
    other_rows_again = pq.read_table("data.parquet").to_pylist()
    pq.write_table(pa.Table.from_pylist([row | {"prompt": "3+1="} for row in other_rows_again]), "data.parquet")
    with pytest.raises(ConfigError, match=r"^data\.train: data\.parquet"):
        check_resume(config(resume="must"))


def test_a_copied_folder_has_the_same_fingerprints(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = fingerprints(config())
    assert [name for name, _ in before] == ["data.parquet"]
    shutil.copytree(folder, folder / "copy", copy_function=shutil.copyfile)
    monkeypatch.chdir(folder / "copy")
    assert fingerprints(config()) == before


def test_of_large_files_the_ends_and_parts_between_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "COMPLETE_BYTES", 1000)
    monkeypatch.setattr(module, "BLOCK_BYTES", 10)
    content = bytearray(200_000)
    Path("large").write_bytes(content)
    first = fingerprint(Path("large"))
    for place in (0, -1, (len(content) - 10) * 31 // 63):
        other = bytearray(content)
        other[place] = 1
        Path("large").write_bytes(other)
        assert fingerprint(Path("large")) != first
    Path("large").write_bytes(content)
    assert fingerprint(Path("large")) == first


def test_a_run_without_fingerprints_is_resumed(folder: Path) -> None:
    start()
    (Path("runs/one") / module.FILE).unlink()
    other_rows("data.parquet")
    with RunFolder(config(resume="must")) as run:
        run.begin(run.config, loopback_endpoints(1), [])
    assert json.loads((Path("runs/one") / module.FILE).read_text()).keys() >= {"data.train"}


WITH_ALL = small_config(launch__learners=2, critic__ranks=2, algorithm__advantage="gae")


def all_addresses(endpoints: Endpoints) -> list[str]:
    stores = [endpoints.weights, endpoints.learners, endpoints.critic_ranks]
    return [endpoints.replay, endpoints.reward_model, *stores, *endpoints.critics]


def test_on_other_addresses_zeromq_listens_on_encrypted_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "is_loopback", lambda host: False)
    with run_endpoints(WITH_ALL, reward_model=True) as endpoints:
        replay, *others = all_addresses(endpoints)
        assert replay.startswith("tcp://127.0.0.1:") and endpoints.folder == "" and endpoints.announces
        assert len(set(others)) == 6 and all(address.startswith("run:") for address in others)
        assert {endpoints.listening(address) for address in others} == {"tcp://127.0.0.1:*"}
        read_keys(endpoints.keys)


def test_a_run_has_only_needed_endpoints_and_a_random_id() -> None:
    with run_endpoints(small_config(run="one")) as endpoints, run_endpoints(small_config(run="one")) as others:
        assert (endpoints.reward_model, endpoints.critics) == ("", ())
        assert endpoints.folder != others.folder
        name, _, secret = endpoints.run_id.rpartition("-")
        assert name == "one" and len(secret) == 32 and secret not in others.run_id
