"""A run that collapsed goes back to a checkpoint from before, once, whenever its launcher is killed."""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from asyncrl.config.config import Config
from asyncrl.config.load import load_config
from asyncrl.errors import ConfigError
from asyncrl.launch import run_dir as run_dir_module
from asyncrl.launch.rollback import MAX_ROLLBACKS, collapse_error, discard_journal, is_due, resume_point
from asyncrl.launch.run_dir import RunFolder, read_summary
from asyncrl.learner.checkpoint import CheckpointManifest, finished_steps, sum_of, write_manifest
from asyncrl.observe.collapse import read_rollbacks
from asyncrl.observe.curves import read_metrics
from asyncrl.observe.samples import evaluated_versions
from asyncrl.observe.trace import TraceWriter
from asyncrl.replay.codec import pack_group
from asyncrl.replay.queue import ReplayQueue
from tests.helpers.replay import EndlessPrompts, ask_queue, loopback_endpoints, make_group, small_config

RUN = Path("runs/one")
LR = 1e-3
SAVED_STEPS = (2, 4, 6)
ONSET, RAISED = 5, 7
DIVERGED = {"correction/behavior_kl": 1.0}


@pytest.fixture(autouse=True)
def in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def config_of(**settings: object) -> Config:
    own = {"run": "one", "steps": 20, "learner__lr": LR, "learner__on_collapse": "rollback"}
    return small_config(**own | settings)


@pytest.fixture(scope="module")
def collapsed(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[int, bytes]]:
    """The summary of a queue whose training diverges in step ONSET, and its state in the steps that are saved."""
    config = config_of()
    queue = ReplayQueue(config, EndlessPrompts(), TraceWriter(tmp_path_factory.mktemp("queue") / "trace.parquet"))
    states = dict[int, bytes]()
    for step in range(1, RAISED + 1):
        for lease in ask_queue(queue, 0, step - 1, 100)[0]:
            queue.finish(*pack_group(make_group(lease, step - 1, rewards=(-1.0, 1.0))))  # never above 0: it gets worse
        assert queue.take(0, step)[0] == "shard"
        committed = queue.commit(step, {"learner/wait_s": 0.1} | (DIVERGED if step >= ONSET else {}))
        assert committed.collapsed == (step == RAISED)
        states[step] = queue.store.snapshot()
    summary = queue.summary() | {"status": "failed", "wall_s": 1.0}
    queue.store.close()
    return summary, states


@pytest.fixture
def stopped(collapsed: tuple[dict[str, Any], dict[int, bytes]]) -> Callable[..., Config]:
    """Makes the folder of a run that stopped since it collapsed, after earlier rollbacks of it."""
    summary, states = collapsed

    def make(config: Config, *, saved: tuple[int, ...] = SAVED_STEPS, at_once: bool = True) -> Config:
        with RunFolder(config) as folder:
            folder.begin(config, loopback_endpoints(1), [])
            write_steps(states, saved)
            if at_once:
                folder.write_summary(folder.summary(summary))
        return load_config(RUN / "config.yaml", {"resume": "must"})

    return make


def write_steps(states: dict[int, bytes], saved: tuple[int, ...]) -> None:
    (RUN / "journal").mkdir(exist_ok=True)
    (RUN / "journal" / "00000001.arrow").write_bytes(b"journal")
    (RUN / "trace.parquet").write_bytes(b"trace")
    (RUN / "metrics.jsonl").write_text("".join(f'{{"step": {step}}}\n' for step in range(1, RAISED + 1)))
    (RUN / "samples").mkdir(exist_ok=True)
    (RUN / "samples" / "trained.jsonl").write_bytes((RUN / "metrics.jsonl").read_bytes())
    for version in (4, 6):
        (RUN / "samples" / f"eval-{version:06d}.jsonl").touch()
    for step in saved:
        checkpoint = RUN / "checkpoints" / f"step-{step:06d}"
        checkpoint.mkdir(parents=True, exist_ok=True)
        (checkpoint / "queue.msgpack").write_bytes(states[step])
        files = {"queue.msgpack": sum_of(checkpoint / "queue.msgpack")}
        write_manifest(checkpoint, CheckpointManifest(step=step, reward=None, files=files))


def resume(config: Config, *, without_journal: bool = False) -> tuple[Config, str, str]:
    """Resumes a run up to the start of its roles. Returns its config, the queue's state and the output."""
    output = io.StringIO()
    with RunFolder(config) as folder:
        assert folder.earlier_s
        console = Console(file=output, width=1000)
        config, state = resume_point(folder.path, config, console, without_journal=without_journal)
        folder.begin(config, loopback_endpoints(1), [])
    return config, state, output.getvalue()


def contents(folder: Path) -> dict[str, bytes]:
    """All files of the folder but those that differ between any two launches."""
    differ = {"attempts.json", "fingerprints.json", "hosts.json"}
    files = [path for path in folder.rglob("*") if path.is_file() and path.name not in differ]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def steps_of(file: Path) -> list[int]:
    return [int(row["step"]) for row in read_metrics(file)]


def test_a_run_goes_back_to_the_checkpoint_before_the_onset(
    stopped: Callable[..., Config], collapsed: tuple[dict[str, Any], dict[int, bytes]]
) -> None:
    summary, states = collapsed
    config, state, output = resume(stopped(config_of()))
    aside = RUN / "rollback-1"
    assert config.learner.lr == load_config(RUN / "config.yaml").learner.lr == LR / 2
    assert finished_steps(RUN / "checkpoints") == [2, 4] and finished_steps(aside / "checkpoints") == [6]
    assert steps_of(RUN / "metrics.jsonl") == [1, 2, 3, 4] and steps_of(aside / "metrics.jsonl") == [5, 6, 7]
    assert Path(state) == RUN / "queue.msgpack" and Path(state).read_bytes() == states[4]
    assert steps_of(RUN / "samples/trained.jsonl") == [1, 2, 3, 4]
    assert steps_of(aside / "samples/trained.jsonl") == [5, 6, 7]
    assert evaluated_versions(RUN) == [4] and evaluated_versions(aside) == [6]
    assert not (RUN / "journal").exists() and (aside / "journal" / "00000001.arrow").read_bytes() == b"journal"
    assert (RUN / "trace.parquet").read_bytes() == (aside / "trace.parquet").read_bytes() == b"trace"
    assert not (RUN / "summary.json").exists()
    (record,) = read_rollbacks(RUN)
    assert record == {
        "collapsed_at_step": ONSET, "raised_step": RAISED, "stopped_at_step": RAISED, "to_step": 4,
        "lr_before": LR, "lr_after": LR / 2,
        "trained_tokens": (RAISED - 4) * summary["ledger"]["tokens"]["trained"] // RAISED, "aside": "rollback-1",
        "sentence": summary["collapse"]["sentence"],
    }  # fmt: skip
    assert output == (
        f"the training {record['sentence']}. It continues from step 4 with learner.lr = 0.001 -> 0.0005 (1 of 2); what "
        "came after is in runs/one/rollback-1\n"
    )


def test_without_a_checkpoint_from_before_it_goes_back_to_the_initial_model(stopped: Callable[..., Config]) -> None:
    config, state, output = resume(stopped(config_of(), saved=(6,)))
    assert (config.learner.lr, state) == (LR / 2, "") and "It continues from step 0 with" in output
    assert finished_steps(RUN / "checkpoints") == [] and not list(RUN.glob("trace.*"))
    assert steps_of(RUN / "metrics.jsonl") == [] and steps_of(RUN / "rollback-1" / "metrics.jsonl") == [1, *range(2, 8)]
    assert read_rollbacks(RUN)[0]["trained_tokens"] > 0


class Killed(BaseException):
    """The launcher was killed."""


@pytest.fixture
def kill_at(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """Kills before the given change of a file, counted from 0."""
    left = [-1]

    def counted(change: Callable[..., Any]) -> Callable[..., Any]:
        def do(*args: Any, **options: Any) -> Any:
            left[0] -= 1
            if left[0] == -1:
                raise Killed
            return change(*args, **options)

        return do

    for name in ("rename", "replace", "mkdir", "unlink"):
        monkeypatch.setattr(Path, name, counted(getattr(Path, name)))
    for name in ("copyfile", "move"):
        monkeypatch.setattr(shutil, name, counted(getattr(shutil, name)))
    monkeypatch.setattr(run_dir_module, "fingerprints", counted(run_dir_module.fingerprints))

    def kill_at(count: int) -> None:
        left[0] = count

    yield kill_at
    left[0] = -1


@pytest.mark.parametrize("saved", [SAVED_STEPS, (6,)])
def test_a_rollback_that_is_killed_anywhere_is_completed_once(
    stopped: Callable[..., Config], kill_at: Callable[[int], None], saved: tuple[int, ...]
) -> None:
    config = stopped(config_of(), saved=saved)
    shutil.copytree(RUN, "before")
    resume(config)
    expected = contents(RUN)
    kills = 0
    while True:
        shutil.rmtree(RUN)
        shutil.copytree("before", RUN)
        kill_at(kills)
        try:
            resume(config)
            break
        except Killed:
            kills += 1
        kill_at(-1)
        again, _, _ = resume(load_config(RUN / "config.yaml", {"resume": "must"}))
        assert again.learner.lr == LR / 2, f"killed before change {kills}"
        assert contents(RUN) == expected, f"killed before change {kills}"
    assert kills > 10


def test_a_launch_after_the_rollback_gets_the_state_while_the_journal_is_empty(stopped: Callable[..., Config]) -> None:
    _, state, _ = resume(stopped(config_of()))
    again, later, output = resume(load_config(RUN / "config.yaml", {"resume": "must"}))
    assert (again.learner.lr, later, output) == (LR / 2, state, "")
    shutil.rmtree(RUN / "rollback-1")  # no longer needed
    assert resume(load_config(RUN / "config.yaml", {"resume": "must"}))[1] == state


def test_a_launch_after_a_discarded_journal_gets_the_state_of_its_checkpoint(
    stopped: Callable[..., Config], collapsed: tuple[dict[str, Any], dict[int, bytes]]
) -> None:
    resume(stopped(config_of()))  # a rollback to step 4
    write_steps(collapsed[1], (2,))
    shutil.rmtree(RUN / "checkpoints" / "step-000004")
    for without_journal in (True, False):  # the launcher is killed in between
        wanted = load_config(RUN / "config.yaml", {"resume": "must"})
        assert Path(resume(wanted, without_journal=without_journal)[1]).read_bytes() == collapsed[1][2]


def test_a_rollback_that_is_not_in_its_file_is_refused(
    stopped: Callable[..., Config], collapsed: tuple[dict[str, Any], dict[int, bytes]]
) -> None:
    resume(stopped(config_of()))
    with RunFolder(load_config(RUN / "config.yaml", {"resume": "must"})) as folder:
        folder.write_summary(folder.summary(collapsed[0]))
    (RUN / "rollbacks.json").unlink()
    with pytest.raises(ConfigError, match=r"rollbacks\.json: has 0 of the 1 rollbacks in summary\.json; restore it"):
        resume(load_config(RUN / "config.yaml", {"resume": "must"}))


def test_each_collapse_halves_the_rate_until_the_last_one_fails(
    stopped: Callable[..., Config], collapsed: tuple[dict[str, Any], dict[int, bytes]]
) -> None:
    config = stopped(config_of())
    for number in range(1, MAX_ROLLBACKS + 1):
        assert is_due(config, read_summary(RUN))
        config, _, _ = resume(load_config(RUN / "config.yaml", {"resume": "must"}))
        assert config.learner.lr == LR / 2**number
        write_steps(collapsed[1], SAVED_STEPS)
        with RunFolder(load_config(RUN / "config.yaml", {"resume": "must"})) as folder:
            summary = folder.summary(collapsed[0])
            folder.write_summary(summary)
    assert [(one["lr_before"], one["to_step"], one["aside"]) for one in summary["rollbacks"]] == [
        (LR, 4, "rollback-1"),
        (LR / 2, 4, "rollback-2"),
    ]
    assert not is_due(config, summary)
    assert collapse_error(config, summary) == (
        f"the training {summary['collapse']['sentence']}. After 2 rollbacks "
        "`asyncrl launch --resume --run one --discard-journal learner.lr=0.000125` "
        "continues from runs/one/checkpoints/step-000004, the newest checkpoint from before"
    )
    wanted = load_config(RUN / "config.yaml", {"resume": "must", "learner.lr": 1.25e-4})
    config, state, _ = resume(wanted, without_journal=True)
    assert (
        config.learner.lr == 1.25e-4 and Path(state) == RUN / "queue.msgpack" and (RUN / "journal.discarded-1").is_dir()
    )
    assert finished_steps(RUN / "checkpoints") == [2, 4] and len(read_rollbacks(RUN)) == MAX_ROLLBACKS


def test_the_users_rate_wins_and_that_of_a_repeated_command_does_not(stopped: Callable[..., Config]) -> None:
    stopped(config_of())
    config, _, _ = resume(load_config(RUN / "config.yaml", {"resume": "must", "learner.lr": 3e-4}))
    assert config.learner.lr == read_rollbacks(RUN)[0]["lr_after"] == 3e-4
    repeated = config_of(resume="auto")
    assert repeated.learner.lr == LR and resume(repeated)[0].learner.lr == 3e-4
    config, _, _ = resume(load_config(RUN / "config.yaml", {"resume": "must", "learner.lr": LR}))
    assert config.learner.lr == LR


def test_a_run_that_stops_names_what_to_do_and_that_works(stopped: Callable[..., Config]) -> None:
    config = stopped(config_of(learner__on_collapse="stop"))
    assert not is_due(config, read_summary(RUN))
    summary = read_summary(RUN)
    assert collapse_error(config, summary) == (
        f"the training {summary['collapse']['sentence']}. "
        "`asyncrl launch --resume --run one learner.on_collapse=rollback learner.lr=0.0005` continues from "
        "runs/one/checkpoints/step-000004, the newest checkpoint from before"
    )
    assert collapse_error(config, summary | {"collapse": {"stopped": False}}) == ""
    advised = {"resume": "must", "learner.on_collapse": "rollback", "learner.lr": 5e-4}
    config, _, _ = resume(load_config(RUN / "config.yaml", advised))
    assert (config.learner.lr, read_rollbacks(RUN)[0]["to_step"]) == (5e-4, 4)


def test_discard_journal_needs_a_checkpoint_from_before(stopped: Callable[..., Config]) -> None:
    stopped(config_of(learner__on_collapse="stop"), saved=(6,))
    with pytest.raises(ConfigError, match="has no complete checkpoint from before step 5, in which the training began"):
        discard_journal(RUN)
